"""The network: its configuration, its start weights and a forward pass for training.

Start weights. Learning to look something up from random weights costs most of a CPU's budget, so the parts of the circuit
that are known beforehand are put in place, and everything is trained afterwards:

- layer 0: six heads look back exactly 1..6 tokens. In the fastest RoPE frequencies theta_f (a pair is dims f and f + d/2)
  the key bias is (A, 0) and the query bias of the head for offset o is A (cos(o theta_f), -sin(o theta_f)), so that the score
  depends on the distance alone and peaks at o. Each head writes a code of its token into a subspace of its own.
- layers 1 and 2: heads match the codes "o tokens back" of a key with the codes "o - 1 tokens back" of the query, o = 1..6, in
  the RoPE dims that hardly turn over the whole context, and copy the token they find.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

MAX_POSITION = 17408  # 16K prompts and their answers
LOOK_BACK = 6  # offsets 1..6
_POSITION_FREQUENCIES = 8  # RoPE frequencies that serve the look-back
_MATCH, _COPY = 1.5, 3.0  # sharpness of the first matching heads; length of what they copy, in embeddings
_STATIC_TURN = 0.75  # rad over the whole context; slower frequencies count as not turning


def make_config(
    vocab_size: int, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, special: dict[str, int]
) -> Qwen2Config:
    """Qwen2 with tied embeddings; head dimension is 64 for the shipped model."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e10},
        tie_word_embeddings=True,
        use_sliding_window=False,
        rms_norm_eps=1e-6,
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["pad"],
    )


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns] with orthonormal rows (rows <= columns)."""
    q, _ = torch.linalg.qr(torch.randn(columns, rows, generator=generator))
    return q.T.contiguous()


@torch.no_grad()
def start_weights(model: Qwen2ForCausalLM, seed: int) -> None:
    """Writes the start weights into the model (see the module docstring)."""
    c = model.config
    d, hidden, kv_heads = c.head_dim, c.hidden_size, c.num_key_value_heads
    group = c.num_attention_heads // kv_heads
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02, generator=g)
        elif name.endswith("bias"):
            parameter.zero_()
    model.model.embed_tokens.weight.normal_(0.0, hidden**-0.5, generator=g)
    if c.num_attention_heads < LOOK_BACK or c.num_hidden_layers < 2:
        return  # too small for the circuit: plain start (tests)

    theta = c.rope_parameters["rope_theta"] ** (-torch.arange(0, d // 2) / (d // 2))  # [d/2], rad per token
    fast = torch.arange(_POSITION_FREQUENCIES)
    slow = torch.nonzero(theta * c.max_position_embeddings < _STATIC_TURN).flatten()
    static = torch.cat([slow, slow + d // 2])  # RoPE dims that hardly turn

    # The residual stream at the start: `area` dims of token embedding, then one code of `code` dims per offset.
    code = hidden // (LOOK_BACK + 2)
    area = hidden - LOOK_BACK * code
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, 0.3 * hidden**-0.5, generator=g)
    embedding[:, :area].normal_(0.0, area**-0.5, generator=g)

    # Layer 0: look back.
    code_of = torch.zeros(code, hidden)  # token embedding -> code
    code_of[:, :area] = _orthonormal(code, area, g)
    readers = [code_of * 1.4]  # per offset [code, hidden]: residual stream -> code; offset 0 is the token itself
    attention = model.model.layers[0].self_attn
    amplitude = 10.0
    for offset in range(1, LOOK_BACK + 1):
        head = offset - 1
        kv = head // group
        attention.q_proj.weight[head * d : (head + 1) * d] *= 0.1
        attention.k_proj.weight[kv * d : (kv + 1) * d] *= 0.1
        attention.k_proj.bias[kv * d + fast] = amplitude
        attention.q_proj.bias[head * d + fast] = amplitude * torch.cos(offset * theta[fast])
        attention.q_proj.bias[head * d + d // 2 + fast] = -amplitude * torch.sin(offset * theta[fast])
        attention.v_proj.weight[kv * d : kv * d + code] = code_of
        reader = torch.zeros(code, hidden)
        reader[:, area + head * code : area + (head + 1) * code] = torch.eye(code)
        # a normed token has length sqrt(hidden), its code about 0.7 of that: make it 0.7 of an embedding's length
        attention.o_proj.weight[:, head * d : head * d + code] = reader.T * hidden**-0.5
        readers.append(reader)

    # Layers 1 and 2: match and copy.
    for layer in model.model.layers[1:3]:
        attention = layer.self_attn
        attention.o_proj.weight *= 0.1  # values are long vectors here: noise in what is written would drown the copy
        for kv in range(kv_heads):
            scatter = [torch.randn(len(static), code, generator=g) / math.sqrt(len(static)) for _ in range(LOOK_BACK)]
            key = sum(scatter[o - 1] @ readers[o] for o in range(1, LOOK_BACK + 1))
            attention.k_proj.weight[kv * d + static] += _MATCH * key
            attention.v_proj.weight[kv * d : kv * d + area, :area] += torch.eye(area)
            for member in range(group):
                head = kv * group + member
                reach = max(LOOK_BACK - 2 * member, 2)
                query = sum(scatter[o - 1] @ readers[o - 1] for o in range(1, reach + 1))
                attention.q_proj.weight[head * d + static] += _MATCH * query
                attention.o_proj.weight[:area, head * d : head * d + area] += torch.eye(area) * (
                    _COPY / 8 / group / kv_heads
                )


@torch.no_grad()
def widened(model: Qwen2ForCausalLM, head_dim: int, seed: int) -> Qwen2ForCausalLM:
    """A copy with larger heads that computes the same function; the new dimensions are there to be trained.

    With head_dim a multiple of the old one the old RoPE frequencies are among the new ones, so each old pair of dimensions
    moves to the pair of its frequency. Queries grow to undo the softmax scale. New dimensions have small random keys
    and values, and zero queries and outputs.
    """
    old = model.config.head_dim
    if head_dim % old:
        raise ValueError(f"head_dim={head_dim}: must be a multiple of {old}")
    config = copy.deepcopy(model.config)
    config.head_dim = head_dim
    config.max_position_embeddings = max(config.max_position_embeddings, MAX_POSITION)
    made = Qwen2ForCausalLM(config).float()
    frequency = torch.arange(old // 2) * (head_dim // old)
    pairs = torch.cat([frequency, frequency + head_dim // 2])  # [old]: new place of each old query and key dimension
    plain = torch.arange(old)
    g = torch.Generator().manual_seed(seed)
    source, target = model.state_dict(), made.state_dict()
    for name, new in target.items():
        weight = source[name].float()
        projection = name.split(".")[-2]
        if projection in ("q_proj", "k_proj", "v_proj"):
            heads = weight.shape[0] // old
            grown = torch.zeros(heads, head_dim, *weight.shape[1:])  # [H, d, hidden] or [H, d]
            if projection != "q_proj" and weight.dim() == 2:
                grown.normal_(0.0, 0.02, generator=g)
            scale = math.sqrt(head_dim / old) if projection == "q_proj" else 1.0
            grown[:, plain if projection == "v_proj" else pairs] = scale * weight.view(heads, old, *weight.shape[1:])
            new.copy_(grown.view(new.shape))
        elif projection == "o_proj":
            grown = torch.zeros(weight.shape[0], weight.shape[1] // old, head_dim)
            grown[:, :, :old] = weight.view(weight.shape[0], -1, old)
            new.copy_(grown.view(new.shape))
        else:
            new.copy_(weight)
    return made


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, L, d]; cos, sin [B, 1, L, d/2], float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def hidden_states(model: Qwen2ForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states [B, L, hidden] of ids [B, L] at positions [B, L], causal over the whole row.

    transformers' own forward takes a jump in position ids for the border of a packed sequence and masks across it; here a
    jump is only a distance. With positions 0..L-1 both give the same.
    """
    c = model.config
    d = c.head_dim
    theta = c.rope_parameters["rope_theta"] ** (
        -torch.arange(0, d // 2, device=ids.device, dtype=torch.float32) / (d // 2)
    )
    angle = positions[:, None, :, None].float() * theta  # [B, 1, L, d/2]
    cos, sin = angle.cos(), angle.sin()
    batch, length = ids.shape
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention = layer.self_attn
        h = F.rms_norm(x, (c.hidden_size,), layer.input_layernorm.weight, c.rms_norm_eps)
        q = attention.q_proj(h).view(batch, length, -1, d).transpose(1, 2)  # [B, H, L, d]
        k = attention.k_proj(h).view(batch, length, -1, d).transpose(1, 2)  # [B, H_kv, L, d]
        v = attention.v_proj(h).view(batch, length, -1, d).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + attention.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        h = F.rms_norm(x, (c.hidden_size,), layer.post_attention_layernorm.weight, c.rms_norm_eps)
        x = x + layer.mlp(h)
    return F.rms_norm(x, (c.hidden_size,), model.model.norm.weight, c.rms_norm_eps)


def answer_loss(
    model: Qwen2ForCausalLM,
    ids: Tensor,
    weights: Tensor,
    positions: Tensor,
    forward: Callable[[Qwen2ForCausalLM, Tensor, Tensor], Tensor] = hidden_states,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted cross-entropy of the tokens with weight > 0, their accuracy, accuracy of those with weight > 1)."""
    hidden = forward(model, ids, positions)[:, :-1]
    target, weight = ids[:, 1:], weights[:, 1:]
    chosen = weight > 0
    logits = model.lm_head(hidden[chosen]).float()  # [n, V]
    target, weight = target[chosen], weight[chosen]
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    right = (logits.argmax(-1) == target).float()
    return loss, right.mean().detach(), right[weight > 1].mean().detach()
