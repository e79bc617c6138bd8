"""A line of samples*.jsonl: its schema, with the range of each number, and the one function that reads it.

for sample in read_all(folder)[0].values(): ...
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, cast

from pqcache.fields import hints_of
from pqcache.harness.config.options import Amount, Count, misfit, one_line, say_once
from pqcache.outside import lines, parse_json, unsealed

Key = tuple[str, int, str]  # task, document, fingerprint
# What two lines of one sample must agree on. Times, bytes and what a method reports of itself may differ.
SAYS = ("response", "score", "new_tokens", "prompt_tokens", "question_tokens")


class SampleMarks(TypedDict, total=False):
    """What older lines lack."""

    prompt_sha256: str  # of the text that the tokenizer got; of the token ids where a text is scored
    prompt_end: str  # the last 300 characters that the model read; with a scored text, that one
    prompt: str  # all of it, with samples=full
    target: str | list[str]  # the right answer, or the right answers, where the task has one
    cell: str  # the configuration's 16 hex digits (config.identity)
    draw: Count  # of tokens that were drawn: the number of the answer, 0 .. decode.samples - 1
    failed: str  # why it is no answer: it has no score and no times
    settles: bool  # computed again because earlier lines of the same sample contradict each other


class Sample(SampleMarks):
    """One finished sample. Times in seconds on a synchronised clock, bytes measured by the ledger."""

    task: str  # the lm-eval task
    doc_id: Count  # its document's number in that task
    fingerprint: str  # of the weights, the token ids fed to the model and the generation settings
    response: str  # the answer, cut at the stop strings; with model.thinking=true also the thoughts before it
    # 0..100, or in the range of a metric of lm-eval; None where the task needs more than this answer to score it
    score: float | None
    new_tokens: Count  # tokens generated, eos included
    prompt_tokens: Count
    question_tokens: Count  # prompt tokens fed through the decode path
    # Prompt submitted -> first token. None: another cell's prefill was used. With diagnostics, times include measuring.
    prefill_s: Amount | None
    # Prompt submitted -> second token. None: one token was generated, or another cell's prefill was used.
    tt2t_s: Amount | None
    step_s: list[Amount]  # every decode step
    index_build_s: Amount
    budget_tokens: Amount | None  # tokens planned per layer and KV head; None: the method ignores the budget
    attended_tokens: Amount | None  # None without a decode step
    attended_tokens_all_layers: Amount | None
    resident_bytes: dict[str, Amount]  # tier -> bytes after the last step
    peak_bytes: dict[str, Amount]
    bytes_per_step: dict[str, Amount]
    extra: dict[str, Any]  # what the method reports of itself
    attn: str  # the dense attention of prefill
    device: str  # caption of the machine that computed it
    git_commit: str | None
    versions: dict[str, str | None]


def read_all(folder: Path, cell: str = "") -> tuple[dict[Key, Sample], set[Key]]:
    """(key -> sample, the keys whose lines contradict each other). Lines of another cell are left out, and files that
    cannot be read.

    Of two that say the same the later one counts, but none without times replaces one with times. Contradictory lines
    are left out until the sample is computed again.
    """
    samples: dict[Key, Sample] = {}
    contradicted: set[Key] = set()
    own = folder / "samples.jsonl"
    for path in [*sorted(folder.glob("samples-*.jsonl")), *([own] if own.exists() else [])]:  # those of workers first
        bad: list[int] = []
        foreign = 0
        for number, _, sample in read_lines(path):
            if sample is None:
                bad.append(number)
                continue
            if cell and sample.get("cell", cell) != cell:
                foreign += 1
                continue
            key = key_of(sample)
            known, settles = samples.get(key), sample.get("settles", False)
            if known is not None and known.get("settles", False) != settles:
                if settles:
                    contradicted.discard(key)
                    samples[key] = sample
                continue
            if known is not None and any(known[name] != sample[name] for name in SAYS):  # type: ignore[literal-required]
                contradicted.add(key)
            if known is None or known["tt2t_s"] is None or sample["tt2t_s"] is not None:
                samples[key] = sample
        if bad:
            say_once(f"{path}: {len(bad)} lines are no samples (the first is line {bad[0]}); they are computed again")
        if foreign:
            say_once(f"{path}: {foreign} samples are of another configuration; they are not used")
    for key in contradicted:
        say_once(f"{folder}: the lines of {key[0]} sample {key[1]} contradict each other; it is computed again")
        del samples[key]
    return samples, contradicted


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, Sample | None]]:
    """(number, byte after it, sample) of each whole line; None for one that is damaged. What is no file of lines has none."""
    try:
        for number, end, line in lines(path, start):
            if line.strip():
                yield number, end, _read(line)
    except OSError as error:
        say_once(f"{path}: its samples cannot be read ({one_line(error)[:200]})")


def key_of(sample: Sample) -> Key:
    """What a sample is looked up by."""
    return sample["task"], sample["doc_id"], sample["fingerprint"]


def _read(line: bytes) -> Sample | None:
    """A sample from its line. None for one that is damaged, or was changed after it was written: it is computed again."""
    try:
        value = parse_json(line)
        if isinstance(value, dict) and not Sample.__required_keys__ - unsealed(value).keys():
            return cast(Sample, value) if misfit(value, hints_of(Sample)) is None else None
    except ValueError:
        pass
    return None
