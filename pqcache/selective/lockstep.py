"""Several methods answer one prompt in lockstep: a decode step of all of them is one forward pass.

A decode step of one prompt reads all weights for one token. The methods of a comparison take the same step of the same prompt, so
their tokens can be the rows of one batch: projections and MLPs are computed once for all, attention by each method's own cache.

    answers = lockstep(model, [partial(generate, model, method, ids, prefill=prefill, ...) for method in methods])

Each callable runs in a thread of its own until its next decode step. One runs at a time, in their order, so that nothing depends
on timing; random numbers are each one's own. What is computed is what each would compute alone, up to the rounding of products
with another number of rows. Times of steps do not exist then.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.attach import attach
from pqcache.selective.cache import Joint, SelectiveCache

_member: ContextVar[Any] = ContextVar("_member", default=None)


class Stopped(BaseException):
    """The group was left: its members end."""


@dataclass(eq=False)
class _Member:
    """A callable on its way, in a thread of its own, and the decode step that it waits for."""

    work: Callable[[], Any]
    of: int  # members of the group
    random: torch.Tensor  # its state of torch's generator while others run
    come: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # its turn begins
    gone: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # its turn has ended
    stopped: bool = False
    ended: bool = False
    result: Any = None  # or what was raised
    step: Any = None  # cache, ids (n, 1), positions (n, 1)
    logits: torch.Tensor | Exception | None = None  # of the step (n, vocabulary)

    def run(self) -> None:
        _member.set(self)
        try:
            self._begin()
            self.result = self.work()
        except BaseException as error:  # whoever called `lockstep` sees it
            self.result = error
        self.ended, self.step = True, None  # its cache is free
        self._end()

    def take(self, *step: Any) -> torch.Tensor:
        """The logits of this member's next decode step, which the others of the group take with it."""
        self.step = step
        self._end()
        self._begin()
        if isinstance(self.logits, Exception):
            raise self.logits
        assert self.logits is not None
        return self.logits

    def _begin(self) -> None:
        self.come.acquire()
        if self.stopped:
            raise Stopped
        torch.set_rng_state(self.random)

    def _end(self) -> None:
        self.random = torch.get_rng_state()
        self.gone.release()


def lockstep(model: PreTrainedModel, works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all of these, their decode steps of `model` as one. Returns, in their order, what they return or raise."""
    random = torch.get_rng_state()
    members = [_Member(work, len(works), random) for work in works]
    threads = [threading.Thread(target=copy_context().run, args=(member.run,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    try:
        with attach(model):  # a member's own ends with the member
            while running := [member for member in members if not member.ended]:
                for member in running:
                    member.come.release()
                    member.gone.acquire()
                if waiting := [member for member in running if not member.ended]:
                    _compute(model, waiting)
    finally:  # also where the user interrupts: nobody may go on computing
        for member, thread in zip(members, threads, strict=True):
            member.stopped = True
            member.come.release()
            thread.join()
        torch.set_rng_state(random)
    return [member.result for member in members]


@torch.no_grad()
def _compute(model: PreTrainedModel, members: Sequence[_Member]) -> None:
    """One forward pass for the decode steps that these members wait for."""
    caches, ids, positions = zip(*(member.step for member in members), strict=True)
    rows = [len(one) for one in ids]
    try:
        joint = Joint(caches, rows)
        logits = model(
            input_ids=torch.cat(ids), position_ids=torch.cat(positions), past_key_values=joint,
            use_cache=True, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        joint.give_back()
    except Exception as error:  # out of memory, perhaps: each member fails with it
        for member in members:
            member.logits = error
        return
    for member, own in zip(members, logits.split(rows), strict=True):
        member.logits = own


def in_lockstep() -> int:
    """How many callables `lockstep` was given, inside one of them; 0 elsewhere."""
    member = _member.get()
    return 0 if member is None else member.of


def joint_step(cache: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """The logits (n, vocabulary) of a decode step, ids and positions (n, 1), taken with others; None: it is to be taken alone."""
    member = _member.get()
    if member is None or ids.shape[1] != 1 or not isinstance(cache, SelectiveCache) or not cache.columns:
        return None
    return member.take(cache, ids, positions)
