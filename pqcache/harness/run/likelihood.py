"""The log-likelihood side of the lm-eval adapter: scores tokens of the documents through the decode path of a method.

A scored sequence is one line of the sample log; its `response` holds the log-probabilities.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import torch
from lm_eval.api.model import LM
from tqdm import tqdm

from pqcache.harness.run import too_long
from pqcache.harness.run.chunks import Chunks
from pqcache.harness.run.models import LoadedModel, opening_tokens
from pqcache.harness.run.samples import (
    PROMPT_END,
    Sample,
    SampleLog,
    SampleMarks,
    fingerprint,
    prompt_marks,
    target_marks,
)
from pqcache.selective import NonFinite, attach, likelihood

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.recorder import Recorder
    from pqcache.selective import GenerationResult, Likelihood, Method

BAR_AFTER_S = 0.5  # a cell whose samples are all on disk has no bar
TokenTask = Callable[[dict], tuple[list[int], int, int]]  # see TaskSpec.tokens


def bar_options(*, silent: bool = False) -> dict[str, Any]:
    """Of a cell's progress bar: none where output is redirected, and none for what is done in a moment."""
    return {"disable": True if silent else None, "delay": BAR_AFTER_S, "leave": False}  # None: on a terminal alone


class LogLikelihood(float):
    """The sum of log-probabilities, with the parts it is made of: `tokens`."""

    tokens: list[float]

    def __new__(cls, tokens: list[float]) -> LogLikelihood:
        value = super().__new__(cls, math.fsum(tokens))
        value.tokens = tokens
        return value


def _logprobs_of(sample: Sample) -> tuple[LogLikelihood, bool]:
    """The log-probability of a scored sample, and whether it is the greedy continuation."""
    answer = json.loads(sample["response"])
    return LogLikelihood(answer["logprobs"]), bool(answer["greedy"])


