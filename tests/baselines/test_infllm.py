"""InfLLM: the whole algorithm against a slow reference, its limits, the block cache, bytes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from baselines.infllm import InfLLM
from baselines.infllm.block_store import HostBlockStore
from baselines.infllm.layer import InfLLMLayer
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach, rope
from pqcache.selective.column_sums import add_column_sums
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import attention_kernel
from tests.baselines.common import selections
from tests.invariants.drive import Session, logits, tokens

D = 8
HALF = Budget(ratio=0.5)  # not the no-op; sizes are given explicitly


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Driver:
    """One layer on its own: left-padded rows of given q, k, v before RoPE, as one prompt, then turns and decode steps."""

    def __init__(self, method: InfLLM, h: int, h_kv: int, dtype: torch.dtype, d: int = D) -> None:
        config = LlamaConfig(hidden_size=h * d, num_attention_heads=h, num_key_value_heads=h_kv, head_dim=d)
        self.rotary = LlamaRotaryEmbedding(config)
        with torch.device("meta"):  # its weights play no part
            self.module = LlamaAttention(config, 0).eval()
        self.ledger = Ledger()
        kernel = attention_kernel("sdpa")[1]
        self.cache: Any = SimpleNamespace(
            ledger=self.ledger,
            watchers=[],
            observers=[lambda layer, *_: self.seen.append(layer.selected)],
            attn="sdpa",
            kernel=kernel,
        )
        self.cache.note_resident = lambda: None
        self.seen: list[Any] = []
        self.layer = method.make_layer(0, ModelShape(1, h, h_kv, d))
        self.dtype, self.d, self.past, self.columns = dtype, d, [], 0

    def context(self, step: Step, t: int, n: int) -> tuple[LayerContext, torch.Tensor]:
        first = torch.tensor([p - (t - c) for p, c in zip(step.past, step.counts)])
        at = (first[:, None] + torch.arange(t)).clamp_min(0)
        cos, sin = self.rotary(torch.zeros(1, dtype=self.dtype), position_ids=at)
        nothing: Any = None
        ctx = LayerContext(0, self.module, self.cache, nothing, cos, sin, at, [], self.rotary, step)
        ctx.scaling = self.d**-0.5
        return ctx, at

    def feed(self, q, k, v, lengths: list[int], *, decode: bool = False, chunk: int | None = None) -> torch.Tensor:
        """q (n, h, t, d), k, v (n, h_kv, t, d), row r's last lengths[r] columns real. Returns (n, t, h, d)."""
        n, t = q.shape[0], q.shape[2]
        past = self.past or [0] * n
        final = [a + b for a, b in zip(past, lengths)]
        out = []
        for start in range(0, t, chunk or t):
            part = slice(start, min(t, start + (chunk or t)))
            width = part.stop - start
            counts = [min(width, max(0, part.stop - (t - length))) for length in lengths]
            step = Step(decode, width, past, counts, final, not decode and part.stop == t, first=self.columns == 0)
            self.layer.check_step(step)
            self.ledger.decoding = decode
            ctx, _ = self.context(step, width, n)
            turned = [
                rope.rotate(self.module, x[:, :, part].to(self.dtype), ctx.cos, ctx.sin).to(self.dtype) for x in (q, k)
            ]
            mask = None
            if step.padded:
                pads = torch.tensor([width - c for c in counts])[:, None, None]
                query, key = torch.arange(width)[:, None], torch.arange(width)[None]
                mask = (((key <= query) & (key >= pads)) | (query < pads))[:, None]
            out.append(self.layer.attend(*turned, v[:, :, part].to(self.dtype), mask, ctx))
            past, self.columns = step.total, self.columns + width
        self.past = past
        if decode:
            self.ledger.end_step()
        return torch.cat(out, 1)


def turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """x (..., d) rotated by angles of `by` (...) positions: an independent RoPE in complex numbers, base 10000."""
    half = x.shape[-1] // 2
    angle = by[..., None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def reference(method: InfLLM, q, k, v, phases: list[tuple[str, int]]) -> torch.Tensor:
    """One row, token by token and with one softmax over all a query attends to: q (h, s, d), k, v (h_kv, s, d) before RoPE.

    phases: ("prompt", tokens) or ("decode", tokens), in order. Returns (s, h, d).
    """
    h, _, d = q.shape
    k, v = k.repeat_interleave(h // k.shape[0], 0), v.repeat_interleave(h // v.shape[0], 0)
    block, n_init = method.block, method.n_init
    left, blocks, received = 0, [], torch.zeros(h, q.shape[1], dtype=torch.float64)
    chunks, at = [], 0
    for phase, count in phases:
        end = at + count
        if phase == "prompt":  # sizes are planned for the whole prompt, and anew for a turn
            plan = method.plan(end, 0, 1)
        while at < end:
            exc = 1 if phase == "decode" else min(method.exc_block, plan.window)
            stop = min(end, (at // exc + 1) * exc)
            chunks.append((phase, at, stop, plan))
            at = stop
    out = torch.zeros(q.shape[1], h, d, dtype=torch.float64)
    for phase, a, b, plan in chunks:
        window = plan.window
        exact = phase == "prompt" and method.dense_prefill
        mean = turn(q[:, a:b], torch.tensor(window - 1)).mean(1)
        similar = torch.tensor([[float(rep[head] @ mean[head]) for rep in blocks] for head in range(h)])
        for head in range(h):
            score = similar[head] if method.per_head else similar.sum(0)
            chosen = sorted(range(len(blocks)), key=lambda i, score=score: (-float(score[i]), i))[: plan.topk]
            for p in range(a, b):
                edge = max(left, p - window + 1)
                near = list(range(edge, p + 1))
                far = [j for j in range(edge) if j < n_init or j >= n_init + block * len(blocks)]
                far += [n_init + block * i + x for i in chosen for x in range(block)]
                if exact:
                    far = list(range(edge))
                distance = [p - j if exact or method.true_positions else window - 1 for j in far]
                distance = torch.tensor(distance + [p - j for j in near])
                keys = k[head, far + near]
                weight = ((turn(q[head, p].expand_as(keys), distance) * keys).sum(-1) * d**-0.5).softmax(0)
                out[p, head] = weight @ v[head, far + near]
                received[head, near] += weight[len(far) :]
        left = max(left, b - window)
        while left - n_init >= block * (len(blocks) + 1):
            start = n_init + block * len(blocks)
            best = received[:, start : start + block].argsort(dim=1, descending=True, stable=True)[:, : method.reps]
            blocks.append(torch.stack([k[head, start + best[head]].mean(0) for head in range(h)]))
    return out


lengths_ = st.lists(st.integers(1, 60), min_size=1, max_size=3)
hypers = st.fixed_dictionaries(
    {
        "block": st.integers(1, 6),
        "reps": st.integers(1, 3),
        "n_local": st.integers(2, 20),
        "topk": st.integers(0, 5),
        "n_init": st.integers(0, 5),
        "exc_block": st.integers(1, 9),
        "max_cached_blocks": st.integers(1, 6),
        "store": st.sampled_from(["resident", "host"]),
        "per_head": st.booleans(),
        "dense_prefill": st.booleans(),
        "true_positions": st.booleans(),
    }
)


def make(hyper: dict[str, Any], **extra: Any) -> InfLLM:
    hyper = {"budget": HALF, **hyper, **extra}
    return InfLLM(**{**hyper, "reps": min(hyper["reps"], hyper["block"])})


def run(
    method: InfLLM,
    seed: int,
    lengths: list[int],
    group: int,
    dtype: torch.dtype,
    again: int = 7,
    steps: int = 9,
    naive_too: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Driver]:
    """A prompt, `steps` tokens, a turn of `again`, and `steps` more: outputs per row (tokens, h, d), and the reference's."""
    n, h_kv, longest = len(lengths), 2, max(lengths)
    total = longest + 2 * steps + again
    q, k, v = (drawn(seed + i, n, heads, total, D) * 2 for i, heads in enumerate((2 * group, h_kv, h_kv)))
    driver = Driver(method, 2 * group, h_kv, dtype)
    outs, at = [], longest
    outs.append(driver.feed(*(x[:, :, :longest] for x in (q, k, v)), lengths))
    for count in (1,) * steps + (again,) + (1,) * steps:
        part = [x[:, :, at : at + count] for x in (q, k, v)]
        outs.append(driver.feed(*part, [count] * n, decode=count == 1))
        at += count
    got = torch.cat(outs, 1).double()
    mine, naive = [], []
    for row, length in enumerate(lengths):
        real = slice(longest - length, None)
        mine.append(got[row, real])
        if not naive_too:
            continue
        phases = [("prompt", length), ("decode", steps), ("prompt", again), ("decode", steps)]
        naive.append(reference(method, q[row, :, real], k[row, :, real], v[row, :, real], phases))
    return mine, naive, driver


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, group=st.sampled_from([1, 2]), hyper=hypers)
def test_the_whole_algorithm_equals_a_slow_reference(
    seed: int, lengths: list[int], group: int, hyper: dict[str, Any]
) -> None:
    """Padded rows, two prompts and two answers; the reference takes one softmax over the concatenated logits."""
    mine, naive, _ = run(make(hyper), seed, lengths, group, torch.float32)
    for a, b in zip(mine, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=lengths_,
    hyper=hypers,
    ratio=st.floats(0.1, 0.9),
    again=st.integers(2, 60),
)
def test_a_turn_plans_anew(seed: int, lengths: list[int], hyper: dict[str, Any], ratio: float, again: int) -> None:
    """The window grows with the budget; tokens that have left it stay out. A row of init tokens only begins dense."""
    method = make(hyper, n_local=None, topk=None, budget=Budget(ratio=ratio))
    mine, naive, _ = run(method, seed, lengths, 2, torch.float32, again)
    for a, b in zip(mine, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, group=st.sampled_from([1, 2]), hyper=hypers)
def test_in_bf16_it_differs_by_rounding(seed: int, lengths: list[int], group: int, hyper: dict[str, Any]) -> None:
    """Every block is retrieved: which ones win is not decided by the last bit."""
    mine, naive, _ = run(make(hyper, topk=100), seed, lengths, group, torch.bfloat16)
    for a, b in zip(mine, naive, strict=True):
        assert (a - b).abs().mean() < 0.03
        assert (a - b).abs().max() < 0.6


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=lengths_,
    group=st.sampled_from([1, 2]),
    hyper=hypers,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([85, sys.maxsize]),
)
def test_a_window_that_holds_everything_is_dense(
    seed: int, lengths: list[int], group: int, hyper: dict[str, Any], dtype: torch.dtype, window: int
) -> None:
    mine, naive, driver = run(make(hyper, n_local=window), seed, lengths, group, dtype)
    for a, b in zip(mine, naive, strict=True):  # with that window the reference is plain attention at true distances
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert driver.layer.memory.blocks.counts == [0] * len(lengths)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, hyper=hypers)
def test_with_all_blocks_retrieved_representatives_do_not_matter(
    seed: int, lengths: list[int], hyper: dict[str, Any]
) -> None:
    hyper = {**hyper, "block": 4}
    outs = [
        run(make(hyper, topk=50, reps=reps), seed, lengths, 2, torch.float32, naive_too=False)[0] for reps in (1, 4)
    ]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=lengths_, hyper=hypers)
