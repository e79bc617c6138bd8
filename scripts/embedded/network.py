"""The network: its configuration, its start weights, wider heads, and a forward pass for training.

Start weights. From random weights, most of the training time goes into learning to look something up. So the known parts of
that circuit are put in place first, and everything is trained afterwards:

- layer 0: six heads look back exactly 1..6 tokens. In the fastest RoPE frequencies theta_f (a pair is dims f and f + d/2)
  the key bias is (A, 0) and the query bias of the head for offset o is A (cos(o theta_f), -sin(o theta_f)), so that the score
  depends on the distance alone and peaks at o. Each head writes a code of its token into a subspace of its own.
- layers 1 and 2: heads match the codes "o tokens back" of a key with the codes "o - 1 tokens back" of the query, o = 1..6, in
  the RoPE dims that hardly turn over the whole context, and copy the token there. With `skip`, half of them match the codes
  "o + skip tokens back" of the query instead: they find what follows a word that stands a few tokens before the query.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

Forward = Callable[[Qwen2ForCausalLM, Tensor, Tensor], Tensor]
# 16K prompts and their answers.
MAX_POSITION = 17408
# Layer 0 looks 1..6 tokens back.
LOOK_BACK = 6
# RoPE frequencies that serve the look-back.
_POSITION_FREQUENCIES = 8
# Sharpness of the first matching heads; length of what they copy, in embeddings.
_MATCH, _COPY = 1.5, 3.0
# Rad over the whole context; slower frequencies count as not turning.
_STATIC_TURN = 0.75


def make_config(
    vocab_size: int, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, special: dict[str, int]
) -> Qwen2Config:
    """Qwen2 with tied embeddings and heads of dimension 64. `widened` enlarges them to the shipped model's 128."""
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


class _Circuit:
    """The sizes that start weights are laid out by, and their random generator.

    The residual stream at the start holds `area` dimensions of token embedding, then one code of `code` dimensions per
    offset. theta (d/2,): rotation of each RoPE frequency in rad per token. static: the dimensions of a head that hardly
    turn over the whole context.
    """

    def __init__(self, config: Qwen2Config, generator: torch.Generator) -> None:
        self.d, self.hidden, self.kv_heads = config.head_dim, config.hidden_size, config.num_key_value_heads
        self.group, self.generator = config.num_attention_heads // self.kv_heads, generator
        half = self.d // 2
        self.theta = config.rope_parameters["rope_theta"] ** (-torch.arange(0, half) / half)
        slow = torch.nonzero(self.theta * config.max_position_embeddings < _STATIC_TURN).flatten()
        self.static = torch.cat([slow, slow + half])
        self.code = self.hidden // (LOOK_BACK + 2)
        self.area = self.hidden - LOOK_BACK * self.code


