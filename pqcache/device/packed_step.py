"""A layer's decode step over codes, as a few Triton launches: the new token is stored, everything attended, one token packed.

Tokens that are still exact are in a ring per stream, so that no tensor moves from step to step. Where a schedule packs one token
at a time, a kernel does it. To pack many tokens, and to observe a step's attention, is the host's work: `needs_host` says before
the step whether there is any, and such a step is not recorded (`pqcache.selective.captured`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from pqcache.device.step import serves
from pqcache.device.switch import HERE, device_of, power_of_2, still_served
from pqcache.store.layout import Codes, Run
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from pqcache.store.transfer import send

LONGEST = 4096  # exact tokens at which a schedule must have packed some: a ring holds as many


def _described(store: PackedStore) -> tuple[list[Run], tuple[Codes | None, Codes | None]] | None:
    """A store's packed tokens for kernels: whole runs, then the codes of the list that ends with the exact tokens.

    With one run each, K and V may differ in how many tokens are packed. None: codes that no kernel reads.
    """
    codes: list[Codes | None] = []
    for stream in (store.k, store.v):
        layout = stream.codec.layout() if any(stream.body) else []
        if layout is None or len(layout) > 1:
            break
        codes.append(layout[0] if layout else None)
    else:
        return [], (codes[0], codes[1])
    runs, read = store.runs()
    if not runs or not list(read) == store.k.body == store.v.body:
        return None
    return runs, (None, None)


def _lines(store: PackedStore, runs: Sequence[Run], shifts: Sequence[Sequence[int]]) -> list:
    """The counts of all lists, see `triton_packed.COLUMNS`: (lists, n, h_kv, 5). shifts: the last list's, per row of K and V."""
    tables = [[[[count] * 3 + [0, 0] for count in row] for row in run.counts] for run in runs]
    last = []
    for row, length in enumerate(store.lengths):
        packed = [0, 0] if runs else [store.k.body[row], store.v.body[row]]
        exact = length - (store.k.body[row] if runs else 0)
        last.append([[exact, *packed, *shifts[row]]] * store.k.heads)
    return [*tables, last]


