"""Requests of lm-eval in the model's terms: token ids, fingerprints, and whether they fit the model.

    reader = Reader(loaded, RunOptions(seed=0))
    prepared = reader.read(request)          a prompt to be answered
    parts = reader.texts(request)            texts to be scored

A prompt that is too long for the model meets one rule for every task and every method:

1. Where the benchmark says how to shorten a prompt (LongBench drops the middle), it is shortened so.
2. Else its document is left out: no method answers it, and no score counts it. The row says how many there were (`n_skipped`),
   and so do the tables.

Too long: prompt and longest answer have more tokens than `model.max_length` (by default what the model's configuration says), or
than a sliding window of its layers. This depends on model and prompt alone, so every method answers the same documents. A text
that is scored as a whole is cut into windows, as lm-eval does it, and is never too long.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.instance import Instance

from pqcache.harness.config.options import DecodeOptions, RunOptions
from pqcache.harness.run.models import MARKERS, LoadedModel, opening_tokens, question_start
from pqcache.harness.run.samples import PROMPT_END, fingerprint
from pqcache.harness.run.smoke_models import NEW_TOKENS, PROMPT_TOKENS
from pqcache.selective import Sampling
from pqcache.selective.fidelity import Reference
from pqcache.selective.support import sliding_window

DEFAULT_NEW_TOKENS = 256
KEPT_TOKENS = 1 << 24  # token ids that a session keeps: 64 MiB
TokenTask = Callable[[dict], tuple[list[int], int, int]]  # see TaskSpec.tokens
Settings = Mapping[str, Any]
Before = Sequence[Mapping[str, str]]  # turns of a chat


class TooLong(ValueError):
    """A prompt does not fit the model."""


@dataclass(frozen=True)
class PromptFacts:
    """A prompt without its tokens."""

    tokens: int
    question: int  # tokens at its end that go through the decode path
    mark: str  # the sample's fingerprint
    old_mark: str  # the same as older lines have it
    wrapper: str  # see LoadedModel.wrapper
    cut: tuple[int, int] | None  # (tokens a prompt may have before its middle is dropped, tokens dropped)
    bos_count: int | None
    sha256: str  # of the wrapped text
    end: str  # its last characters
    turns: Sequence[list[int]] = ()  # token ids of each later turn of a chat: see LoadedModel.turn


@dataclass(frozen=True)
class Prepared:
    """A prompt to be answered."""

    task: str
    doc_id: int
    ids: list[int]  # empty where they were not asked for
    until: list[str]  # stop strings
    new_tokens: int  # maximum
    stop_token: str | None  # its last token ends the answer and cannot begin it
    known: PromptFacts
    draw: int = 0  # the answer's number
    sampling: Sampling | None = None  # how its tokens are drawn; None: greedy
    beside_full: bool = False  # Full writes the answer, and the method reads it


@dataclass(frozen=True)
class Text:
    """A text of which the tokens from `first` on are scored."""

    task: str
    doc_id: int
    key: tuple  # (task, document, request[, start of the window])
    ids: list[int]
    first: int
    prefill: int  # tokens that are computed before the first decode step
    known: PromptFacts


class Prompts:
    """The prompts that a session has read, so that cells with the same prompts tokenize them once.

    Facts are some hundred bytes a prompt, and are kept. Up to KEPT_TOKENS, token ids are kept of the first prompts of a group of
    cells, and always of the last one, which cells that share a prefill ask for in turn.
    """

    def __init__(self) -> None:
        self._facts: dict[bytes, PromptFacts] = {}
        self._ids: dict[bytes, array[int]] = {}
        self._group = ""
        # the last answer of Full that methods read, and what it is of
        self.reference: tuple[tuple, Reference] | None = None

    def begin(self, group: str) -> Prompts:
        """A cell of this group is about to run. Token ids of another group are dropped."""
        if group != self._group:
            self._group, self._ids = group, {}
        return self

    def get(
        self, key: bytes, read: Callable[[], tuple[PromptFacts, list[int]]], *, tokens: bool
    ) -> tuple[PromptFacts, list[int]]:
        """The facts of a prompt and, with `tokens`, its token ids; by `read` where they are not at hand."""
        if key not in self._facts or (tokens and key not in self._ids):
            self._facts[key], ids = read()
            while self._ids and sum(map(len, self._ids.values())) + len(ids) > KEPT_TOKENS:
                self._ids.popitem()  # the newest: the next cell begins with the oldest
            self._ids[key] = array("i", ids)
        return self._facts[key], list(self._ids[key]) if tokens else []


class Reader:
    """Reads requests for one model and one way to choose tokens."""

    def __init__(
        self,
        loaded: LoadedModel,
        run: RunOptions,
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        tokens: TokenTask | None = None,
        known: Prompts | None = None,
        decode: DecodeOptions | None = None,
    ) -> None:
        """tokens: of tasks that are measured in tokens, not text. known: the prompts that were read."""
        self.loaded, self.seed, self.question_as_decode = loaded, run.seed, run.question_as_decode
        self.max_new_tokens, self.tokens, self.smoke = max_new_tokens, tokens, run.smoke
        self.known = known if known is not None else Prompts()
        self.decode = decode or DecodeOptions()
        # tokens that prompt and answer may have together; None: without limit
        self.limit, self.limit_reason = loaded.max_length, "the model was made for (model.max_length)"
        config = getattr(loaded.model, "config", None)
        window = None if config is None else sliding_window(config.get_text_config(decoder=True))
        if window is not None and (self.limit is None or window < self.limit):
            self.limit, self.limit_reason = window, "of the model's sliding window"

    # -- prompts -------------------------------------------------------------------------------------------------------

    def read(self, request: Instance, *, tokens: bool = True, draw: int = 0) -> Prepared:
        """A prompt to be answered. Raises TooLong.

        tokens: with its token ids; facts alone are read once a session. draw: the number of the answer.
        """
        prompt, settings = request.args[0], dict(request.args[1])
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        loaded, until = self.loaded, _stops(settings, self.decode)
        new_tokens = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_new_tokens)
        new_tokens = min(new_tokens, NEW_TOKENS) if self.smoke else new_tokens
        rules: dict[str, Any] = {"until": until, "max_new_tokens": new_tokens, "weights": loaded.weights}
        if stop_token := settings.get("stop_token"):
            rules["stop_token"] = stop_token
        if beside_full := bool(settings.get("beside_full")):
            rules["beside_full"] = True
        before, begin = _around(request)
        if settings.get("conversation"):
            rules["turns"] = list(request.doc["turns_after"])
        side = [loaded.name, loaded.old_weights, loaded.chat, loaded.system, loaded.max_length]
        parts = prompt, before, begin, settings, rules, side, self.question_as_decode, self.smoke, self.max_new_tokens
        key = hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str).encode()).digest()

        def made() -> tuple[PromptFacts, list[int]]:
            text, wrapper, cut = self._wrapped(task, prompt, before, settings)
            text += begin
            ids = loaded.encode(text)
            if self.smoke and len(ids) > PROMPT_TOKENS:
                ids = ids[: PROMPT_TOKENS // 2] + ids[-(PROMPT_TOKENS // 2) :]
            markers, own = settings.get("question_markers", MARKERS), rules
            question = self._question(text, markers)
            # Samples made before data sets had their own markers were split by the general rule.
            if question and question_start(text, markers) != question_start(text) and question != self._question(text):
                own = {**rules, "question_tokens": question}
            sha256 = hashlib.sha256(text.encode()).hexdigest()
            facts = self._facts(ids, own, question, wrapper, cut, sha256, text[-PROMPT_END:])
            return replace(facts, turns=[loaded.turn(text) for text in rules.get("turns", ())]), ids

        known, ids = self.known.get(key, made, tokens=tokens)
        self._check(task, doc_id, known.tokens, new_tokens + sum(len(turn) + new_tokens for turn in known.turns))
        sampling: Sampling | None = None
        if (decode := self.decode).temperature:
            how = {"temperature": decode.temperature, "top_p": decode.top_p, "seed": self.seed, "draw": draw}
            known = replace(known, mark=fingerprint(known.mark, how), old_mark=fingerprint(known.old_mark, how))
            sampling = Sampling(decode.temperature, decode.top_p, f"{self.seed}/{task}/{doc_id}/{draw}")
        return Prepared(task, doc_id, ids, until, new_tokens, stop_token, known, draw, sampling, beside_full)

    def whole(self, request: Instance) -> str:
        """All that the model reads of a prompt."""
        task, (prompt, settings) = str(request.task_name), request.args
        before, begin = _around(request)
        return self._wrapped(task, prompt, before, dict(settings))[0] + begin

    def _facts(
        self, ids: list[int], rules: dict[str, Any], question: int, wrapper: str, cut: Any, sha256: str, end: str
    ) -> PromptFacts:
        """rules: of the fingerprint. sha256, end: of the text."""
        marks = [fingerprint(ids, {**rules, "weights": weights})
                 for weights in (self.loaded.weights, self.loaded.old_weights or self.loaded.weights)]  # fmt: skip
        bos = self.loaded.tokenizer.bos_token_id
        count = None if bos is None else ids.count(bos)
        return PromptFacts(len(ids), question, marks[0], marks[1], wrapper, cut, count, sha256, end)

    def _question(self, text: str, markers: Any = MARKERS) -> int:
        """Tokens of a wrapped prompt that go through the decode path."""
        question = self.loaded.question_tokens(text, markers) if self.question_as_decode else 0
        # Decode steps take most of a smoke run's time.
        return min(question, NEW_TOKENS) if self.smoke else question

    def _wrapped(
        self, task: str, prompt: str, before: Before, settings: Settings
    ) -> tuple[str, str, tuple[int, int] | None]:
        """(text for the model, its wrapper, how it was cut), by the task's settings.

        wrapper: see LoadedModel.wrapper. cut_middle: the longest prompt in tokens before it is wrapped, the turns `before` it
        included; 0: as many as the model has room for beside an answer of `longest_answer` tokens. The longest turn is cut.
        """
        cut = None
        if "cut_middle" in settings:
            most = settings["cut_middle"] or self.loaded.room(settings.get("longest_answer", self.max_new_tokens))
            if most is not None:
                turns = [*before, {"role": "user", "content": prompt}]
                place = max(range(len(turns)), key=lambda i: len(turns[i]["content"]))
                others = [*turns[:place], *turns[place + 1 :]]
                room = most - sum(self.loaded.count(turn["content"]) for turn in others)
                if room < 2:
                    longest = self.loaded.max_length
                    raise TooLong(f"{task}: {longest} tokens (model.max_length) leave no room for a prompt")
                content, dropped = self.loaded.cut_middle(turns[place]["content"], room)
                turns[place] = {**turns[place], "content": content}
                before, prompt, cut = turns[:-1], turns[-1]["content"], (most, dropped)
        style = settings.get("wrapper", "template")
        return self.loaded.wrap(prompt, style, before), self.loaded.wrapper(style), cut

    # -- texts to be scored --------------------------------------------------------------------------------------------

    def texts(self, request: Instance) -> list[Text]:
        """The texts of a request to score: one for a continuation, several windows of a long text. Raises TooLong."""
        if request.request_type == "loglikelihood_rolling":
            return self._windows(request)
        if self.tokens is not None:
            ids, first, prefill = self.tokens(request.doc)
            return [self._text(request, (request.idx,), ids, first, prefill, "none")]
        ids, first, question = self._pair(str(request.args[0]), str(request.args[1]), _around(request)[0])
        prefill = max(1, first - max(1, question))
        return [self._text(request, (request.idx,), ids, first, prefill, self.loaded.wrapper())]

    def _windows(self, request: Instance) -> list[Text]:
        """A whole text, in windows that fit the model. The first half of each is its prefill."""
        opening = opening_tokens(self.loaded.tokenizer)
        ids = self.loaded.encode(str(request.args[0]))
        if not opening:
            ids, opening = [self._prefix(), *ids], [0]
        size = self.loaded.max_length or len(ids)
        texts = []
        done = len(opening)
        while done < len(ids):  # windows of size + 1 tokens, the last of which is only predicted
            end = min(len(ids), done + size - (len(opening) - 1 if done == len(opening) else 0))
            start = max(0, end - size - 1)
            index, prefill = (request.idx, start), max(1, (end - start) // 2)
            texts.append(self._text(request, index, ids[start:end], done - start, prefill, "none"))
            done = end
        return texts

    def _text(self, request: Instance, index: tuple, ids: list[int], first: int, prefill: int, wrapper: str) -> Text:
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        self._check(task, doc_id, len(ids) - 1, 0)
        sha256 = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
        rules, question = {"first": first, "prefill": prefill}, max(0, first - prefill)
        known = self._facts(ids, rules, question, wrapper, None, sha256, "")
        return Text(task, doc_id, (task, doc_id, *index), ids, first, prefill, known)

    def _pair(self, context: str, continuation: str, before: Before) -> tuple[list[int], int, int]:
        """(token ids of both, where the continuation starts, question tokens), split as lm-eval does it.

        White space at the context's end belongs to the continuation. After a chat template, which ends the turn, the
        continuation starts without white space.
        """
        loaded = self.loaded
        if before and not loaded.chat:
            context = loaded.wrap(context, before=before)
        stripped = context.rstrip()
        if loaded.chat and context:
            context, continuation = loaded.wrap(context, before=before), continuation.lstrip()
        elif stripped:
            context, continuation = stripped, context[len(stripped) :] + continuation
        head = loaded.encode(context)
        ids = head + loaded.encode(context + continuation)[len(head) :]
        if not head:
            head = [self._prefix()]
            ids = head + ids
        if len(ids) <= len(head):
            raise ValueError(f"the continuation {continuation!r} adds no token to its context")
        question = loaded.question_tokens(context) if self.question_as_decode else 0
        return ids, len(head), question

    def _prefix(self) -> int:
        """The token before a text without context, where the tokenizer has no opening tokens."""
        tokenizer = self.loaded.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if token is None:
            raise ValueError(f"{self.loaded.name}: no BOS or EOS token to stand before a text without context")
        return int(token)

    # -- both ----------------------------------------------------------------------------------------------------------

    def check(self, request: Instance) -> None:
        """Raises TooLong if a request is too long for the model."""
        if self.limit is None or request.request_type == "loglikelihood_rolling":
            return
        if request.request_type == "generate_until":
            self.read(request, tokens=False)
        else:
            self.texts(request)

    def prefill_tokens(self, request: Instance) -> int:
        """How many tokens of a request are computed before the first decode step. Raises TooLong."""
        if request.request_type == "generate_until":
            known = self.read(request, tokens=False).known
            return known.tokens - known.question
        return self.texts(request)[0].prefill

    def _check(self, task: str, doc_id: int, tokens: int, new_tokens: int) -> None:
        if self.limit is not None and tokens + new_tokens > self.limit:
            needs = f"{tokens} prompt tokens + {new_tokens} new ones"
            raise TooLong(f"{task} sample {doc_id}: {needs} exceed the {self.limit} tokens {self.limit_reason}")


def _around(request: Instance) -> tuple[Before, str]:
    """The turns of a chat before the document's prompt, and what the document gives of the model's turn."""
    before = list(request.doc.get("turns_before") or []) if isinstance(request.doc, Mapping) else []
    begins = isinstance(request.args[1], Mapping) and request.args[1].get("begin_answer")
    return before, str(request.doc["answer_prefix"]) if begins else ""


def _stops(settings: Settings, decode: DecodeOptions) -> list[str]:
    """The stop strings of a request. Raises ValueError where it asks for another way to choose tokens.

    How tokens are chosen is said by decode.*, and not by the task.
    """
    until = settings.get("until") or []
    if int(settings.get("num_beams") or 1) != 1:
        raise ValueError(f"num_beams={settings['num_beams']}: beam search is not supported")
    if settings.get("do_sample") and not decode.temperature:
        asks = f"the task's definition samples at temperature {settings.get('temperature', 1.0)}"
        raise ValueError(f"decode.temperature=0: only greedy decoding, but {asks}; set decode.temperature")
    return [s for s in ([until] if isinstance(until, str) else until) if s]
