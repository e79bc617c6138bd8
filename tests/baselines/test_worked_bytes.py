"""What each retrieval method moves per decode step, worked out by hand and told by the ledger.

One layer of Mistral-7B's geometry (32 query heads, 8 KV heads of 128, fp16: 4096 bytes of K + V per token), 8192 tokens
written straight into the cache, host store, the first step after the prompt: nothing a cache could hit.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pqcache.selective import Method
from tests.baselines.common import made, random_layer
from tests.invariants.test_bytes import capacity
from tests.thin import thin

S, TOKEN = 8192, 4096


@dataclass(frozen=True)
class Worked:
    """`fetched`: tokens of K and V that cross per step. `index`: bytes of the index, by tier, capacity included."""

    method: Method
    fetched: int
    attended: int
    selection: Any = 0
    write_back: int = TOKEN
    prefill: int = S * TOKEN  # K and V, written to the host once
    index: dict[str, int] | None = None  # None: those of its parts


COMPONENT = (S + 1) * 8 * 2  # one component of every key, the current token's too: 128 KiB
SECOND_K = capacity(S + 1) * 8 * 128 * 2
# fp16 centroids, positions, sizes: 204 + 255.5 + 3 KiB; and a byte per cluster and head: chosen last
CLUSTERS = 102 * 8 * 128 * 2 + (S - 16) * 8 * 4 + 102 * 8 * 4
EXTREMES = 2 * 768 * 8 * 128 * 2  # of 513 pages, in buffers of 256
CODES = 8 * 2 * capacity(S + 1 - 32) + 8 * 2 * 64 * 64 * 2  # a byte per code and sub-space; 64 fp16 centroids: 128 KiB
PARTIAL = capacity(S + 1) * 8 * 25 * 2 + 8 * 128 * 25 * 4  # 25 of 128 columns of every key: 3.1 MiB; the basis in fp32

WORKED = {
    # 8160 tokens after 32 sinks: 1632, half of them the window
    "pqcache": Worked(
        made("pqcache", store="host", max_iter=1, budget=0.2), 816, 1665, prefill=8160 * TOKEN, index={"device": CODES}
    ),
    "sparq": Worked(
        made("sparq", store="host", budget=0.2), 816, 1665, COMPONENT, TOKEN + 2048,
        8160 * TOKEN + S * 2048, {"host": SECOND_K, "device": 0},
    ),
    # shares of the prompt itself: 1638, half of them the window
    "sparq-paper": Worked(
        made("sparq", store="host", budget=0.2, protocol="paper"), 819, 1671, COMPONENT, TOKEN + 2048,
        8160 * TOKEN + S * 2048, {"host": SECOND_K, "device": 0},
    ),
    "sparq-8-components": Worked(
        made("sparq", store="host", budget=0.2, r=8), 816, 1665, 8 * COMPONENT, TOKEN + 2048,
        8160 * TOKEN + S * 2048, {"host": SECOND_K, "device": 0},
    ),
    "clusterkv-per-kv-head": Worked(
        made("clusterkv", store="host", max_iter=1, reduce="sum_softmax", budget=1024), 1008, 1025,
        prefill=8176 * TOKEN, index={"device": CLUSTERS + 102 * 8},
    ),
    "clusterkv": Worked(
        made("clusterkv", store="host", max_iter=1, budget=1024), 4 * 1008, 1025,
        prefill=8176 * TOKEN, index={"device": CLUSTERS + 102 * 32},
    ),
    # 1638 tokens are 102 pages of 16
    "quest-per-kv-head": Worked(
        made("quest", store="host", reduce="sum_logit", budget=0.2), 1632, 1633, index={"device": EXTREMES}
    ),
    "quest": Worked(made("quest", store="host", budget=0.2), 4 * 1632, 1633, index={"device": EXTREMES}),
    "quest-resident": Worked(
        made("quest", 0.2), 0, 1633, write_back=0, prefill=0, index={"device": EXTREMES}
    ),
    # 64 bytes, step and minimum per key, in buffers that grew by a sixteenth for the current token
    "coded_keys": Worked(
        made("coded_keys", store="host", budget=0.2), 816, 1665, prefill=8160 * TOKEN,
        index={"device": 8704 * 8 * (64 + 4)},
    ),
    # a bit per number and a factor per key; the mean key, and a rotation in fp32
    "coded_keys-rabitq": Worked(
        made("coded_keys", store="host", code="rabitq", budget=0.2), 816, 1665, prefill=8160 * TOKEN,
        index={"device": 8704 * 8 * (16 + 2) + 8 * 128 * 2 + 128 * 128 * 4},
    ),
    "infinigen": Worked(made("infinigen", store="host", budget=0.2), 1638, 1639, index={"device": PARTIAL}),
    # every key crosses: 16 MiB
    "oracle": Worked(made("oracle", store="host", budget=0.2), 816, 1665, (S + 1 - 32) * 2048, prefill=8160 * TOKEN),
    # what is scored crosses for the shortlist of 4 k only; its last page may be cut
    "two_stage": Worked(
        made("two_stage", second_options={"max_iter": 1}, store="host", shortlist=4, budget=0.2), 816, 1665,
        pytest.approx(0, abs=16 * 2048), prefill=8160 * TOKEN,
    ),
    "two_stage-oracle": Worked(
        made("two_stage", 0.2, second="oracle", second_options={"scope": "candidates"}, store="host", shortlist=4),
        816, 1665, pytest.approx(4 * 816 * 2048, abs=16 * 2048), prefill=8160 * TOKEN,
    ),
    # one component of each token on it, and of the rest of its softmax
    "two_stage-sparq": Worked(
        made("two_stage", 0.2, first="clusterkv", second="sparq", first_options={"max_iter": 1},
             store="host", shortlist=4),
        816, 1665, (5 * 816 + 32 + 1) * 8 * 2, TOKEN + 2048, 8160 * TOKEN + S * 2048,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", thin(WORKED, 2))
def test_bytes_of_one_layer(name: str) -> None:
    worked = WORKED[name]
    one = random_layer(worked.method, S)
    assert one.ledger.bytes_per_step() == {
        "selection": worked.selection,
        "demand_fetch": worked.fetched * TOKEN,
        "refill": 0,
        "write_back": worked.write_back,
    }
    assert one.ledger.attended(all_layers=True) == worked.attended
    assert sum(one.ledger.prefill_moved.values()) == worked.prefill
    held = {tier: sum(x.numel() * x.element_size() for x in part) for tier, part in one.layer.index.tensors().items()}
    assert worked.index is None or held == worked.index
