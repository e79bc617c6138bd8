"""`pqcache.check`: what every method must keep, tried on a tiny model. The project's tests take their methods through the same.

    pqcache.check(MyMethod, n_sink=4)          # options for prompts of about a hundred tokens

Attended tokens are what the method's layers report; bytes are found by a walk through everything that the layers hold.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, logits, small_model, tokens
from pqcache.naming import suggestion
from pqcache.registry import METHODS, is_known, method_class
from pqcache.selective import Budget, Method, NotApplicable, SelectiveCache, attach
from pqcache.selective.budget import refreshed_to

DENSE = [tokens(90, 1)], [[t] for t in tokens(14, 9)]  # prompt and steps that are compared with the stock cache
TOKENS = 64  # the budget of `budget_held`
LONGEST = 300  # characters of a failure


def _require(ok: bool, why: str) -> None:
    """As `assert`, also under python -O."""
    if not ok:
        raise AssertionError(why)


class Subject:
    """A method under one setting: `make()` at a tight budget, `noop()` where it must equal dense attention."""

    def __init__(self, cls: type[Method], hyper: dict[str, Any]) -> None:
        self.cls, self.hyper = cls, hyper

    def make(self, **extra: Any) -> Method:
        return self.cls(**{"budget": Budget(ratio=0.25), **self.hyper, **extra})

    def noop(self, **extra: Any) -> Method:
        return self.cls.noop(**{**self.hyper, **extra})

    @property
    def whole_chunks(self) -> bool:
        """A chunk of the prompt that cuts what the method computes together is refused."""
        return self.make().chunk_unit(90) > 1

    def close(self, actual: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
        """Equal up to the rounding of float64; keys that are un-rotated and rotated again carry the fp32 tables' rounding."""
        tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if "rolling" in self.hyper.values() else {}
        torch.testing.assert_close(actual, expected, msg=lambda m: f"{message} {m}", **tolerance)

    def same_in_chunks(self, run: Callable[[], torch.Tensor], expected: torch.Tensor, message: str = "") -> None:
        """run() feeds a prompt in chunks of any size: the result is the same, or the method refuses aloud."""
        if not self.whole_chunks:
            self.close(run(), expected, message)
            return
        try:
            run()
        except ValueError as error:
            if "allowed are multiples of" not in str(error):
                raise
            return
        _require(False, "a chunk that cuts what is computed together was not refused")


# -- the invariants ----------------------------------------------------------------------------------------------------


def noop_equals_full(model: PreTrainedModel, subject: Subject, full: torch.Tensor | None = None) -> None:
    """full: what the stock cache gives for DENSE, where it is known."""
    subject.close(logits(model, subject.noop(), *DENSE), logits(model, None, *DENSE) if full is None else full)


def chunks_equal_one_block(model: PreTrainedModel, subject: Subject) -> None:
    prompt, steps = [tokens(90, 21)], [[t] for t in tokens(14, 20)]
    whole = logits(model, subject.make(), prompt, steps)
    subject.same_in_chunks(lambda: logits(model, subject.make(), prompt, steps, chunk=17), whole)


def padded_rows_equal_single_rows(model: PreTrainedModel, subject: Subject) -> None:
    """Rows of very different length: shorter than the sinks, too short for an index, long."""
    rows = [tokens(n, 30 + n) for n in (64, 31, 6, 1)]
    steps = [[(t + r) % 100 + 5 for r in range(len(rows))] for t in tokens(14, 20)[:9]]
    single = torch.cat(
        [logits(model, subject.make(), [row], [[column[r]] for column in steps]) for r, row in enumerate(rows)]
    )
    subject.close(logits(model, subject.make(), rows, steps), single, "one block:")
    subject.same_in_chunks(lambda: logits(model, subject.make(), rows, steps, chunk=23), single, "chunks:")


@torch.no_grad()
def reordered_rows_equal_rows_alone(model: PreTrainedModel, subject: Subject) -> None:
    """Beam search: after any reorder, each row continues as the row it came from would have."""
    rows = [tokens(80, 50), tokens(33, 51), tokens(80, 52)]
    before, index, after = tokens(3, 53), [2, 0, 0], tokens(7, 54)
    with attach(model):
        session = Session(model, SelectiveCache(model, subject.make()), rows)
        for t in before:
            session.step([t] * 3)
        session.reorder(index)
        got = torch.stack([session.step([t] * 3) for t in after], 1)
    for source in set(index):
        alone = logits(model, subject.make(), [rows[source]], [[t] for t in before + after])[:, 1 + len(before) :]
        for slot in (slot for slot, one in enumerate(index) if one == source):
            subject.close(got[slot : slot + 1], alone)


@torch.no_grad()
def bytes_counted(model: PreTrainedModel, subject: Subject) -> None:
    """A tensor that a layer holds outside `tensors()` would be memory nobody reports."""
    cache = SelectiveCache(model, subject.make())
    with attach(model):
        Session(model, cache, [tokens(300, 1)]).step([5])
    for layer in cache.served:
        counted = {t.untyped_storage().data_ptr() for part in layer.tensors().values() for t in part}
        held = [thing for thing in walk(layer) if isinstance(thing, torch.Tensor) and thing.numel()]
        missing = [t for t in held if t.untyped_storage().data_ptr() not in counted]
        shapes = ", ".join(str(tuple(t.shape)) for t in missing)
        _require(not missing, f"{type(layer).__name__} holds tensors that tensors() does not name: {shapes}")


