"""Any command line ends in a plan or in one line per error: no traceback, no hang, whatever the values hold."""

import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import run
from pqcache.fields import option_fields
from pqcache.harness.config.options import DecodeOptions, ModelOptions, Refused, RunOptions
from pqcache.harness.config.overrides import options_of
from pqcache.harness.tasks import task_class
from pqcache.registry import METHODS, method_class
from tests.harness.cells import planned

SECONDS = 60.0  # of CPU for one command; a busy machine costs none
# Every task but those that need lm-eval's index of thousands of names, which takes seconds to read.
TASKS = [name for name in options_of("task", run.CONFIGS) if name != "lm_eval"]
MODELS = [name for name in options_of("model", run.CONFIGS) if name != "hf"]

NASTY = [
    "null", "true", "", "''", "nan", "inf", "-inf", "1e400", "-0", "0", "-1", "1", "2", "0.5", "64", "1_000", "0x10", "9" * 40,
    "9" * 5000, "a", "paper", "release", "host", "[]", "[[1]]", "{}", "{a:1}", "{a:{b:[1,2]}}", "[1,2,3]", "[a,b]", "[null]",
    "'a b'", "'a\nb'", '"\\n"', "é", "\ud800", "\x00", "a" * 3000, "'" + "b" * 20_000 + "'", "(", "[", "{", "[" * 200 + "]" * 200,
    "${budget}", "${nope}", "${oc.env:HOME}", "${oc.env:NOPE}", "${oc.env:SOME_TOKEN}", "${oc.decode:'1'}", "???", "glob(*)",
    "interval(0,1)", "range(1,100000000)", "range(1,3)", "range(0,1,0)", "choice(1,2)", "choice()", "sort(3,1)", "shuffle(1,2)",
    "extend_list(1)", "int('1')", "str(1)", "1,2", ",", "1,", "/dev/null", "/proc/1/mem", "~", "..", "../" * 50, "a/" * 200,
    "\\", "$", "%s", "a=b", "a:b", "#", "!!python/object:os.system", "cuda:99", "cuda:x", "2026-01-01", "on", "~null",
]  # fmt: skip


def keys() -> list[str]:
    top = [*option_fields(RunOptions), "decode", *(f"decode.{key}" for key in option_fields(DecodeOptions))]
    methods = {f"method.{key}" for name in METHODS for key in option_fields(method_class(name))}
    tasks = {f"task.{key}" for name in TASKS for key in option_fields(task_class(name).Options)}
    odd = [
        "",
        "task.a b",
        *"x method. .m method.m.x hydra.mode hydra.x hydra.sweeper.params.seed method.name cells".split(),
    ]
    odd += "report report.title cell paper_scale best_of model task experiment é".split()
    return [*top, *sorted(methods), *sorted(tasks), *(f"model.{key}" for key in option_fields(ModelOptions)), *odd]


value = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),  # the codec of the default takes seconds to list
    st.integers().map(str),
    st.floats().map(str),
    st.lists(st.integers(-5, 5000), max_size=4).map(str),
)
override = st.builds(
    lambda sign, key, text: f"{sign}{key}={text}",
    st.sampled_from(["", "", "", "+", "++", "~"]),
    st.sampled_from(keys()),
    value,
)
line = st.builds(
    lambda many, method, task, model, rest: [*many, f"method={method}", f"task={task}", f"model={model}", *rest],
    st.sampled_from([[], [], ["-m"]]),
    st.sampled_from(sorted(METHODS)),
    st.sampled_from(TASKS),
    st.sampled_from(MODELS),
    st.lists(override, min_size=1, max_size=4),
)


@pytest.mark.rest
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(line)
def test_a_command_line_is_a_plan_or_one_line_per_error(argv: list[str]) -> None:
    began = time.process_time()
    plan, lines = None, ["usage"]
    try:
        plan = planned(argv)
    except Refused as refused:
        lines = refused.lines
    except SystemExit as usage:  # argparse: flags that are none of ours
        lines = ["usage"] if usage.code == 2 else []
    assert plan is not None or lines, argv
    for text in lines:
        assert "\n" not in text and "\r" not in text and len(text) < 2500, argv
        text.encode()
    for cell in plan.cells[:3] if plan is not None else []:
        assert cell.name
        assert cell.yaml()
    assert time.process_time() - began < SECONDS, argv
