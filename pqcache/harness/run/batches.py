"""`batch=<n>`: n prompts of similar length are answered at once. `batch_check=<k>`: the first k documents of each sub-task are
answered again alone.

In float64 both answers are equal. In fewer bits sums of other shapes round differently, and where two tokens are nearly as likely
an answer may change: the batch is part of a cell's identity. Times and bytes of a batch belong to no sample, so its samples have
none. Prefills are not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pqcache.harness.run.too_long import TooLong
from pqcache.selective import NonFinite, NotApplicable, Request, generate_batch

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.adapter import HarnessLM, Prepared
    from pqcache.harness.run.samples import Sample

APART = "batch > 1: {} takes prompts of one length in chunks; prompts of other lengths are answered apart"
NOTE = "batch > 1: prefills are not shared between cells; each cell computes its own"
DIFFERS = "differs_alone"  # in a sample's `extra`: 1 if the answer alone is another one

Todo = tuple["Prepared", dict[str, Any]]  # a request in the model's terms, and its document


def check_task(tasks: dict[str, Any], batch: int) -> None:
    """Refuse tasks that are not answered by generation. Raises a one-line ValueError."""
    others = [name for name, task in tasks.items() if task.OUTPUT_TYPE != "generate_until"]
    if batch > 1 and others:
        raise ValueError(f"batch={batch}: {others[0]} scores given texts, which works with batch=1 only")


def fill(lm: HarnessLM, requests: Sequence[Instance], done: Callable[[int], object] = lambda count: None) -> None:
    """Compute the missing samples of generation requests into the log. done: is called with the size of each batch."""
    todo: list[tuple[tuple[int, int], Instance]] = []  # ((new tokens, prompt tokens before the question), request)
    for request in requests:
        try:
            prepared = lm.read(request, tokens=False)
        except TooLong:
            continue
        if lm.find(prepared) is None:
            todo.append(((prepared.new_tokens, prepared.known.tokens - prepared.question), request))
    todo.sort(key=lambda pair: pair[0], reverse=True)  # little padding and waiting; the largest first
    for start in range(0, len(todo), lm.batch):
        group = [(lm.read(request), request.doc) for _, request in todo[start : start + lm.batch]]
        for part in _parts(lm, group):
            try:
                _answer(lm, part)
            except NotApplicable:  # the longest prompt with the longest answer may exceed a window that no row does
                for one in part:
                    _answer(lm, [one])
            done(len(part))


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


def _answer(lm: HarnessLM, group: Sequence[Todo]) -> None:
    first = group[0][0]
    lm.begin(first.task, first.doc_id, first.ids)
    rows = []
    for prepared, _ in group:
        ends, not_first = lm.ends(prepared)
        rows.append(
            Request(prepared.ids, prepared.new_tokens, ends, lm.stopper(prepared), prepared.question, not_first)
        )
    longest = max(row.body for row in rows)
    chunk = lm.chunks.of(lm.loaded.model, longest)
    results = generate_batch(lm.loaded.model, lm.method, rows, attn=lm.attn, prefill_chunk=chunk)
    for (prepared, doc), row, result in zip(group, rows, results, strict=True):
        key = prepared.task, prepared.doc_id
        if isinstance(result, NonFinite):
            sample = lm.fail(result, *key, prepared.mark, "", len(prepared.ids))
        else:
            result.extra.update(lm.chunks.fact(chunk))
            sample = lm.sample_of(prepared, doc, result, row.eos_token_ids)
        lm.log_sample(prepared, sample)
        lm.computed.add(key)


def check(lm: HarnessLM, requests: Sequence[Instance]) -> None:
    """Answer the first `batch_check` documents of each lm-eval task again alone, and note in the log whether that differs."""
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
        key = prepared.task, prepared.doc_id
        lm.log.append({**sample, "extra": {**sample["extra"], DIFFERS: int(alone != sample["response"])}})
        lm.computed.add(key)


def facts(samples: Sequence[Sample], batch: int) -> dict[str, Any]:
    """What a row's `extra` says of its batches."""
    checked = [s["extra"][DIFFERS] for s in samples if DIFFERS in s["extra"]]
    found = {"batch_checked": len(checked), "batch_differ": sum(checked)} if checked else {}
    return {"batch": batch, **found}
