"""Log-likelihoods through the decode path, and any task of lm-eval by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from pqcache.harness.config.options import RunOptions
from pqcache.harness.run import adapter as adapter_module
from pqcache.harness.run import units
from pqcache.harness.run.adapter import HarnessLM, LogLikelihood
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.samples import SampleLog
from pqcache.registry import method_class
from pqcache.selective import Budget, likelihood
from tests.harness.cells import Capture, Command, Patch, definition, error_of, lines_of, rows, watch
from tests.harness.tasks.building import Answer
from tests.thin import thin

STORY = "The old man walked over the hill and found a lamp near the river. " * 12
CHOICES = [" A red box stood there.", " nothing at all", " B"]


@pytest.fixture(scope="module")
def base(loaded: LoadedModel) -> LoadedModel:
    return LoadedModel("base", loaded.model, loaded.tokenizer, False, None, 4096)


def ask(kind: str, *arguments: str, doc_id: int = 0, idx: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=idx, metadata=("t", doc_id, 1))


def pairs() -> list[Instance]:
    return [ask("loglikelihood", STORY, choice, idx=i) for i, choice in enumerate(CHOICES)]


def plain(loaded: LoadedModel, ids: list[int], first: int) -> list[float]:
    """Log-probabilities of ids[first:] by one ordinary forward pass."""
    with torch.no_grad():
        scores = loaded.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return [float(scores[at - 1, ids[at]]) for at in range(first, len(ids))]


def adapter(
    loaded: LoadedModel, log: SampleLog, method: str = "full", budget: float = 1.0, **options: Any
) -> HarnessLM:
    return HarnessLM(loaded, method_class(method)(budget=Budget(ratio=budget)), log, RunOptions(**options))


@pytest.mark.parametrize("chat", [False, True])
def test_full_equals_a_plain_forward_pass(loaded: LoadedModel, base: LoadedModel, chat: bool, log: SampleLog) -> None:
    model = loaded if chat else base
    measured = adapter(model, log).loglikelihood(pairs())
    for (value, greedy), choice in zip(measured, CHOICES, strict=True):
        context = model.wrap(STORY) if chat else STORY.rstrip()
        whole = model.encode(context + (choice.lstrip() if chat else " " + choice))
        first = len(model.encode(context))
        expected = plain(model, whole, first)
        assert value.tokens == pytest.approx(expected, abs=2e-5)
        assert value == pytest.approx(sum(expected), abs=1e-4)
        assert not greedy  # a random model


@pytest.mark.rest
def test_the_method_is_what_is_measured(base: LoadedModel, tmp_path: Path) -> None:
    """Also in a continuation of one token: the context's last token is a decode step."""
    values: dict[tuple[str, float], list[float]] = {}
    for method, budget in [("full", 1.0), ("pqcache", 1.0), ("pqcache", 0.3), ("streaming", 0.3), ("snapkv", 0.3)]:
        with SampleLog(tmp_path / f"{method}{budget}") as log:
            measured = adapter(base, log, method, budget)
            values[method, budget] = [float(value) for value, _ in measured.loglikelihood(pairs())]
            sample = measured.used["t", 0, 2]
            assert (sample["question_tokens"], sample["score"]) == (1, None)
            assert sample["budget_tokens"] is None or sample["budget_tokens"] <= sample["prompt_tokens"] * budget + 40
    full = values["full", 1.0]
    assert values["pqcache", 1.0] == pytest.approx(full, abs=1e-4)
    for key in [("pqcache", 0.3), ("streaming", 0.3), ("snapkv", 0.3)]:
        assert all(abs(value - expected) > 1e-3 for value, expected in zip(values[key], full, strict=True)), key


def test_what_cannot_be_scored(base: LoadedModel, log: SampleLog) -> None:
    short = LoadedModel("base", base.model, base.tokenizer, False, None, 64)
    with pytest.raises(ValueError, match="adds no token"):
        adapter(base, log).loglikelihood([ask("loglikelihood", "A", "")])
    with pytest.raises(ValueError, match=r"exceed the 64 tokens"):
        adapter(short, log).loglikelihood(pairs())
    with pytest.raises(ValueError, match=r"both 1\.\.t-1"):
        likelihood(base.model, method_class("full")(), torch.ones(1, 4, dtype=torch.long), first=4, prefill=1)


@pytest.mark.parametrize("size", thin([64, 63, 100], 3))
@pytest.mark.rest
def test_rolling_scores_every_token_once(base: LoadedModel, size: int, log: SampleLog) -> None:
    model = LoadedModel("base", base.model, base.tokenizer, False, None, size)
    ids = model.encode(STORY)
    measured = adapter(model, log)
    (value,) = measured.loglikelihood_rolling([ask("loglikelihood_rolling", STORY)])
    assert isinstance(value, LogLikelihood)
    assert len(value.tokens) == len(ids) - 1  # all but the opening token
    assert all(sample["prompt_tokens"] + 1 <= size for sample in measured.used.values())
    first = size + 1
    assert value.tokens[:size] == pytest.approx(plain(model, ids[:first], 1), abs=2e-5)
    scored = (len(ids) - first) % size or size  # of the last window
    window = ids[-size - 1 :]
    assert value.tokens[-scored:] == pytest.approx(plain(model, window, len(window) - scored), abs=2e-5)


