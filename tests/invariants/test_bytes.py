"""Kept bytes equal the closed form, counted from storages; evicted tensors are really gone."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pqcache.api.invariants import bytes_counted, walk
from pqcache.selective import Method
from pqcache.store.buffer import Buffer
from tests.baselines.common import made
from tests.baselines.drive import run
from tests.invariants.cases import Case

REPO = Path(__file__).resolve().parents[2]
S, STEPS = 1000, 10
LAYERS, H_KV, D, ITEM = 3, 2, 16, 8  # the small llama in float64


def capacity(n: int) -> int:
    """Buffers grow in steps of 256 tokens."""
    return -(-n // 256) * 256


def kv(n: int) -> int:
    """K and V of n tokens in one layer."""
    return 2 * H_KV * n * D * ITEM


def pq_index(n_sink: int, m: int, b: int) -> int:
    """fp32 centroids and one byte per code and sub-space."""
    return H_KV * 2**b * D * 4 + H_KV * m * capacity(S + STEPS - n_sink)


def components(n: int) -> int:
    """A second copy of n keys."""
    return kv(n) // 2


def clusters(tokens: int, c: int) -> int:
    """fp32 centroids, int32 sizes and one int32 position per token."""
    return H_KV * 4 * (c * D + c + tokens)


def infllm() -> int:
    """Six complete blocks lie behind the window of 121; before it 200 columns: K twice, V, a score per query head."""
    near = capacity(200 + 128)
    return kv(32) + kv(near) * 3 // 2 + 2 * H_KV * near * ITEM + 2 * H_KV * 6 * D * ITEM


def mixed(salient: int, tail: int) -> int:
    """Of S prompt tokens: 4- and 2-bit codes of K and V, fp16 parameters, a bit per token with a count per 64; exact tail."""
    codes = 2 * H_KV * (salient * D // 2 + (S - salient) * D // 4)
    keys, values = 2 * 2 * H_KV * D * 2, (H_KV * D + 2 * S) * 2
    # what probes said of the tail
    return codes + keys + values + H_KV * 16 * (8 + 4) + kv(tail) + H_KV * tail * (ITEM + 4)


ALL = kv(capacity(S + STEPS))
HOST = kv(capacity(S + STEPS - 32))
# sinks and the local window, (1000 - 32) * 0.25 // 2 tokens and the current one
WINDOWED = kv(32) + kv(capacity(121 + 1 + 128))


def evicted(kept: int, per_entry: int = 0, positions: int | None = None) -> int:
    """Kept K and V, an int32 position per token and KV head, and what else a method keeps of each."""
    return kv(capacity(kept)) + H_KV * (
        4 * capacity(kept if positions is None else positions) + per_entry * capacity(kept)
    )


def kivi(bits: int, packed: int) -> int:
    """7 * 128 keys in 56 groups and 114 exact ones, 882 values, and 128 exact ones; `packed`: room for the codes of as many."""
    keys, values = packed * D * bits // 8 + 56 * D * 4, (packed or 882) * (D * bits // 8 + 4)
    return H_KV * (keys + values + (114 + 128) * D * ITEM)


def crushed(bits: int, group: int, by: str) -> int:
    """A quarter: 32 sinks and 242 tokens, 60 of them representatives in codes, keys by channel in whole groups."""
    token = D * bits // 8 + 2 * 2 * D // group
    whole = 60 // group * group
    keys = whole * D * bits // 8 + whole // group * D * 4 + (60 - whole) * D * ITEM if by == "channel" else 60 * token
    return H_KV * (keys + 60 * token) + evicted(214 + STEPS, positions=274 + STEPS)


HALF_INDEX = H_KV * (2**6 * D * 4 + 2 * capacity(484 + STEPS))  # of half of the prompt
INT8 = 2 * H_KV * (D + 2 * 2)  # a token's codes, step and minimum
GEAR_TOKEN = 2 * H_KV * D // 2  # four bits
# method, bytes on the device and on the host, and where it is short: the bytes of these that are content
KEPT: list[tuple[Method, int, int, int | None]] = [
    (made("full"), ALL, 0, kv(S + STEPS)),
    (made("oracle", 0.25), ALL, 0, None),
    (made("pqcache", 0.25), ALL + pq_index(32, 2, 6), 0, kv(S + STEPS) + H_KV * (2**6 * D * 4 + 2 * (S + STEPS - 32))),
    (made("pqcache", 0.25, store="host", m=4, b=5), WINDOWED + pq_index(32, 4, 5), HOST, None),
    # and 4 of the 7 complete blocks of 128 tokens; tables on the host, int64: the slot of each of 8 blocks, and block, uses
    # and stamp of each slot
    (
        made("pqcache", 0.25, store="block_cache", cache_tokens=4 * 128),
        WINDOWED + pq_index(32, 2, 6) + kv(512), HOST + 8 * (8 + 3 * 4), None,
    ),
    (made("two_stage", 0.25), ALL + kv(256) + pq_index(32, 2, 6), 0, None),  # pages and codes
    (made("quest", 0.25), ALL + kv(256), 0, None),  # smallest and largest key of 64 pages, in buffers of 256
    (made("sparq", 0.25), ALL + components(capacity(S + STEPS)), 0, None),
    (
        made("sparq", 0.25, store="host", reallocate=True),
        WINDOWED + H_KV * D * ITEM, HOST + components(capacity(S + STEPS)), None,  # the mean value
    ),
    # two of 16 channels in four bits are a byte, and two fp16 parameters four more; int64 channels
    (
        made("double_sparsity", 0.25, channel_ratio=1 / 8, calibration_tokens=64),
        ALL + capacity(S + STEPS - 32) * H_KV * (1 + 4) + H_KV * 2 * 8, 0, None,
    ),
    (made("clusterkv", 0.25), ALL + clusters(984, 984 // 80), 0, None),
    # the window holds the 320 tokens to be clustered next; the last step's 246 tokens stay, per query head, and its clusters
    (
        made("clusterkv", 0.25, store="host"),
        kv(16) + kv(capacity(320 + 1 + 128)) + clusters(984, 12) + 2 * kv(246) + 2 * H_KV * 12,
        kv(capacity(S + STEPS - 16)) + 2 * H_KV * 246 * 4, None,
    ),
    (made("infllm", 0.25, exc_block=64), infllm() + kv(6 * 128), 0, None),
    (
        made("infllm", 0.25, exc_block=64, store="host", max_cached_blocks=1),
        infllm() + kv(128), kv(6 * 128), None,
    ),
    (made("streaming", 0.25), evicted(32 + 242 + STEPS), 0, None),
    (made("streaming", 0.2, mode="rolling", n_sink=4), evicted(4 + 199 + 1), 0, None),
    # positions of the prompt's tokens only
    (made("snapkv", 0.25), evicted(32 + 242 + STEPS), 0, kv(32 + 242 + STEPS) + H_KV * 4 * (32 + 242)),
    (made("kvcrush", 0.25), evicted(32 + 242 + STEPS), 0, None),
    # and a sum of attention per entry and KV head, in the model's float64; one is dropped a step
    (made("h2o", 0.2, n_sink=4), evicted(4 + 199 + 1, ITEM), 0, (kv(1) + H_KV * (4 + ITEM)) * (4 + 199)),
    (made("h2o_c", 0.25, n_sink=4), evicted(4 + 256 + 1, ITEM), 0, None),  # 7.8 tokens more than a quarter of the rest
    (made("int8"), INT8 * capacity(S + STEPS), 0, None),
    (made("int8", residual=7), INT8 * capacity(S + STEPS - 7) + kv(7), 0, INT8 * (S + STEPS - 7) + kv(7)),
    (made("zipcache", 0.2), mixed(600, STEPS), 0, None),
    (made("mikv", 0.2), mixed(600, STEPS), 0, None),
    (made("coded", 0.25, codec_budget=0.1875), mixed(500, STEPS) + pq_index(32, 2, 6), 0, None),
    (
        made("coded", 0.25, policy="snapkv", codec="int8"),
        (INT8 + H_KV * 4) * capacity(32 + 242 + STEPS), 0, None,
    ),
    *((made("kvcrush_mixed", 0.25, bits=bits, group=group, keys=by), crushed(bits, group or D, by), 0, None)
      for bits, group, by in ((4, 16, "channel"), (2, 8, "channel"), (3, None, "token"))),
    # half of the prompt, with its positions, and an index of that
    (made("evict_retrieve", 0.1), evicted(516 + STEPS) + HALF_INDEX, 0, None),
    (
        made("evict_retrieve", 0.1, retrieve_options={"store": "host"}),
        kv(32) + kv(256) + H_KV * 4 * capacity(516 + STEPS) + HALF_INDEX, kv(capacity(484 + STEPS)), None,
    ),
    (made("kivi", group=16), kivi(2, 1024), 0, kivi(2, 896) - H_KV * (896 - 882) * (D // 4 + 4)),
    (made("kivi", bits=4, group=16), kivi(4, 1024), 0, None),
    # 1000 tokens are one block: 10 + 10 outliers per channel of keys, parameters per token (both heads), rank 4
    (
        made("gear"),
        GEAR_TOKEN * 1024 + 2 * H_KV * (4096 * 2 + 8 * D * 2) + H_KV * D * (8 * 4 + 24 * (ITEM + 2)) + 1024 * 4 + kv(10),
        0,
        GEAR_TOKEN * S + 2 * H_KV * (4 * S * 2 + 4 * D * 2) + H_KV * D * (4 + 20 * (ITEM + 2)) + S * 4 + kv(STEPS),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "device", "host", "content"), KEPT, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("chunk", [None, pytest.param(256, marks=pytest.mark.rest)])
def test_resident_bytes_equal_the_closed_form(
    llama: PreTrainedModel, method: Method, device: int, host: int, content: int | None, chunk: int | None
) -> None:
    cache = run(llama, method, S, STEPS, chunk)
    held = {"device": device, "host": host} if host else {"device": device}
    assert cache.resident_bytes() == {tier: LAYERS * nbytes for tier, nbytes in held.items()}
    if content is not None:
        assert sum(cache.content_by_tier().values()) == LAYERS * content


def test_every_tensor_a_cache_holds_is_counted(model: PreTrainedModel, case: Case) -> None:
    bytes_counted(model, case)


@pytest.mark.rest
def test_slack_was_never_written(model: PreTrainedModel, case: Case) -> None:
    """Fresh buffers are zeros: what counts as slack still is, but for the place of the entry that a step has dropped."""
    cache = run(model, case.make(), 300, STEPS)
    slack = dict.fromkeys(cache.resident_bytes(), 0)
    for layer in cache.layers:
        places = {x.untyped_storage().data_ptr(): tier for tier, kept in layer.tensors().items() for x in kept}
        for buffer in [thing for thing in walk(layer) if isinstance(thing, Buffer)]:
            assert not buffer.capacity or buffer.filled
            assert not buffer.data[:, :, buffer.filled + 1 :].any()
            if buffer.capacity:
                unused = buffer.data[:, :, buffer.filled :]
                slack[places[buffer.data.untyped_storage().data_ptr()]] += unused.numel() * unused.element_size()
    content = cache.content_by_tier()
    assert {tier: held - content[tier] for tier, held in cache.resident_bytes().items()} == slack


_PROCESS = r"""
import ctypes, gc, re, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from baselines.full import Full
from baselines.h2o import H2O
from baselines.kvcrush import KVCrush
from pqcache.selective import Budget, SelectiveCache, attach
process_bytes = lambda: int(re.search(r"VmRSS:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=8,
                     num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 64, (1, 1000))
trim = ctypes.CDLL(None).malloc_trim
methods = H2O(budget=Budget(ratio=0.1)), KVCrush(budget=Budget(ratio=0.1)), Full()
with torch.no_grad(), attach(model):
    for method in (*methods[:2], *methods):  # the first two warm up: code that is loaded once is nothing a cache holds
        cache = None
        gc.collect()  # cache and layers name each other
        trim(0)
        before = process_bytes()
        cache = SelectiveCache(model, method)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        trim(0)
        print(method.name, process_bytes() - before, sum(cache.resident_bytes().values()))
"""


@pytest.mark.rest
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's memory from /proc")
def test_evicted_tokens_free_the_process() -> None:
    """After a prompt of 1000 tokens the process has grown by Full's 64 MiB, but by no more than an evictor says it holds."""
    command = [sys.executable, "-c", _PROCESS]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO).stdout
    lines = [line.split() for line in out.splitlines()[2:]]
    grown = {name: int(bytes_) for name, bytes_, _ in lines}
    said = {name: int(bytes_) for name, _, bytes_ in lines}
    assert said["full"] == 8 * 2 * 8 * 1024 * 128 * 4
    assert 0.9 * said["full"] < grown["full"] < 1.1 * said["full"]
    for name in ("h2o", "kvcrush"):
        assert said[name] < 0.27 * said["full"]  # one buffer step of four
        assert grown[name] < 1.1 * said[name]
