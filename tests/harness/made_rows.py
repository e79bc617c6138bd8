"""Rows made by hand: the cells of a command line with the samples and scores that a test gives them."""

from typing import Any

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report.rows import Row, find_full, pair_with_full
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.samples import Sample
from tests.harness.cells import planned as plan

__all__ = ["make_rows", "plan", "sample"]


def sample(doc_id: int, **changed: Any) -> Sample:
    values: dict[str, Any] = {
        "task": "needle_pocket", "doc_id": doc_id, "fingerprint": "f", "response": "", "score": 0.0,
        "new_tokens": 4, "prompt_tokens": 1000, "question_tokens": 0,
        "prefill_s": 0.5, "tt2t_s": 0.6, "step_s": [0.1, 0.05, 0.01], "index_build_s": 0.1,
        "budget_tokens": 200, "attended_tokens": 201.0, "attended_tokens_all_layers": 201.0,
        "resident_bytes": {"device": 2**20, "host": 2**20}, "peak_bytes": {"device": 3 * 2**20, "host": 2**20},
        "bytes_per_step": {"selection": 64.0}, "extra": {},
        "attn": "sdpa", "device": "a machine", "git_commit": None, "versions": {"python": "3.11"},
    }  # fmt: skip
    return {**values, **changed}  # type: ignore[typeddict-item]


def make_rows(plan_: RunPlan, scores: dict[str, list[float]], samples: list[Sample] | None = None) -> dict[str, Row]:
    made = {}
    for cell in plan_.cells:
        method = cell.identity["method"]["name"]
        values = {"needle_pocket": {str(i): v for i, v in enumerate(scores[method])}}
        own = samples or [sample(i) for i in range(len(scores[method]))]
        made[cell.name] = build_row(cell, values, own, prompt_protocol={}, kv_dtype="float32")
    return {name: pair_with_full(row, find_full(row, made.values())) for name, row in made.items()}
