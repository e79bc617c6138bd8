"""`batch=<n>`: n prompts of similar length are answered at once. `batch_check=<k>`: the first k documents of each sub-task are
answered again alone.

In float64 both answers are equal. In fewer bits sums of other shapes round differently, and where two tokens are nearly as likely
an answer may change: the batch is part of a cell's identity. Times and bytes of a batch belong to no sample, so its samples have
none. Cells share the prefill of a batch as they share that of a prompt (sharing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pqcache.harness.run.too_long import TooLong
from pqcache.selective import NonFinite, NotApplicable, OwnPrefill, Request, generate_batch

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.prepared import Prepared
    from pqcache.harness.run.samples import Sample
    from pqcache.harness.run.sharing import Recorder
    from pqcache.selective import Prefill

APART = "batch > 1: {} takes prompts of one length in chunks; prompts of other lengths are answered apart"
DIFFERS = "differs_alone"  # in a sample's `extra`: 1 if the answer alone is another one

Todo = tuple["Prepared", "Instance"]  # a request in the model's terms, and as lm-eval made it
Ask = tuple["Instance", int]  # a request, and the number of its answer


def check_task(tasks: dict[str, Any], batch: int) -> None:
    """Refuse tasks that are not answered by generation. Raises a one-line ValueError."""
    others = [name for name, task in tasks.items() if task.OUTPUT_TYPE != "generate_until"]
    if batch > 1 and others:
        raise ValueError(f"batch={batch}: {others[0]} scores given texts, which works with batch=1 only")


def fill(lm: HarnessLM, requests: Sequence[Instance], done: Callable[[int], object] = lambda count: None) -> None:
    """Compute the missing samples of generation requests into the log. done: is called with the size of each batch."""
    asks = [(request, draw) for request in requests for draw in lm.draws]
    for group in _batches(lm, asks, lambda ask: ask[1] in lm.lacking(ask[0])):
        for part in _parts(lm, _read(lm, group)):
            try:
                _answer(lm, part)
            except NotApplicable:  # the longest prompt with the longest answer may exceed a window that no row does
                for one in part:
                    _answer(lm, [one])
            done(len(part))


def share(
    members: Sequence[HarnessLM],
    requests: Sequence[Instance],
    recorder: Recorder,
    done: Callable[[int], object] = lambda count: None,
) -> None:
    """Compute the batches that several cells lack, each from one prefill. `fill` computes what is left."""
    alone: set[int] = set()  # members that need their own prefill
    asks = [(request, 0) for request in requests]
    for group in _batches(members[0], asks, lambda ask: any(not lm.has(ask[0]) for lm in members)):
        lacking = [
            (index, draw)
            for index, lm in enumerate(members)
            for draw in lm.draws
            if index not in alone and all(draw in lm.lacking(request) for request, _ in group)
        ]
        prefill: Prefill | None = None
        for index, draw in lacking if len(lacking) > 1 else ():
            if index in alone:
                continue
            lm = members[index]
            todo = _read(lm, [(request, draw) for request, _ in group])
            try:
                if prefill is None and (prefill := recorder.record_batch(lm, _rows(lm, todo))) is None:
                    break
                _answer(lm, todo, prefill)
            except OwnPrefill:
                alone.add(index)
            except Exception:  # the cell's own run will meet the same error and report it
                alone.add(index)
                prefill = None  # it may have been left half used
        done(len(group))


def _batches(lm: HarnessLM, asks: Sequence[Ask], lacks: Callable[[Ask], bool]) -> Iterator[Sequence[Ask]]:
    """The lacking answers in batches, those with the longest answers and prompts first: little padding and waiting."""
    sizes: list[tuple[int, int]] = []
    todo: list[Ask] = []
    for ask in asks:
        try:
            prepared = lm.read(ask[0], tokens=False)
        except TooLong:
            continue
        if lacks(ask):
            todo.append(ask)
            sizes.append((prepared.new_tokens, prepared.known.tokens - prepared.question))
    order = sorted(range(len(todo)), key=lambda i: sizes[i], reverse=True)
    for start in range(0, len(order), lm.batch):
        yield [todo[i] for i in order[start : start + lm.batch]]


def _read(lm: HarnessLM, group: Sequence[Ask]) -> list[Todo]:
    return [(lm.read(request, draw=draw), request) for request, draw in group]


def _rows(lm: HarnessLM, group: Sequence[Todo]) -> list[Request]:
    rows = []
    for prepared, _ in group:
        ends, not_first = lm.ends(prepared)
        how = ends, lm.stopper(prepared), prepared.question, not_first, prepared.sampling
        rows.append(Request(prepared.ids, prepared.new_tokens, *how))
    return rows


def _parts(lm: HarnessLM, group: Sequence[Todo]) -> list[list[Todo]]:
    """A batch as prompts that the method can answer together: in chunks, InfLLM's choose their blocks by position."""
    lengths = [len(prepared.ids) - prepared.question for prepared, _ in group]
    chunk = lm.chunks.of(lm.loaded.model, max(lengths))
    if chunk is None or chunk >= max(lengths) or len(set(lengths)) == 1 or lm.method.chunk_unit(max(lengths)) == 1:
        return [list(group)]
    if APART not in lm.said:
        lm.said.add(APART)
        print(APART.format(lm.method.name), flush=True)
    return [
        [one for one, own in zip(group, lengths, strict=True) if own == length] for length in dict.fromkeys(lengths)
    ]


