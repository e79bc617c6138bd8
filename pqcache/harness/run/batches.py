"""`batch=<n>`: n prompts of similar length are answered at once. `batch_check=<k>`: the first k documents of each sub-task are
answered again alone.

In float64 both answers are equal. In fewer bits sums of other shapes round differently, and where two tokens are nearly as likely
an answer may change: the batch is part of a cell's identity. Times and bytes of a batch belong to no sample, so its samples have
none.
"""

from collections.abc import Callable, Iterator, Sequence

from lm_eval.api.instance import Instance

from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.prompts import Prepared, TooLong
from pqcache.harness.run.samples import DIFFERS
from pqcache.selective import NonFinite, NotApplicable, Prefill, Request, generate_batch

APART = "batch > 1: {} takes prompts of one length in chunks; prompts of other lengths are answered apart"

Todo = tuple[Prepared, "Instance"]  # a request in the model's terms, and as lm-eval made it
Ask = tuple["Instance", int]  # a request, and the number of its answer


def fill(lm: HarnessLM, requests: Sequence[Instance], done: Callable[[int], object] = lambda count: None) -> None:
    """Compute the missing samples of generation requests into the log, and check some. done: is told the size of each batch."""
    asks = [(request, draw) for request in requests for draw in lm.draws]
    for group in in_batches(lm, asks, lambda ask: ask[1] in lm.lacking(ask[0])):
        for part in _parts(lm, read(lm, group)):
            try:
                answer(lm, part)
            except NotApplicable:  # the longest prompt with the longest answer may exceed a window that no row does
                for one in part:
                    answer(lm, [one])
            done(len(part))
    check(lm, requests)


def in_batches(lm: HarnessLM, asks: Sequence[Ask], lacks: Callable[[Ask], bool]) -> Iterator[Sequence[Ask]]:
    """The lacking answers in batches, those with the longest answers and prompts first: little padding and waiting."""
    sizes: list[tuple[int, int]] = []
    todo: list[Ask] = []
    for ask in asks:
        try:
            prepared = lm.reader.read(ask[0], tokens=False)
        except TooLong:
            continue
        if lacks(ask):
            todo.append(ask)
            sizes.append((prepared.new_tokens, prepared.known.tokens - prepared.known.question))
    order = sorted(range(len(todo)), key=lambda i: sizes[i], reverse=True)
    for start in range(0, len(order), lm.batch):
        yield [todo[i] for i in order[start : start + lm.batch]]


def read(lm: HarnessLM, group: Sequence[Ask]) -> list[Todo]:
    """The answers of a batch in the model's terms."""
    return [(lm.reader.read(request, draw=draw), request) for request, draw in group]


def rows_of(lm: HarnessLM, group: Sequence[Todo]) -> list[Request]:
    """A batch as it is generated."""
    rows = []
    for prepared, _ in group:
        ends, not_first = lm.ends(prepared)
        how = ends, lm.stopper(prepared), prepared.known.question, not_first, prepared.sampling
        rows.append(Request(prepared.ids, prepared.new_tokens, *how))
    return rows


def _parts(lm: HarnessLM, group: Sequence[Todo]) -> list[list[Todo]]:
    """A batch as prompts that the method can answer together: in chunks, InfLLM's choose their blocks by position."""
    lengths = [len(prepared.ids) - prepared.known.question for prepared, _ in group]
    chunk = lm.chunks.of(lm.loaded.model, max(lengths))
    if chunk is None or chunk >= max(lengths) or len(set(lengths)) == 1 or lm.method.chunk_unit(max(lengths)) == 1:
        return [list(group)]
    if APART not in lm.said:
        lm.said.add(APART)
        print(APART.format(lm.method.name), flush=True)
    return [
        [one for one, own in zip(group, lengths, strict=True) if own == length] for length in dict.fromkeys(lengths)
    ]


def answer(lm: HarnessLM, group: Sequence[Todo], prefill: Prefill | None = None) -> None:
    """Compute the answers of a batch; prefill: a recording of its prompts."""
    first = group[0][0]
    lm.begin(first.task, first.doc_id, first.ids)
    lm.within.begin(
        f"{len(group)} samples from {first.task} sample {first.doc_id} on", max(p.new_tokens for p, _ in group)
    )
    rows = rows_of(lm, group)
    chunk = lm.chunks.of(lm.loaded.model, max(row.body for row in rows))
    results = generate_batch(
        lm.loaded.model, lm.method, rows, attn=lm.attn, prefill_chunk=None if prefill else chunk, prefill=prefill,
        graph=lm.graph, kernels=lm.kernels,
    )  # fmt: skip
    for (prepared, request), row, result in zip(group, rows, results, strict=True):
        if isinstance(result, NonFinite):
            sample = lm.fail(result, prepared, "")
        else:
            result.extra.update(lm.chunks.fact(chunk))
            sample = lm.sample_of(prepared, request.doc, result, row.eos_token_ids)
        lm.log_answer(request, prepared, sample)


def check(lm: HarnessLM, requests: Sequence[Instance]) -> None:
    """Answer the first `batch_check` documents of each lm-eval task again alone, and note in the log whether that differs.

    Of several answers to a document the first is checked.
    """
    for request in requests:
        if int(request.doc_id or 0) >= lm.batch_check:
            continue
        try:
            prepared = lm.reader.read(request)
        except TooLong:
            continue
        sample = lm.find(prepared)
        if sample is None or "failed" in sample or DIFFERS in sample["extra"]:
            continue
        try:
            alone = lm.generate_alone(prepared, request.doc)["response"]
        except NonFinite:
            alone = None
        lm.log.append({**sample, "extra": {**sample["extra"], DIFFERS: int(alone != sample["response"])}})
        lm.computed += 1