def walk(thing: object, seen: set[int] | None = None) -> Iterator[object]:
    """All objects that the attributes of `thing` reach, but for caches, models and methods."""
    seen = set() if seen is None else seen
    # a Scaling, which is a float, has the model's sinks
    if id(thing) in seen or isinstance(thing, SelectiveCache | torch.nn.Module | Method | float):
        return
    seen.add(id(thing))
    yield thing
    if isinstance(thing, torch.Tensor):
        return
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    else:
        parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for part in parts:
        yield from walk(part, seen)


def budget_held(model: PreTrainedModel, subject: Subject, prompt: int = 300, steps: int = 90) -> None:
    """Of c earlier tokens a are attended at a step, by the rule that the method declares (selective.budget.RULES).

    Raises NotApplicable where the method takes no budget in tokens.
    """
    method = subject.make(budget=Budget(tokens=TOKENS))
    before = None
    for step, now in enumerate(attended(model, method, prompt, steps)):
        c, rule = prompt + step, method.effective_rule
        kept = holds(method, rule, c, now, before) if rule != "prompt" else within(method, prompt, step, now)
        _require(kept, f"budget={TOKENS}, {rule}: after {c} tokens layers attended {now}, a step before {before}")
        before = now


@torch.no_grad()
def attended(model: PreTrainedModel, method: Method, prompt: int, steps: int) -> list[list[float]]:
    """Earlier tokens attended: one list per step, with a number for each layer after the first `dense_layers`."""
    cache = SelectiveCache(model, method)
    seen: list[dict[int, float]] = []
    cache.ledger.attend = lambda layer, count, **_: seen[-1].update({layer: float(count) - 1})  # type: ignore[method-assign]
    with attach(model):
        session = Session(model, cache, [tokens(prompt, 1)])
        for token in tokens(steps, 2):
            seen.append({})
            session.step([token])
    chosen = range(method.dense_layers or 0, len(cache.served))
    silent = [i for i in chosen if any(i not in step for step in seen)]
    _require(not silent, f"layers {silent} told the ledger of no attended tokens")
    return [[step[i] for i in chosen] for step in seen]


def within(method: Method, prompt: int, step: int, now: list[float]) -> bool:
    """Whether the layers attend at most their budget of the prompt, in their mean, and what was generated since."""
    return sum(now) / max(1, len(now)) <= min(method.budget.total(prompt), prompt) + step


def holds(method: Method, rule: str, c: int, now: list[float], before: list[float] | None) -> bool:
    """Whether the layers of one step attend what the rule says; before: the step before."""
    if rule == "ignored":
        return set(now) <= {c}
    if rule == "exact":
        return set(now) == {min(TOKENS, c)}
    if rule == "extra":
        return set(now) == {min(c, TOKENS + int(method.compensation(c) + 1e-6))}  # type: ignore[attr-defined]
    if c <= TOKENS:
        return set(now) == {c}
    if rule == "whole":
        size: Any = getattr(method, "page", None) or getattr(method, "block", None)
        return all(TOKENS - size < a <= TOKENS for a in now)
    mean, page = sum(now) / len(now), getattr(method, "page", 1) or 1
    if rule == "refreshed" and len(set(now)) > 1:
        return False
    if before is not None and sum(before) / len(before) < TOKENS:
        return now == [a + 1 for a in before]
    top = TOKENS if before is None else refreshed_to(TOKENS)
    return top - page < mean <= top


INVARIANTS: dict[str, Callable[[PreTrainedModel, Subject], None]] = {
    "no-op equals Full": noop_equals_full,
    "budget held at every step": budget_held,
    "bytes counted": bytes_counted,
    "reordered rows": reordered_rows_equal_rows_alone,
    "prompt in chunks": chunks_equal_one_block,
    "left padding": padded_rows_equal_single_rows,
}


def check(method: str | type[Method], **options: Any) -> dict[str, str]:
    """Try a method on a tiny random model, print a line for each invariant, and return those that fail, with the reason.

    method: a class, or a name as `pqcache.use` takes it. options: its hyper-parameters, for prompts of about a hundred tokens.
    Takes seconds on a CPU. Raises ValueError for an unknown name, TypeError for what is no class of a Method.
    """
    if isinstance(method, str):
        if not is_known(method):
            raise ValueError(f"method={method!r}: unknown; {suggestion(method, METHODS)}")
        method = method_class(method)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"method={method!r}: expected a name of pqcache.methods() or a class of a Method")
    subject, model, failed, start = Subject(method, options), small_model(), dict[str, str](), time.perf_counter()
    for name, holds_for in INVARIANTS.items():
        said = "ok"
        try:
            holds_for(model, subject)
        except NotApplicable as error:
            said = f"does not apply: {error}"
        except Exception as error:  # whatever a method's code does
            failed[name] = _reason(error)
            said = f"FAILS: {failed[name]}"
        print(f"{name:<26}{said}")
    print(f"{method.__name__}: {len(failed)} of {len(INVARIANTS)} fail, {time.perf_counter() - start:.0f} s")
    return failed


def _reason(error: Exception) -> str:
    """What failed in one line; of an error of the method's own code also where."""
    text = " ".join(str(error).split())[:LONGEST]
    if isinstance(error, AssertionError):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(last.filename).name}, line {last.lineno})"