def attend_packed(q: torch.Tensor, store: PackedStore, scaling: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of q (n, h, 1, d) over everything in a store, which stays as it is: out (n, 1, h, d), lse (n, h, 1) fp32.

    None: kernels do not serve it.
    """
    described = _described(store) if serves(q) else None
    if described is None:
        return None
    from pqcache.device import triton_packed

    runs, codes = described
    exact, starts = [], []
    for stream in (store.k, store.v):
        assert stream.tail is not None
        tail = stream.tail if stream.tail.shape[2] else stream.tail.new_zeros((*stream.tail.shape[:2], 1, q.shape[3]))
        exact.append(tail.contiguous())
        first = [0] * len(stream.body) if runs else stream.body
        starts.append([stream.tail.shape[2] - held - body for held, body in zip(stream.tails, first, strict=True)])
    counts = send(_lines(store, runs, list(zip(*starts, strict=True))), torch.int32, q.device)
    pair = exact[0], exact[1]
    lists = [triton_packed.TokenList(r.k, r.v, pair, counts[i], r.k.tokens) for i, r in enumerate(runs)]
    lists.append(triton_packed.TokenList(*codes, pair, counts[-1], store.length))
    return triton_packed.attend(q, lists, scaling)


def _places(start: int, count: int, ring: int) -> Iterator[tuple[slice, slice]]:
    """Where `count` tokens from the row's token `start` on are in a ring: pairs of slices, of the tokens and of the ring."""
    done = 0
    while done < count:
        at = (start + done) % ring
        more = min(count - done, ring - at)
        yield slice(done, done + more), slice(at, at + more)
        done += more


def _due(schedule, longest: int = LONGEST) -> int | None:
    """The fewest exact tokens of which a schedule packs some."""
    if isinstance(schedule, KeepNewest):
        return schedule.residual + 1
    return next((tail for tail in range(1, longest) if schedule(tail)), None)


class PackedStep:
    """Does decode steps on a packed store that is lent to it until `leave`; see selective/substitute.py for the interface."""

    def __init__(self, store: PackedStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self.version = 0  # changes with what a recording depends on: addresses and numbers of arguments
        self.room = 0  # tokens per row for which codes have room
        self.rings: list[torch.Tensor] = []
        self.counts: torch.Tensor | None = None
        self.served = True
        self._key: tuple = ()
        self.chain: tuple | None = None  # the launches of a step, until a tensor moves
        self.shaped: tuple = ()  # the queries that they were made for
        self._lend()

    @classmethod
    def over(cls, store: PackedStore, device: torch.device) -> PackedStep | None:
        """None if no kernel reads the store's codes, or its tails may grow without end."""
        if not store.lengths or _described(store) is None:
            return None
        if any((_due(s.schedule) or LONGEST) >= LONGEST for s in (store.k, store.v)):
            return None
        return cls(store, device)

    # -- on loan ----------------------------------------------------------------------------------------------------

    def _lend(self) -> None:
        """Take the exact tokens into the rings, and describe the codes."""
        for i, stream in enumerate((self.store.k, self.store.v)):
            assert stream.tail is not None
            tail = stream.tail
            n, heads, width, d = tail.shape
            due = _due(stream.schedule)
            assert due is not None
            size = max(due, max(stream.tails) + 1)
            if len(self.rings) <= i:
                self.rings.append(tail.new_zeros((n, heads, size, d)))
            elif self.rings[i].shape[2] < size:
                self.rings[i] = tail.new_zeros((n, heads, size, d))
            for row, (body, held) in enumerate(zip(stream.body, stream.tails, strict=True)):
                for tokens, places in _places(body, held, self.rings[i].shape[2]):
                    first = width - held
                    self.rings[i][row, :, places] = tail[row, :, first + tokens.start : first + tokens.stop]
        self._forget_tails()
        self._describe()

    def _forget_tails(self) -> None:
        for ring, stream in zip(self.rings, (self.store.k, self.store.v), strict=True):
            stream.tail = ring.new_empty((*ring.shape[:2], 0, ring.shape[3]))

    def _restore(self) -> None:
        """Give the exact tokens back, right-aligned."""
        for ring, stream in zip(self.rings, (self.store.k, self.store.v), strict=True):
            n, heads, size, d = ring.shape
            width = max(stream.tails)
            tail = ring.new_zeros((n, heads, width, d))
            for row, (body, held) in enumerate(zip(stream.body, stream.tails, strict=True)):
                for tokens, places in _places(body, held, size):
                    first = width - held
                    tail[row, :, first + tokens.start : first + tokens.stop] = ring[row, :, places]
            stream.tail = tail

    def _describe(self) -> None:
        """What launches need, from what the store holds now."""
        from pqcache.device import triton_pack, triton_packed

        described = _described(self.store)
        if described is None:  # the next step is the layer's own
            self.served = False
            return
        runs, codes = described
        starts = [[body, body] if runs else [0, 0] for body in self.store.k.body]
        lines = _lines(self.store, runs, starts)
        fresh = send(lines, torch.int32, self.device)
        if self.counts is None or self.counts.shape != fresh.shape:
            self.counts = fresh
        else:
            self.counts.copy_(fresh)
        pair = self.rings[0], self.rings[1]
        # powers of two: the number of splits, of which a recording is made, seldom changes
        self.lists = [
            triton_packed.TokenList(run.k, run.v, pair, self.counts[i], power_of_2(run.k.tokens))
            for i, run in enumerate(runs)
        ]
        length = max(1, self.store.length if not runs else max(self.store.k.tails))
        self.last = triton_packed.TokenList(*codes, pair, self.counts[-1], power_of_2(length))
        self.lists.append(self.last)
        # (of values, how many stay exact) of the streams whose tokens a kernel packs, one at a time
        self.packs = [
            (bool(i), stream.schedule.residual)
            for i, (stream, packed) in enumerate(zip((self.store.k, self.store.v), codes, strict=True))
            if isinstance(stream.schedule, KeepNewest) and packed is not None and triton_pack.can_pack(packed)
        ]
        key = tuple(
            x.data_ptr() if isinstance(x, torch.Tensor) else x
            for each in self.lists
            for x in (each.counts, each.splits, *each.arguments, *each.sizes.values())
        )
        if key != self._key:
            self._key, self.version, self.chain = key, self.version + 1, None

    def _packed_here(self) -> list[tuple[PackedStream, int]]:
        return [((self.store.k, self.store.v)[of_values], residual) for of_values, residual in self.packs]

    # -- steps --------------------------------------------------------------------------------------------------------

    def serves(self, q: torch.Tensor) -> bool:
        return self.served and still_served(q)

    def reserve(self, tokens: int) -> None:
        """Make room for codes of `tokens` tokens per row, in the streams that a kernel packs."""
        if tokens <= self.room:
            return
        rooms = [s.codec.reserve(max(1, tokens - residual)) + residual for s, residual in self._packed_here()]
        self.room = min(rooms, default=tokens)
        self._describe()

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), attend q (n, h, 1, d) to everything: (n, 1, h, d). `note` must follow."""
        if self.packs and self.store.length >= self.room:
            self.reserve(self.store.length + 1)
        device = device_of(q)
        if device is HERE:
            return self._launch(q, k, v, scaling), None
        with device:
            return self._launch(q, k, v, scaling), None

    def _launch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        key = scaling, q.shape, q.dtype
        if self.chain is None or key != self.shaped:
            from pqcache.device import triton_pack, triton_packed

            packs = [triton_pack.prepare_pack(self.last, of_values, residual) for of_values, residual in self.packs]
            attend = triton_packed.prepare_attend(q, self.lists, scaling)
            self.chain, self.shaped = (triton_packed.prepare_add(self.last), attend, packs), key
        add, attend, packs = self.chain
        add(k, v)
        out, lse = attend(q)
        for pack in packs:
            pack()
        self.seen = q, lse, scaling
        return out

    def note(self) -> float:
        """Count one more step, and do the host's part of it. Returns the tokens it attended, mean over rows."""
        packs = self._host_packs(1)
        observes = self.store.observes_step(1)
        for stream in (self.store.k, self.store.v):
            stream.tails = [tail + 1 for tail in stream.tails]
        lengths = self.store.lengths
        for stream, residual in self._packed_here():
            moved = [int(tail > residual) for tail in stream.tails]
            stream.tails = [tail - one for tail, one in zip(stream.tails, moved, strict=True)]
            stream.body = [body + one for body, one in zip(stream.body, moved, strict=True)]
        if packs or observes:
            self._restore()
        if observes:
            self.store.observe_step(*self.seen)
        if packs:
            self.store.pack()
            self._lend()
        elif observes:  # the rings still hold what was restored
            self._forget_tails()
        return fmean(lengths)

    def needs_host(self, ahead: int = 1) -> bool:
        """Whether, of the steps to come, number `ahead` is one that the host must take part in."""
        return self.store.observes_step(ahead) or self._host_packs(ahead)

    def _host_packs(self, ahead: int) -> bool:
        """Whether a schedule is due then, of a stream that no kernel packs."""
        here = [stream for stream, _ in self._packed_here()]
        others = [stream for stream in (self.store.k, self.store.v) if stream not in here]
        return any(stream.schedule(tail + ahead) for stream in others for tail in stream.tails)

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a step over all tokens chooses none")

    def join(self) -> None:
        """Nothing runs beside the step."""

    def finish(self) -> None:
        """Nothing is read or written on the host."""

    def leave(self) -> None:
        self._restore()

    def tensors(self) -> list[torch.Tensor]:
        return [*self.rings, *([] if self.counts is None else [self.counts])]