def _answer(lm: HarnessLM, group: Sequence[Todo], prefill: Prefill | None = None) -> None:
    first = group[0][0]
    lm.begin(first.task, first.doc_id, first.ids)
    lm.within.begin(
        f"{len(group)} samples from {first.task} sample {first.doc_id} on", max(p.new_tokens for p, _ in group)
    )
    rows = _rows(lm, group)
    chunk = lm.chunks.of(lm.loaded.model, max(row.body for row in rows))
    results = generate_batch(
        lm.loaded.model, lm.method, rows, attn=lm.attn, prefill_chunk=None if prefill else chunk, prefill=prefill,
        graph=lm.graph, kernels=lm.kernels,
    )  # fmt: skip
    for (prepared, request), row, result in zip(group, rows, results, strict=True):
        key = prepared.task, prepared.doc_id
        if isinstance(result, NonFinite):
            sample = lm.fail(result, *key, prepared.mark, "", len(prepared.ids))
        else:
            result.extra.update(lm.chunks.fact(chunk))
            sample = lm.sample_of(prepared, request.doc, result, row.eos_token_ids)
        lm.log_sample(request, prepared, sample)
        lm.computed.add(lm.key(*key, prepared.draw))


def check(lm: HarnessLM, requests: Sequence[Instance]) -> None:
    """Answer the first `batch_check` documents of each lm-eval task again alone, and note in the log whether that differs.

    Of several answers to a document the first is checked.
    """
    for request in requests:
        if int(request.doc_id or 0) >= lm.batch_check:
            continue
        try:
            prepared = lm.read(request)
        except TooLong:
            continue
        sample = lm.find(prepared)
        if sample is None or "failed" in sample or DIFFERS in sample["extra"]:
            continue
        try:
            alone = lm.generate_alone(prepared, request.doc)["response"]
        except NonFinite:
            alone = None
        key = lm.key(prepared.task, prepared.doc_id, prepared.draw)
        lm.log.append({**sample, "extra": {**sample["extra"], DIFFERS: int(alone != sample["response"])}})
        lm.computed.add(key)


def facts(samples: Sequence[Sample], batch: int) -> dict[str, Any]:
    """What a row's `extra` says of its batches."""
    checked = [s["extra"][DIFFERS] for s in samples if DIFFERS in s["extra"]]
    found = {"batch_checked": len(checked), "batch_differ": sum(checked)} if checked else {}
    return {"batch": batch, **found}
