"""Try the architectures of transformers under four methods, and write docs/architectures.md.

    python scripts/try_architectures.py                 all of them: about a minute on one core
    python scripts/try_architectures.py llama opt       these, printed; nothing is written

Each architecture is a small model of random weights. It runs if, for a batch with left padding,

- every method answers at a quarter of the prompt, with finite logits,
- every method under its no-op, where it must equal full attention, gives the logits of a plain `model.generate`.

An architecture that is refused ends in one line, which is its row in the table. Exit code 1 if one neither runs nor is refused.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import pqcache
from pqcache import registry
from pqcache.api.drive import SMALL, small_model
from pqcache.registry import method_class
from pqcache.selective import Budget, NotApplicable
from pqcache.selective.attach import check_config
from pqcache.selective.shape import served
from pqcache.selective.support import sliding_window

TEMPLATE = Path(__file__).with_name("architectures.txt")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
# method -> options for prompts of a hundred tokens; kivi ignores the budget
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "pqcache": {"n_sink": 4, "b": 4},
    "snapkv": {"n_sink": 4, "w": 8},
    "kivi": {"group": 8, "residual": 16},
}
BUDGET = 0.25
# kind of attention -> a model whose configuration at its defaults says whether a method applies
KINDS = {
    "full": "llama",
    "sliding windows": "gemma3_text",
    "layers without rotation": "smollm3",
    "sinks": "gpt_oss",
    "soft caps": "gemma2",
    "latent": "deepseek_v3",
    "states beside attention": "qwen3_next",
}
SAME, OTHER = 1e-4, 1e-3  # logits that differ by less are equal; those of a method at work differ by more
PROMPT, PADDING, NEW = 100, 20, 5  # tokens of the longer row, padding of the other, answer


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers. options: of its configuration, beside SMALL."""

    kind: str
    models: str  # what people know it by
    options: dict[str, Any]
    small: bool  # false: it is refused, by its configuration at its defaults


def families() -> tuple[Family, ...]:
    """Those of architectures.yaml."""
    known = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text(encoding="utf-8"))
    shared, found = known.pop("shared"), []
    for part, each in known.items():
        for kind, options in each.items():
            models, own = options.pop("models"), {}
            for name in shared.keys() & options.keys():
                own |= shared[name] if options.pop(name) else {}
            found.append(Family(kind, models, own | options, part == "small"))
    return tuple(found)


FAMILIES = families()


@dataclass
class Trial:
    """How a family fared."""

    family: Family
    refused: str = ""  # the line; empty: it was tried
    methods: dict[str, str] = field(default_factory=dict)  # method -> "runs", or what went wrong
    note: str = ""

    @property
    def runs(self) -> bool:
        return bool(self.methods) and set(self.methods.values()) == {"runs"}


def config_of(family: Family) -> PreTrainedConfig:
    """A small configuration; at its defaults where it is refused by what it says, before a model is built."""
    return AutoConfig.for_model(family.kind, **{**(SMALL if family.small else {}), **family.options})


def attempt(family: Family) -> Trial:
    """Refuse the family by its configuration, or run it under every method."""
    trial, config = Trial(family), config_of(family)
    try:
        check_config(config)
    except ValueError as error:
        trial.refused = str(error).removeprefix(f"model {family.kind}: ").removeprefix("not supported: ")
        return trial
    if not family.small:
        trial.methods["full"] = "is not refused: it needs a small configuration"
        return trial
    model = small_model(config).float()
    stock = answer(model)
    text = config.get_text_config()
    if sliding_window(text):
        trial.note = "up to the length of its sliding window, `full` beyond it, too"
    elif len(served(text)) < text.num_hidden_layers:
        trial.note = "its layers of full attention"
    for name, options in METHODS.items():
        trial.methods[name] = _under(model, name, options, stock)
    if sliding_window(text):
        text.sliding_window = PROMPT // 3
        narrow = small_model(config).float()
        trial.methods["full"] = _under(narrow, "full", {}, answer(narrow))
    return trial


def _under(model: PreTrainedModel, name: str, options: dict[str, Any], stock: torch.Tensor) -> str:
    """`runs`, or one line that says what went wrong."""
    try:
        with pqcache.use(model, name, budget=BUDGET, **options):
            tight = answer(model)
        with pqcache.use(model, method_class(name).noop(**options)):
            exact = answer(model)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not bool(tight.isfinite().all()):
        return "logits are not finite"
    difference = float((exact - stock).abs().max())
    if difference > SAME:
        return f"its no-op differs from full attention by {difference:.2g}"
    return "runs" if name == "full" or float((tight - stock).abs().max()) > OTHER else "does nothing"


def answer(model: PreTrainedModel) -> torch.Tensor:
    """Logits (n, new tokens, vocabulary) of greedy answers to two prompts, the second one left-padded."""
    ids = torch.randint(3, 128, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    ids[1, :PADDING] = 0
    greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    kept = {"output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(ids, attention_mask=(ids != 0).long(), **kept, **greedy).logits, 1)


def table(columns: list[str], trials: list[Trial], cells: Callable[[Trial], list[str]]) -> str:
    """Markdown with a line per family."""
    of = sorted(trials, key=lambda trial: trial.family.kind)
    lines = [[f"`{trial.family.kind}`", trial.family.models, *cells(trial)] for trial in of]
    head = ["model_type", "for example", *columns]
    top = [f"| {' | '.join(head).rstrip()} |", "|---" * len(head) + "|"]
    return "\n".join([*top, *(f"| {' | '.join(line)} |" for line in lines)])


def applying() -> str:
    """Markdown with a line per method: for each of KINDS `yes`, or why it does not apply at a fifth of the prompt."""
    lines = []
    for name in registry.METHODS.keys() - {"replay"}:  # it attends what a recorded run attended
        cells, method = [], method_class(name)(budget=Budget(ratio=0.2))
        for kind in KINDS.values():
            try:
                method.check_model(AutoConfig.for_model(kind))
                cells.append("yes")
            except NotApplicable as error:
                cells.append(f"not applicable: {str(error).split(': ')[-1]}")
        lines.append([f"`{name}`", *cells])
    rows = [["method", *KINDS], ["---"] * (len(KINDS) + 1), *sorted(lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(trials: list[Trial]) -> str:
    """docs/architectures.md."""
    runs = [trial for trial in trials if trial.runs]
    refused = [trial for trial in trials if trial.refused]
    return TEMPLATE.read_text(encoding="utf-8").format(
        version=transformers.__version__,
        methods=applying(),
        runs=table([*METHODS, ""], runs, lambda trial: [*trial.methods.values(), trial.note]),
        refused=table(["why"], refused, lambda trial: [trial.refused]),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="model_type", help="try these alone; write nothing")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write (default: docs/architectures.md)")
    options = parser.parse_args(arguments)
    known = [family.kind for family in FAMILIES]
    if unknown := [kind for kind in options.kinds if kind not in known]:
        parser.error(f"model_type={unknown[0]}: known: {', '.join(known)}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    trials, wrong = [], 0
    for family in FAMILIES:
        if options.kinds and family.kind not in options.kinds:
            continue
        trial = attempt(family)
        trials.append(trial)
        wrong += not (trial.runs or trial.refused)
        said = f"refused: {trial.refused}" if trial.refused else ", ".join(f"{m} {r}" for m, r in trial.methods.items())
        print(f"{family.kind}: {said}", flush=True)
    if not options.kinds and not wrong:
        options.out.write_text(page(trials), encoding="utf-8")
        print(options.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