@torch.no_grad()
def start_weights(model: Qwen2ForCausalLM, seed: int, skip: int = 0) -> None:
    """Write the start weights into the model (see the module docstring); plain random ones into one that is too small."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, config.hidden_size**-0.5, generator=generator)
    if config.num_attention_heads < LOOK_BACK or config.num_hidden_layers < 2:
        return
    circuit = _Circuit(config, generator)
    embedding.normal_(0.0, 0.3 * config.hidden_size**-0.5, generator=generator)
    embedding[:, : circuit.area].normal_(0.0, circuit.area**-0.5, generator=generator)
    readers = _look_back(model.model.layers[0].self_attn, circuit)
    for layer in model.model.layers[1:3]:
        _match_and_copy(layer.self_attn, circuit, readers, skip)


def _look_back(attention: torch.nn.Module, circuit: _Circuit) -> list[Tensor]:
    """Heads that write a code of the token 1..LOOK_BACK back into a subspace of its own.

    Returns per offset, from 0 for the token itself, the matrix (code, hidden) that reads its code from the stream.
    """
    d, code = circuit.d, circuit.code
    fast = torch.arange(_POSITION_FREQUENCIES)
    amplitude = 10.0
    # Token embedding -> code.
    code_of = torch.zeros(code, circuit.hidden)
    code_of[:, : circuit.area] = _orthonormal(code, circuit.area, circuit.generator)
    readers = [code_of * 1.4]
    for offset in range(1, LOOK_BACK + 1):
        head = offset - 1
        kv = head // circuit.group
        attention.q_proj.weight[head * d : (head + 1) * d] *= 0.1
        attention.k_proj.weight[kv * d : (kv + 1) * d] *= 0.1
        attention.k_proj.bias[kv * d + fast] = amplitude
        attention.q_proj.bias[head * d + fast] = amplitude * torch.cos(offset * circuit.theta[fast])
        attention.q_proj.bias[head * d + d // 2 + fast] = -amplitude * torch.sin(offset * circuit.theta[fast])
        attention.v_proj.weight[kv * d : kv * d + code] = code_of
        reader = torch.zeros(code, circuit.hidden)
        reader[:, circuit.area + head * code : circuit.area + (head + 1) * code] = torch.eye(code)
        # A normed token has length sqrt(hidden), its code about 0.7 of that: make it 0.7 of an embedding's length.
        attention.o_proj.weight[:, head * d : head * d + code] = reader.T * circuit.hidden**-0.5
        readers.append(reader)
    return readers


def _match_and_copy(attention: torch.nn.Module, circuit: _Circuit, readers: list[Tensor], skip: int) -> None:
    """Heads that attend where the tokens before match those at the query, and copy the token there.

    skip: if not 0, every second key/value head matches the tokens that many places further back instead, and the query's own.
    """
    d, area, static = circuit.d, circuit.area, circuit.static
    offsets = range(1, LOOK_BACK + 1)
    # Values are long vectors here: noise in the output projection would drown the copy.
    attention.o_proj.weight *= 0.1
    for kv in range(circuit.kv_heads):
        size = len(static), circuit.code
        scatter = [torch.randn(size, generator=circuit.generator) / math.sqrt(len(static)) for _ in offsets]
        key = sum(scatter[o - 1] @ readers[o] for o in offsets)
        attention.k_proj.weight[kv * d + static] += _MATCH * key
        attention.v_proj.weight[kv * d : kv * d + area, :area] += torch.eye(area)
        for member in range(circuit.group):
            head = kv * circuit.group + member
            reach = max(LOOK_BACK - 2 * member, 2)
            if skip and kv % 2:
                far = range(1, min(reach, LOOK_BACK - skip) + 1)
                query = scatter[0] @ readers[0] + sum(scatter[o - 1] @ readers[o + skip] for o in far)
            else:
                query = sum(scatter[o - 1] @ readers[o - 1] for o in range(1, reach + 1))
            attention.q_proj.weight[head * d + static] += _MATCH * query
            copied = torch.eye(area) * (_COPY / 8 / circuit.group / circuit.kv_heads)
            attention.o_proj.weight[:area, head * d : head * d + area] += copied


@torch.no_grad()
def widened(model: Qwen2ForCausalLM, head_dim: int, seed: int) -> Qwen2ForCausalLM:
    """A copy with larger heads that computes the same function; the new dimensions are there to be trained.

    head_dim must be a multiple of the old one (else ValueError): the old RoPE frequencies are then among the new ones, and
    each old pair of dimensions moves to the pair of its frequency. Queries grow to undo the softmax scale. New dimensions
    have small random keys and values, and zero queries and outputs.
    """
    old = model.config.head_dim
    if head_dim % old:
        raise ValueError(f"head_dim={head_dim}: must be a multiple of {old}")
    config = copy.deepcopy(model.config)
    config.head_dim = head_dim
    config.max_position_embeddings = max(config.max_position_embeddings, MAX_POSITION)
    made = Qwen2ForCausalLM(config).float()
    frequency = torch.arange(old // 2) * (head_dim // old)
    # New place of each old query and key dimension, [old].
    pairs = torch.cat([frequency, frequency + head_dim // 2])
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


def hidden_states(model: Qwen2ForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states [B, L, hidden] of ids [B, L] at positions [B, L], causal over the whole row.

    Without a mask, transformers reads a jump in position ids as the border of a packed sequence and masks across it; here
    a jump is only a distance.
    """
    mask = torch.ones_like(ids)
    return model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def answer_loss(
    model: Qwen2ForCausalLM, ids: Tensor, weights: Tensor, positions: Tensor, forward: Forward = hidden_states
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