@pytest.mark.rest
def test_the_method_decodes_the_second_half_of_a_text(base: LoadedModel, tmp_path: Path) -> None:
    scored = {}
    for method, budget in (("full", 1.0), ("streaming", 0.3)):
        with SampleLog(tmp_path / method) as log:
            (scored[method],) = adapter(base, log, method, budget).loglikelihood_rolling(
                [ask("loglikelihood_rolling", STORY)]
            )
    half = len(base.encode(STORY)) // 2 - 1
    full, less = scored["full"].tokens, scored["streaming"].tokens
    assert full == pytest.approx(plain(base, base.encode(STORY), 1), abs=2e-5)
    assert less[:half] == pytest.approx(full[:half], abs=2e-5)  # the prefill is exact
    assert less[half + 1 :] != pytest.approx(full[half + 1 :], abs=1e-3)


ASKED = "{{story}}\nQuestion: {{question}}\nAnswer:"
FEW = {
    "fewshot_split": "train",
    "num_fewshot": 2,
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{story}}",
    "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 3},
}
CHOICE = {"doc_to_text": ASKED, "doc_to_choice": "choices", "doc_to_target": "gold"}


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task definitions over a local file, as lm-eval's guide writes them."""
    folder = tmp_path_factory.mktemp("definitions")
    data = folder / "data.jsonl"
    rows = [
        {
            "story": STORY[: 300 + 60 * i],
            "question": f"what is {i}?",
            "choices": ["one lamp", "two lamps"],
            "gold": i % 2,
        }
        for i in range(3)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = [{"story": f"answer {i}", "question": f"number {i}"} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    two = ["byte_perplexity", "word_perplexity"]
    made = [
        definition("my_choice", data, "multiple_choice", ["acc", "acc_norm"], **CHOICE),
        definition("hub_task", data, "multiple_choice", ["acc"], **CHOICE).replace('"json"', '"some/where"'),
        definition("my_text", data, "loglikelihood_rolling", two, doc_to_text="", doc_to_target="{{story}}"),
        definition("my_few_shot", data, "generate_until", ["exact_match"], **FEW),
        definition("my_no_shot", data, "generate_until", ["exact_match"], **{**FEW, "num_fewshot": 0}),
    ]
    for number, text in enumerate(made):
        (folder / f"{number}.yaml").write_text(text)
    return folder


@pytest.fixture
def call(command: Command, definitions: Path) -> Command:
    return lambda *typed: command("task=lm_eval", f"task.include={definitions}", *typed)


@pytest.mark.rest
def test_multiple_choice_by_name(call: Command, tmp_path: Path, monkeypatch: Patch) -> None:
    typed = ["task.name=my_choice", "-m", "method=full,oracle", "budget=0.3", "limit=2"]
    assert call(*typed) == 0
    measured = rows(tmp_path / "out")
    assert measured["full 1.0"]["task"] == "lm_eval:my_choice"
    row = measured["oracle 0.3"]
    assert row["n_samples"] == row["paired_samples"] == 2
    assert row["score"] in (0.0, 50.0, 100.0)
    assert set(row["tasks"]["my_choice"]["metrics"]) == {"acc", "acc_norm"}
    assert row["tpot_p50_ms"] is not None or row["tt2t_s"] is not None
    assert len(lines_of(tmp_path / "out")) == 2 * 4  # two choices of two documents
    monkeypatch.setattr(adapter_module, "likelihood", lambda *_, **__: pytest.fail("computed again"))
    assert call(*typed) == 0


def test_perplexity_by_name(call: Command, tmp_path: Path) -> None:
    assert call("task.name=my_text", "method=full", "limit=2") == 0
    row = rows(tmp_path / "out")["full 1.0"]
    metrics = row["tasks"]["my_text"]["metrics"]
    assert set(metrics) == {"byte_perplexity", "word_perplexity"}
    assert row["score"] == pytest.approx(100 / metrics["byte_perplexity"], rel=0.05)  # a mean of two documents


@pytest.mark.rest
@pytest.mark.parametrize("shared", ["true", "false"])
def test_every_cell_sees_lm_evals_own_examples(
    call: Command, base: LoadedModel, definitions: Path, shared: str, monkeypatch: Patch
) -> None:
    """Drawn once a command, each cell would go on where the one before it stopped, and a second run would match neither."""
    seen: dict[str, list[list[int]]] = {}

    def look(model: Any, method: Any, ids: torch.Tensor, **_: Any) -> None:
        seen.setdefault(method.name, []).append(ids[0].tolist())

    watch(monkeypatch, adapter_module, "generate", look)
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    typed = ["task.name=my_few_shot", "budget=0.9", f"shared_prefill={shared}", "model.chat=false"]
    assert call(*typed, "-m", "method=full,oracle") == 0

    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    results = simple_evaluate(Answer(""), tasks=["my_few_shot"], limit=3, task_manager=manager, bootstrap_iters=0)
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["my_few_shot"]]
    assert all(prompt.count("Question: ") == 3 for prompt in prompts)
    # with a shared prefill the first document comes last
    assert sorted(seen["full"]) == sorted(seen["oracle"]) == sorted(base.encode(prompt) for prompt in prompts)

    monkeypatch.setattr(adapter_module, "generate", lambda *_, **__: pytest.fail("computed again"))
    assert call(*typed, "method=oracle") == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["task.name=my_no_shot", "task.num_fewshot=1"], "task.num_fewshot=1: the task's definition fixes it at 0"),
        (["task.name=my_choice", "task.metric=bleu"], "task.metric=bleu: my_choice has acc, acc_norm"),
        (["task.name=my_choice", "task.num_fewshot=-1"], "task.num_fewshot=-1: must be at least 0"),
        (["task.name=my_choice", "task.lenght=1"], "task.lenght: unknown key"),
        (["task.name=hub_task"], "task.name=hub_task: cannot be loaded"),
    ],
)
def test_one_line_before_any_model(call: Command, typed: list[str], said: str, no_model: None, capsys: Capture) -> None:
    assert said in error_of(capsys, call("method=full", *typed))
