"""HumanEval: official solutions pass, programs that end early do not."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.tasks import humaneval
from tests.harness.tasks.building import build, needs_isolation

pytestmark = needs_isolation

FILE = Path("humaneval") / "HumanEval.jsonl.gz"


@pytest.mark.shared
def test_official_solutions_pass(shared_data: Path, tokenizer: Any) -> None:
    rows = [json.loads(line) for line in gzip.decompress((shared_data / FILE).read_bytes()).splitlines()]
    spec, tasks = build("humaneval", {"source": str(shared_data / FILE), "execute": True}, tokenizer, limit=None)
    task, docs = tasks["humaneval"]
    assert len(docs) == 164
    assert [doc["prompt"] for doc in docs] == [row["prompt"] for row in rows]
    assert task.config.generation_kwargs["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    for doc in [docs[32], docs[38], *docs[::23]]:  # 32 and 38: tests that call functions of the prompt
        assert humaneval.process_results(doc, [doc["answer"]]) == {"pass@1": 1.0}, doc["task_id"]
        assert humaneval.process_results(doc, ["    return None\n"]) == {"pass@1": 0.0}
    assert spec.data["sandbox"] in ("bubblewrap", "unshare")


def test_constructed_functions_pass_and_early_exits_do_not(tokenizer: Any) -> None:
    _, tasks = build("humaneval", {"source": "constructed", "execute": True}, tokenizer, limit=3)
    for doc in tasks["humaneval"][1]:
        assert humaneval.process_results(doc, [doc["answer"]]) == {"pass@1": 1.0}
    assert humaneval.process_results(doc, ["    return 0\nimport os\nos._exit(0)\n"]) == {"pass@1": 0.0}