def test_every_token_is_stored_in_one_place(seed: int, lengths: list[int], hyper: dict[str, Any]) -> None:
    """Sink tokens, blocks, and what `near` holds behind them: K and V of each position once, in its own form."""
    method = make(hyper)
    _, _, driver = run(method, seed, lengths, 1, torch.float32, naive_too=False)
    memory = driver.layer.memory
    k, v = (drawn(seed + i, len(lengths), 2, max(lengths) + 25, D) * 2 for i in (1, 2))
    for row, length in enumerate(lengths):
        total, pad = length + 25, max(lengths) - length
        start, left = memory.block_ends()[row], max(0, total - method.n_local)
        assert memory.left[row] == left
        assert memory.blocks.counts[row] == max(0, left - method.n_init) // method.block
        want = [x[row, :, pad:].float() for x in (k, v)]
        if method.true_positions:
            want[0] = turn(want[0].double(), torch.arange(total)).float()
        cut = min(start, left)
        blocks = memory.blocks.whole(row)
        for i, form in enumerate((memory.far, 2)):
            held = memory.near.view(form, memory.near.end - total + cut, memory.near.end, slice(row, row + 1))[0]
            parts = [memory.sinks[i][row, :, :cut], *([blocks[i]] if blocks.numel() else []), held]
            torch.testing.assert_close(torch.cat(parts, 1), want[i], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("per_head", [False, True])
def test_one_token_per_block_is_the_exact_top(llama: PreTrainedModel, per_head: bool) -> None:
    """Per layer by the logits of all heads summed, or per query head; keys before RoPE, the query at the constant distance."""
    method = InfLLM(block=1, n_init=4, n_local=10, topk=6, per_head=per_head, dense_prefill=True, budget=HALF)
    cache = SelectiveCache(llama, method)
    checked = 0

    def observe(layer: InfLLMLayer, q: torch.Tensor, selected: Any) -> None:
        nonlocal checked
        past = layer.memory.lengths[0] - 1
        raw = layer.memory.blocks.whole(0)[0].repeat_interleave(2, 0)[:, : selected.candidates.ends[0] - 4]
        module, rotary = llama.model.layers[layer.layer_idx].self_attn, llama.model.rotary_emb
        plain = rope.unrotate(module, q, *rope.tables(rotary, q, torch.tensor([[past]])))
        far = rope.rotate(module, plain, *rope.tables(rotary, q, torch.tensor([[9]])))[0]
        scores = (far * raw).sum(-1)
        scores = scores if per_head else scores.sum(0, keepdim=True)
        best = scores.topk(6).indices.sort(-1).values + 4
        assert torch.equal(selected.indices[0], best)
        checked += 1

    cache.observers.append(observe)
    with attach(llama):
        session = Session(llama, cache, [tokens(70, 1)])
        for token in tokens(8, 2):
            session.step([token])
    assert checked == 24


@torch.no_grad()
def test_attended_tokens_are_what_is_reported(llama: PreTrainedModel) -> None:
    """4 init tokens, 3 blocks of 5, a window of 20 and one to five tokens between window and blocks, every step."""
    method = InfLLM(n_init=4, n_local=20, topk=3, block=5, budget=HALF)
    for i, (_, selected) in enumerate(selections(llama, method, 100, 12)):
        past = 100 + i // 3
        (hi,), (local,) = selected.candidates.ends, selected.local
        assert hi == 4 + 5 * ((past - 20 - 4) // 5)
        assert 4 + (hi - 4) + local == past
        assert 20 <= local <= 24
        assert selected.indices.shape == (1, 1, 15)
        assert (selected.indices.view(3, 5) == selected.indices.view(3, 5)[:, :1] + torch.arange(5)).all()
        assert not ((selected.indices.view(3, 5)[:, 0] - 4) % 5).any()
    cache = SelectiveCache(llama, method)
    with attach(llama):
        session = Session(llama, cache, [tokens(100, 1)])
        for token in tokens(10, 2):
            session.step([token])
    assert cache.ledger.attended(all_layers=True) == 4 + 15 + 20 + 3  # one to five between, on average three


@torch.no_grad()
@pytest.mark.parametrize("chunk", [8, 24])
def test_chunks_at_whole_execution_chunks_equal_one_block(llama: PreTrainedModel, chunk: int) -> None:
    method = InfLLM(n_init=4, n_local=16, topk=2, block=4, exc_block=8, budget=HALF)
    prompt, steps = [tokens(90, 21)], [[t] for t in tokens(6, 2)]
    whole = logits(llama, method, prompt, steps)
    torch.testing.assert_close(logits(llama, method, prompt, steps, chunk=chunk), whole)
    with attach(llama):

        def turns(parts: list[int] | None) -> torch.Tensor:
            session = Session(llama, SelectiveCache(llama, method), prompt)
            session.step([5])
            ids = tokens(30, 3)  # positions 91 .. 120
            if parts is None:
                session.turn([ids])
            else:
                session.cache.begin_turn(30)
                for size in parts:
                    session.feed(torch.tensor([ids[:size]]), None)
                    ids = ids[size:]
            return session.step([6])

        torch.testing.assert_close(turns([5, chunk, 25 - chunk]), turns(None))
        with pytest.raises(ValueError, match="ends at token 97 of row 0, inside .* chunks of 8 queries: allowed are"):
            turns([6, 24])


@torch.no_grad()
def test_short_prompts_take_any_chunks(llama: PreTrainedModel) -> None:
    """As long as every block is retrieved, it does not matter which queries would choose together."""
    method = InfLLM(n_init=4, n_local=40, topk=12, block=4, exc_block=16, budget=HALF)
    prompt, steps = [tokens(90, 21), tokens(33, 22)], [[t, t] for t in tokens(6, 2)]
    whole = logits(llama, method, prompt, steps)
    torch.testing.assert_close(logits(llama, method, prompt, steps, chunk=7), whole)


@torch.no_grad()
@pytest.mark.parametrize("flags", [{}, {"true_positions": True}, {"dense_prefill": True}, {"per_head": True}])
@pytest.mark.parametrize("cached", [1, 5])
def test_host_store_changes_nothing_but_where_blocks_live(llama: PreTrainedModel, flags: dict, cached: int) -> None:
    hyper = {"n_init": 4, "n_local": 16, "topk": 3, "block": 4, "reps": 2, "budget": HALF, **flags}
    rows, steps = [tokens(90, 1), tokens(40, 2)], [[t, t] for t in tokens(20, 3)]
    got = [
        logits(llama, InfLLM(store=store, max_cached_blocks=cached, **hyper), rows, steps)
        for store in ("resident", "host")
    ]
    assert torch.equal(*got)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 3),
    units=st.sampled_from([1, 4]),
    cached=st.integers(1, 6),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_least_recently_used_blocks_make_room(seed: int, n: int, units: int, cached: int, steps: list[int]) -> None:
    """Against a plain list: contents, at most `cached` blocks (or those asked for), the current ones always, bytes."""
    moved: dict[str, int] = {"fetch": 0, "write_back": 0}
    store = HostBlockStore(
        n, torch.zeros(1, 2, 0, 4), 3, units, cached, lambda kind, b: moved.update({kind: moved[kind] + b})
    )
    k, v = drawn(seed, n, 2, 30, 4).float(), drawn(seed + 1, n, 2, 30, 4).float()
    for row in range(n):
        store.put(row, k[row], v[row])
    assert moved["write_back"] == n * 10 * 2 * 3 * 4 * 4 * 2
    model: list[list[list[int]]] = [[[] for _ in range(units)] for _ in range(n)]
    generator, misses = torch.Generator().manual_seed(seed), 0
    for count in steps:
        ids = torch.stack([torch.randperm(10, generator=generator)[:count].sort().values for _ in range(n * units)])
        ids = ids.view(n, units, count)
        got = store.take(ids, range(n), 4)
        for row in range(n):
            for unit in range(units):
                held, expected = model[row][unit], ids[row, unit].tolist()
                misses += sum(b not in held for b in expected)
                held[:] = (
                    [b for b in held if b not in expected]
                    + [b for b in expected if b in held]
                    + [b for b in expected if b not in held]
                )
                del held[: max(0, len(held) - max(cached, count))]
                recent = store.recent[row][unit]
                assert list(recent) == held or len(recent) <= max(cached, max(steps))
                assert len(recent) <= max(cached, max(steps)) and set(expected) <= set(recent)
                assert len(set(recent.values())) == len(recent)
                at = torch.tensor([b * 3 + i for b in expected for i in range(3)])
                for x, y in zip(got, (k, v), strict=True):
                    heads = range(2) if units == 1 else (unit,)
                    for head in heads:
                        assert torch.equal(x[row, head], y[row, head if units == 1 else head // 2, at])
    if max(steps) <= cached:
        assert moved["fetch"] == misses * 2 * (2 if units == 1 else 1) * 3 * 4 * 4


def mistral(store: str = "host", **hyper: Any) -> Driver:
    """8192 keys and values of one Mistral-7B layer in fp16, written straight into the layer; one decode step done."""
    h, h_kv, d, s = 32, 8, 128, 8192
    method = InfLLM(**{"store": store, "budget": Budget(ratio=0.2), **hyper})
    driver = Driver(method, h, h_kv, torch.float16, d)
    layer = driver.layer
    k, v = (torch.randn(1, h_kv, s, d, generator=torch.Generator().manual_seed(i)).half() for i in range(2))
    ctx, _ = driver.context(Step(False, s, [0], [s], [s], True, True), s, 1)
    layer.load(k, v, ctx)
    driver.past, driver.columns = [s], s
    for seed in (5, 5):
        q = torch.randn(1, h, 1, d, generator=torch.Generator().manual_seed(seed)).half()
        driver.feed(q, k[:, :, :1], v[:, :, :1], [1], decode=True)
    return driver


def test_bytes_of_one_mistral_layer() -> None:
    """Nothing is cached at first: 7 blocks of 512 KiB, the worst case of a step; the same query again moves nothing."""
    driver = mistral()
    layer = driver.layer
    memory = layer.memory
    plan = memory.plans[0]
    assert (plan.window, plan.topk, plan.exc) == (816, 7, 512)
    assert memory.blocks.counts == [57]
    facts = driver.ledger.facts  # blocks; of the second step all 7 were there, 7 of 57 at random would have been 7 / 57
    assert (facts["cache_lookups"], facts["cache_hits"]) == (14, 7)
    assert facts["cache_chance_hits"] == pytest.approx(7 * 7 / 57)
    assert driver.ledger.moved == {"fetch": 7 * 512 * 1024}  # of both steps together; nothing was written back
    assert 7 * 512 * 1024 == 3.5 * 2**20
    assert driver.ledger.prefill_moved == {"write_back": 57 * 512 * 1024}
    # 8160 - 816 - 57 * 128 = 48 tokens between window and blocks, and the one or two that decode pushes out
    assert driver.ledger.attended(all_layers=True) == 32 + 7 * 128 + 816 + 48 + 1.5
    tiers = layer.tensors()
    assert tiers["host"][0].numel() * 2 == 58 * 512 * 1024  # capacity in steps of two blocks
    assert memory.reps.data.numel() * 2 == 58 * 32 * 128 * 2  # 456 KiB for the 57
    assert memory.blocks.pool.data.numel() * 2 == 7 * 512 * 1024
    # K twice and V of 1024 columns plus slack, in steps of 256; scores per query head in fp32
    assert memory.near.tensors()[0].shape[2] == 1024


def test_prefill_loads_land_in_the_prefill_table(llama: PreTrainedModel) -> None:
    method = InfLLM(n_init=4, n_local=16, topk=2, block=4, exc_block=8, store="host", max_cached_blocks=2, budget=HALF)
    cache = SelectiveCache(llama, method)
    with attach(llama), torch.no_grad():
        session = Session(llama, cache, [tokens(90, 1)])
        written = 3 * ((90 - 16 - 4) // 4) * 2 * 2 * 4 * 16 * 8
        assert cache.ledger.prefill_moved["write_back"] == written
        assert cache.ledger.prefill_moved["fetch"] > 0 and not cache.ledger.moved
        for token in tokens(8, 2):
            session.step([token])
    assert cache.ledger.moved["write_back"] == 3 * 2 * 2 * 2 * 4 * 16 * 8  # two blocks of four evictions, per layer


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 40),
    t=st.integers(1, 20),
    w=st.integers(1, 50),
    block=st.integers(1, 9),
)
def test_column_sums_of_a_window(seed: int, s: int, t: int, w: int, block: int) -> None:
    t = min(s, t)
    q, k = drawn(seed, 1, 4, t, 8), drawn(seed + 1, 1, 2, s, 8)
    sums = torch.zeros(1, 4, s, dtype=torch.float64)
    add_column_sums(sums, q, k, [s], [t], 0.3, block, windows=[w])
    at, j = torch.arange(s - t, s)[:, None], torch.arange(s)[None]
    probs = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(j > at, -torch.inf).softmax(-1)
    torch.testing.assert_close(sums, (probs * (at - j < w)).sum(2))


def test_plans() -> None:
    fifth = InfLLM(budget=Budget(ratio=0.2)).plan(8192, 0, 1)
    assert (fifth.sinks, fifth.window, fifth.topk, fifth.exc) == (32, 816, 7, 512)
    assert fifth.total == 32 + 815 + 7 * 128  # the current token, inside the window, is not counted
    tenth = InfLLM(budget=Budget(ratio=0.1)).plan(2048, 0, 1)
    assert (tenth.window, tenth.topk, tenth.exc) == (100, 1, 100)
    some = InfLLM(budget=Budget(tokens=512), budget_rule="prompt").plan(4000, 0, 1)
    assert (some.window, some.topk) == (240, 2)
    assert InfLLM(budget=Budget(tokens=512), budget_rule="prompt").plan(500, 0, 1).window == 512
    kept = InfLLM(budget=Budget(tokens=512))  # at every step: rounded down, and the current token beside the budget
    assert (kept.plan(4000, 0, 1).topk, kept.plan(500, 0, 1).window) == (1, 513)
    paper = InfLLM(protocol="paper", budget=Budget(ratio=0.2))
    plan = paper.plan(20000, 0, 1)
    assert (plan.sinks, plan.window, plan.topk, plan.exc, paper.reps, paper.max_cached_blocks) == (
        128, 4096, 16, 512, 4, 32,
    )  # fmt: skip
    release = InfLLM(protocol="release", budget=Budget(ratio=0.2))
    assert (release.plan(20000, 0, 1), release.reps, release.n_sink) == (plan, 4, 128)
    assert isinstance(InfLLM(budget=Budget(ratio=1.0)).make_layer(0, ModelShape(1, 2, 2, 4)), DenseLayer)


def test_budget_one_and_covering_budgets_are_dense(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(150, 1)], [[t] for t in tokens(5, 2)]
    dense = logits(llama, None, prompt, steps)
    small = {"n_init": 4, "block": 4}
    for method in (
        InfLLM(budget=Budget(ratio=1.0), **small),
        InfLLM(budget=Budget(tokens=160), **small),
        InfLLM(budget=HALF, n_local=155, **small),
        InfLLM(protocol="paper", budget=HALF),
    ):
        torch.testing.assert_close(logits(llama, method, prompt, steps), dense)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"n_init": -1}, "n_init=-1: allowed is an int >= 0"),
        ({"n_local": 0}, "n_local=0: allowed is null or an int >= 1"),
        ({"topk": -1}, "topk=-1: allowed is null or"),
        ({"reps": 5, "block": 4}, "reps=5: allowed is an int in 1..4"),
        ({"exc_block": 0}, "exc_block=0: allowed is an int >= 1"),
        ({"max_cached_blocks": 0}, "max_cached_blocks=0"),
        ({"recent_ratio": 1.5}, "recent_ratio=1.5"),
        ({"store": "hosts"}, "did you mean host"),
        ({"store": "block_cache"}, "store=block_cache: allowed is resident, host"),
    ],
)
def test_refusals(hyper: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfLLM(**hyper)


def test_what_cannot_apply() -> None:
    with pytest.raises(NotApplicable, match="needs more than 90 init tokens"):
        InfLLM(n_init=90, budget=Budget(tokens=80))