class LikelihoodLM(LM):
    """The half of HarnessLM that scores documents. HarnessLM sets the attributes and writes the four abstract methods."""

    loaded: LoadedModel
    method: Method
    log: SampleLog
    attn: str
    question_as_decode: bool
    label: str
    chunks: Chunks
    recorder: Recorder | None
    tokens: TokenTask | None  # of tasks that are measured in tokens, not text
    used: dict[tuple, Sample]  # (task, document[, request]) -> sample
    resumed: int
    computes: bool
    tasks: Mapping[str, Any]  # lm-eval's, which know the right answers
    whole_prompts: bool  # samples keep them
    stderr: TextIO = sys.stderr

    def attached(self) -> contextlib.AbstractContextManager[Any]:
        """Inside it the model attends through the method's layers."""
        return attach(self.loaded.model) if self.computes else contextlib.nullcontext()

    def begin(self, task: str, doc_id: int, ids: list[int]) -> None:
        """Called before a sample is computed."""
        raise NotImplementedError

    def read(self, request: Instance, *, tokens: bool = True) -> Any:
        """A prompt in the model's terms, with its token ids or without. Raises TooLong."""
        raise NotImplementedError

    def note_prompt(self, key: tuple, wrapper: str, cut: tuple[int, int] | None, ids: list[int], text: str) -> None:
        """Record a prompt for the row."""
        raise NotImplementedError

    def finish(
        self,
        task: str,
        doc_id: int,
        mark: str,
        response: str,
        score: float | None,
        question: int,
        result: GenerationResult,
    ) -> Sample:
        """The line of a computed sample."""
        raise NotImplementedError

    def fail(self, error: Exception, task: str, doc_id: int, mark: str, response: str, tokens: int) -> Sample:
        """The line of a sample that is no answer."""
        raise NotImplementedError

    def unrecorded(self, sample: Sample) -> bool:
        """Whether a sample lacks its files of diagnostics."""
        if self.recorder is None or "failed" in sample:
            return False
        return not self.recorder.complete(sample["task"], sample["doc_id"], sample["fingerprint"])

    def target(self, request: Instance) -> SampleMarks:
        """The right answers to a request, where its task has some."""
        task = self.tasks.get(str(request.task_name))
        return target_marks(task, request.doc) if task is not None else {}

    def check_length(self, task: str, doc_id: int, tokens: int, new_tokens: int) -> None:
        """Raises TooLong if a sample is too long for the model."""
        too_long.check(self.loaded, task, doc_id, tokens, new_tokens)

    def check_request(self, request: Instance) -> None:
        """Raises TooLong if a request is too long for the model."""
        if too_long.limit_of(self.loaded)[0] is None or request.request_type == "loglikelihood_rolling":
            return
        if request.request_type == "generate_until":
            self.read(request, tokens=False)
            return
        ids = self.tokens(request.doc)[0] if self.tokens is not None else self._pair(*map(str, request.args[:2]))[0]
        self.check_length(str(request.task_name), int(request.doc_id or 0), len(ids) - 1, 0)

    def prefill_tokens(self, request: Instance) -> int:
        """How many tokens of a request are computed before the first decode step. Raises TooLong."""
        if request.request_type == "generate_until":
            known = self.read(request, tokens=False).known
            return int(known.tokens - known.question)
        if self.tokens is not None:
            return self.tokens(request.doc)[2]
        if request.request_type == "loglikelihood_rolling":
            whole = len(self.loaded.encode(str(request.args[0])))
            return max(1, min(whole, (self.loaded.max_length or whole) + 1) // 2)
        _, first, question = self._pair(*map(str, request.args[:2]))
        return max(1, first - max(1, question))

    # -- lm-eval's interface ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy continuation) of each request's continuation after its context.

        The context but its last token is the prefill; that token and the continuation go through the decode path, so
        that every scored token is computed from the method's cache. `question_as_decode` moves more of the context there.
        """
        return self._each(requests, disable_tqdm, self._continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text.

        Its first half is the prefill, which exact attention scores. Its second half goes through the decode path. A text
        longer than the model's context is cut into windows of that length.
        """
        return self._each(requests, disable_tqdm, self._rolling)

    def _each(self, requests: list[Instance], silent: bool, answer: Callable[[Instance], Any]) -> list[Any]:
        answers = []
        with (
            contextlib.redirect_stderr(self.stderr),
            self.attached(),
            tqdm(total=len(requests), desc=self.label, unit="request", **bar_options(silent=silent)) as bar,
        ):
            for request in requests:
                answers.append(answer(request))
                bar.update()
        return answers

    # -- scoring -------------------------------------------------------------------------------------------------------

    def _continuation(self, request: Instance) -> tuple[LogLikelihood, bool]:
        if self.tokens is not None:
            ids, first, prefill = self.tokens(request.doc)
            return _logprobs_of(self._scored(request, (request.idx,), ids, first, prefill, "none"))
        ids, first, question = self._pair(str(request.args[0]), str(request.args[1]))
        prefill = max(1, first - max(1, question))
        return _logprobs_of(self._scored(request, (request.idx,), ids, first, prefill, self.loaded.wrapper()))

    def _rolling(self, request: Instance) -> LogLikelihood:
        opening = opening_tokens(self.loaded.tokenizer)
        ids = self.loaded.encode(str(request.args[0]))
        if not opening:
            ids, opening = [self._prefix(), *ids], [0]
        size = self.loaded.max_length or len(ids)
        parts: list[float] = []
        done = len(opening)
        while done < len(ids):  # windows of size + 1 tokens, the last of which is only predicted
            end = min(len(ids), done + size - (len(opening) - 1 if done == len(opening) else 0))
            start = max(0, end - size - 1)
            window, prefill = ids[start:end], max(1, (end - start) // 2)
            sample = self._scored(request, (request.idx, start), window, done - start, prefill, "none")
            parts += _logprobs_of(sample)[0].tokens
            done = end
        return LogLikelihood(parts)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int, int]:
        """(token ids of both, where the continuation starts, question tokens), split as lm-eval does it.

        White space at the context's end belongs to the continuation. After a chat template, which ends the turn, the
        continuation starts without white space.
        """
        loaded = self.loaded
        stripped = context.rstrip()
        if loaded.chat and context:
            context, continuation = loaded.wrap(context), continuation.lstrip()
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

    def _score(self, task: str, doc_id: int, ids: list[int], first: int, prefill: int) -> Likelihood:
        self.begin(task, doc_id, ids[:prefill])
        chunk = self.chunks.of(self.loaded.model, prefill)
        scored = likelihood(
            self.loaded.model,
            self.method,
            torch.tensor([ids], device=self.loaded.device),
            first=first,
            prefill=prefill,
            attn=self.attn,
            watchers=self.recorder.watchers(task, doc_id) if self.recorder is not None else (),
            prefill_chunk=chunk,
            kernels=self.kernels,
        )
        scored.result.extra.update(self.chunks.fact(chunk))
        return scored

    def _scored(
        self, request: Instance, index: tuple[int | None, ...], ids: list[int], first: int, prefill: int, wrapper: str
    ) -> Sample:
        """The sample of one scored sequence, from the log or computed now."""
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        self.check_length(task, doc_id, len(ids) - 1, 0)
        rules = {"first": first, "prefill": prefill}
        mark = fingerprint(ids, {**rules, "weights": self.loaded.weights})
        old_mark = fingerprint(ids, {**rules, "weights": self.loaded.old_weights})
        sample = self.log.find(task, doc_id, mark, old_mark)
        if sample is None or self.unrecorded(sample):
            try:
                scored = self._score(task, doc_id, ids, first, prefill)
            except NonFinite as error:
                nothing = json.dumps({"logprobs": [0.0] * (len(ids) - first), "greedy": False})
                sample = self.fail(error, task, doc_id, mark, nothing, len(ids))
            else:
                answer = {"logprobs": [round(value, 7) for value in scored.logprobs], "greedy": all(scored.greedy)}
                question = max(0, first - prefill)
                sample = self.finish(task, doc_id, mark, json.dumps(answer), None, question, scored.result)
            if self.recorder is not None and "failed" not in sample:
                self.recorder.save(task, doc_id, mark)  # before the log: its line promises that the files exist
            text = self.loaded.tokenizer.decode(ids if self.whole_prompts else ids[-PROMPT_END:])
            sha256 = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
            marks = prompt_marks(str(text), sha256, whole=self.whole_prompts)
            sample = {**sample, **marks, **self.target(request)}
            self.log.append(sample)
        else:
            self.resumed += 1
        key = (task, doc_id, *index)
        self.used[key] = sample
        self.note_prompt(key, wrapper, None, ids, " ".join(map(str, ids)))
        return sample
