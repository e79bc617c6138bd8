"""What holds for every task, and the way through lm-eval itself."""

from __future__ import annotations

import dataclasses
from importlib import resources

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM

from pqcache.embedded import load_tokenizer
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks import TaskRequest, build_task, needle, needle_pocket, pocket, task_options

MADE = ("needle", "needle_pocket", *pocket.SUITES)  # of documents that are made here, answered by the embedded model
SMALL = {name: {"length": 512} for name in MADE} | {"needle": {"lengths": [512, 640], "depths": [0, 50, 100]}}
ALONE = [name for name in MADE if name != "pocket"]  # of one lm-eval task
SOME = ["needle", "needle_pocket", "pocket", "pocket_chain"]  # the group runs every family


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def asked(tokenizer, *, seed: int, limit: int) -> TaskRequest:
    """Tokens of a wrapped prompt are counted as a run counts them; no model is needed for it."""
    chat = bool(tokenizer.chat_template)
    count = LoadedModel("m", None, tokenizer, chat, None, None).count  # type: ignore[arg-type]
    return TaskRequest(seed=seed, limit=limit, model_name="embedded", tokenizer=tokenizer, count_tokens=count)


class Answers(LM):
    """Answers with what the document says, or with nothing."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        self.right = right

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        return [request.doc["answer"] if self.right else "" for request in requests]

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_through_lm_eval(name: str, right: bool, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)  # the documents never pass through the datasets cache
    spec, manager = build_task(name, SMALL[name], asked(tokenizer, seed=0, limit=3))
    results = simple_evaluate(
        Answers(right), tasks=spec.lm_eval_tasks, task_manager=manager, limit=3, bootstrap_iters=0, log_samples=True
    )
    for task, metric in spec.metric.items():
        samples = results["samples"][task]
        assert len(samples) == 3
        assert [s[metric] * spec.scale for s in samples] == [100.0 if right else 0.0] * 3
        assert all(s["doc"]["meta"]["tokens"] <= s["doc"]["meta"]["length"] for s in samples)
        assert samples[0]["arguments"][0][1]["max_gen_toks"] <= spec.max_new_tokens


@pytest.mark.parametrize("name", ["needle", "needle_pocket", "pocket_chain"])
def test_a_larger_limit_only_adds_documents(name: str, tokenizer) -> None:
    prompts = []
    for limit in (2, 4):
        spec, manager = build_task(name, SMALL[name], asked(tokenizer, seed=3, limit=limit))
        (task,) = manager.load(spec.lm_eval_tasks)["tasks"].values()
        prompts.append(list(task.test_docs()["prompt"]))
    assert len(prompts[1]) == 4
    assert prompts[1][:2] == prompts[0]


@pytest.mark.parametrize("module", [needle, needle_pocket])
def test_definition_and_module_agree(module, tokenizer) -> None:
    name = module.__name__.rpartition(".")[2]
    text = resources.files("pqcache.harness.tasks").joinpath(f"{name}.yaml").read_text()
    definition = yaml.load(text.replace("!function ", ""), Loader=yaml.SafeLoader)
    assert definition["task"] == name
    assert definition["generation_kwargs"]["max_gen_toks"] == module.MAX_NEW_TOKENS


@pytest.mark.parametrize(("name", "length"), [(name, None if name == "needle" else 2048) for name in ALONE])
def test_answers_are_long_enough_to_test_the_cache_and_fit(name: str, length: int | None, tokenizer) -> None:
    """The first answer token comes from exact prefill attention: only what follows measures a method."""
    options = {"length": length} if length else SMALL[name]
    spec, manager = build_task(name, options, asked(tokenizer, seed=1, limit=4))
    (task,) = manager.load(spec.lm_eval_tasks)["tasks"].values()
    sizes = [len(tokenizer(doc["answer"], add_special_tokens=False)["input_ids"]) for doc in task.test_docs()]
    assert min(sizes) >= 8
    assert max(sizes) + 1 <= spec.max_new_tokens


def test_the_pocket_group_is_the_unweighted_mean_of_its_families(tokenizer) -> None:
    spec, manager = build_task("pocket", {"length": 512}, asked(tokenizer, seed=0, limit=1))
    assert set(spec.metric) == set(MADE) - {"needle", "needle_pocket", "pocket"}
    for task in manager.load(spec.lm_eval_tasks)["tasks"].values():
        assert (
            task.config.generation_kwargs["max_gen_toks"] == pocket.NEW_TOKENS[task.config.task.removeprefix("pocket_")]
        )
    results = simple_evaluate(Answers(True), tasks=spec.lm_eval_tasks, task_manager=manager, limit=1, bootstrap_iters=0)
    assert results["groups"]["pocket"]["score,none"] == 1.0


def test_options_have_types_and_defaults() -> None:
    defaults = {name: {f.name: f.default for f in dataclasses.fields(task_options(name))} for name in MADE}
    assert defaults["needle_pocket"] == defaults["pocket"] == defaults["pocket_chain"] == {"length": 2048}
    assert defaults["needle"] == {"lengths": None, "depths": None, "haystack": None}


def test_unknown_task_gets_a_did_you_mean() -> None:
    with pytest.raises(ValueError, match="^task=needle_poket: unknown task; did you mean needle_pocket"):
        task_options("needle_poket")


def test_a_prompt_too_short_for_pocket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^task\.length=511: must be at least 512"):
        task_options("pocket")(length=511)


def test_a_prompt_too_short_for_needle_pocket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^task\.length=10: must be at least"):
        task_options("needle_pocket")(length=10)
