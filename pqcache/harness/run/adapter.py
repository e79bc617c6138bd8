"""The lm-eval adapter: every request runs through our own decode loop, greedy or drawn, under any method.

    lm = HarnessLM(loaded, method, log, RunOptions(seed=0))
    lm_eval.evaluator.evaluate(lm, task_dict, limit=20)

The adapter wraps prompts itself (chat template, opening tokens once), so lm-eval's apply_chat_template stays off. A sample found
in the log is not computed again. A text that is scored is one line of the log, whose `response` holds the log-probabilities.

With decode.samples=n each document has n answers, which are n samples of the log. lm-eval sees one answer per document: it
evaluates n times, with `lm.draw` = 0 .. n - 1.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from pqcache import selective
from pqcache.harness.config import environment
from pqcache.harness.config.options import RunOptions
from pqcache.harness.run import answers
from pqcache.harness.run.memory import Chunks
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.prompts import Prepared, PromptFacts, Reader, Text
from pqcache.harness.run.recorder import Recorder
from pqcache.harness.run.samples import PROMPT_END, Missing, Sample, SampleLog, make_sample, target_marks
from pqcache.harness.run.smoke_models import PROMPT_TOKENS
from pqcache.registry import method_class
from pqcache.selective import GenerationResult, Method, NonFinite, OwnPrefill, Prefill, Request, generate, likelihood
from pqcache.selective.fidelity import Fidelity, Reference, read_again, read_reference, write_reference
from pqcache.selective.lockstep import in_lockstep
from pqcache.selective.support import attention_kernel

# of an answer that a method could not read: task=fidelity finds its numbers in each
NO_STEPS = json.dumps({"kl": [0.0], "equal": [0], "logprobs": [0.0], "text": ""})
WARM_TOKENS = 1024  # of the prompt that warms the kernels up
Scorer = Callable[[str, dict, str], float | None]  # (lm-eval task, document, response) -> 0..100


class LogLikelihood(float):
    """The sum of log-probabilities, with the parts it is made of: `tokens`."""

    tokens: list[float]

    def __new__(cls, tokens: list[float]) -> LogLikelihood:
        value = super().__new__(cls, math.fsum(tokens))
        value.tokens = tokens
        return value


class HarnessLM(LM):
    """One model under one method, one sample at a time, or `batch` of them."""

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        log: SampleLog,
        run: RunOptions | None = None,
        *,
        scorer: Scorer | None = None,
        label: str = "",
        recorder: Recorder | None = None,
        computes: bool = True,
        tasks: Mapping[str, Any] | None = None,
        **reading: Any,
    ) -> None:
        """computes: false if the model has no weights, and every sample must be in the log. tasks: lm-eval's. reading: of the
        `Reader`.
        """
        super().__init__()
        run = run or RunOptions()
        self.loaded, self.method, self.log = loaded, method, log
        self.attn, self.graph, self.kernels = run.attn, run.graph, run.kernels
        self.seed, self.label = run.seed, label
        self.reader = Reader(loaded, run, **reading)
        self.chunks = Chunks(run.prefill_chunk, run.batch)
        self.scorer, self.recorder, self.computes = scorer, recorder, computes
        self.facts = environment.facts(loaded.device, loaded.kept)
        self.batch, self.batch_check = run.batch, run.batch_check
        self.tasks, self.whole_prompts, self.smoke = tasks or {}, run.samples == "full", run.smoke
        self.draws = range(self.reader.decode.samples)  # the numbers of a document's answers
        self.draw = 0  # of the answers that lm-eval gets
        self.thinks = bool(loaded.thinking)  # answers begin with thoughts, which are not scored
        self.within = answers.Within(label)
        self.said: set[str] = set()  # notes on batches that were printed
        self.computed = 0  # samples
        self.timed = True  # false: times would not be of this process alone, and are dropped
        # a smoke run needs no warm-up: its times mean nothing; samples of batches have none
        self.warm = run.smoke or run.batch > 1
        self.used: dict[tuple, Sample] = {}  # (task, document[, request or draw]) -> the samples of this evaluation
        self.at_limit: dict[tuple, bool] = {}  # the same of answers: whether one has all tokens that its task allows
        self.prompts: dict[tuple, PromptFacts] = {}  # (task, document[, request]) -> the prompts

    # -- lm-eval's interface -------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer number `draw` to each request, in their order."""
        found = []
        for request in requests:
            prepared, sample = self.answer(request, draw=self.draw)
            task, doc_id = prepared.task, prepared.doc_id
            key = (task, doc_id, self.draw) if len(self.draws) > 1 else (task, doc_id)
            self.used[key] = sample
            if not prepared.beside_full and not prepared.known.turns:
                self.at_limit[key] = sample["new_tokens"] >= prepared.new_tokens
            self.prompts[task, doc_id] = prepared.known
            found.append(self._scored_part(sample["response"]))
        return found

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is it the greedy continuation) of each request's continuation after its context.

        The context but its last token is the prefill; that token and the continuation go through the decode path, so
        that every scored token is computed from the method's cache. `question_as_decode` moves more of the context there.
        """
        return [self._scores(request)[0] for request in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text.

        Its first half is the prefill, which exact attention scores. Its second half goes through the decode path. A text
        longer than the model's context is cut into windows of that length.
        """
        parts = [[value.tokens for value, _ in self._scores(request)] for request in requests]
        return [LogLikelihood([token for tokens in each for token in tokens]) for each in parts]

    def _scores(self, request: Instance) -> list[tuple[LogLikelihood, bool]]:
        """The log-probability of each text of a request, and whether it is the greedy continuation."""
        scores = []
        for text, sample in self.score_all(request):
            self.used[text.key], self.prompts[text.key] = sample, text.known
            answer = json.loads(sample["response"])
            scores.append((LogLikelihood(answer["logprobs"]), bool(answer["greedy"])))
        return scores

    # -- what the log holds --------------------------------------------------------------------------------------------

    def lacking(self, request: Instance) -> list[int]:
        """The numbers of the answers to a request that the log does not hold; [0] where it lacks a text. Raises TooLong."""
        if request.request_type != "generate_until":
            return [0] if any(self.find(text) is None for text in self.reader.texts(request)) else []
        asked = (self.reader.read(request, tokens=False, draw=draw) for draw in self.draws)
        return [prepared.draw for prepared in asked if self.find(prepared) is None]

    def find(self, asked: Prepared | Text) -> Sample | None:
        """A sample in the log, with its files of diagnostics."""
        sample = self.log.find(asked.task, asked.doc_id, asked.known.mark, asked.known.old_mark)
        if sample is None or self.recorder is None or "failed" in sample:
            return sample
        return sample if self.recorder.complete(sample) else None

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, request: Instance, prefill: Prefill | None = None, draw: int = 0) -> tuple[Prepared, Sample]:
        """An answer to a request, from the log or computed now; prefill: a recording of its prompt."""
        prepared = self.reader.read(request, tokens=False, draw=draw)
        if (sample := self.find(prepared)) is not None:
            return prepared, sample
        prepared = self.reader.read(request, draw=draw)
        try:
            sample = self.generate_alone(prepared, request.doc, prefill)
        except NonFinite as error:
            sample = self.fail(error, prepared, NO_STEPS if prepared.beside_full else "")
        return prepared, self.log_answer(request, prepared, sample)

    def generate_alone(self, prepared: Prepared, doc: dict, prefill: Prefill | None = None) -> Sample:
        """The sample of one request, computed now by itself. Raises NonFinite."""
        task, doc_id, ids = prepared.task, prepared.doc_id, prepared.ids
        stop_ids, not_first = self.ends(prepared)
        self.begin(task, doc_id, ids)
        self.within.begin(f"{task} sample {doc_id}", prepared.new_tokens)
        model, prompt = self.loaded.model, torch.tensor([ids], device=self.loaded.device)
        watchers = self.recorder.watchers(task, doc_id) if self.recorder is not None else ()
        how = self._how(prepared, prefill)
        chunk = how["prefill_chunk"]
        if prepared.beside_full:
            reference = self._reference(prepared, prompt, stop_ids, how)
            read = read_reference(model, self.method, prompt, reference, watchers=watchers, **how)
            read.result.extra.update(self.chunks.fact(chunk))
            return self._beside_full(prepared, doc, read)
        said: list[str] = []  # the answers of a chat of several turns

        def then(tokens: list[int]) -> Request | None:
            """The next turn, on the cache that all turns before have left; None after the last one."""
            said.append(self._scored_part(self._text_of(prepared, stop_ids, tokens)))
            number = len(said)
            if number > len(prepared.known.turns):
                return None
            ids = prepared.known.turns[number - 1]
            if tokens[-1] not in stop_ids:  # else the template writes the end of the turn
                ids = [tokens[-1], *ids]
            drawn = prepared.sampling and replace(prepared.sampling, key=f"{prepared.sampling.key}/turn {number}")
            question = len(ids) - 1 if prepared.known.question else 0  # question_as_decode: of a later turn all
            return Request(ids, prepared.new_tokens, stop_ids, self.stopper(prepared), question, sampling=drawn)

        result = generate(
            model,
            self.method,
            prompt,
            max_new_tokens=prepared.new_tokens,
            eos_token_ids=stop_ids,
            stop=self.stopper(prepared),
            not_first=not_first,
            sampling=prepared.sampling,
            watchers=watchers,
            then=then if prepared.known.turns else None,
            **how,
        )
        result.extra.update(self.chunks.fact(chunk))
        return self.sample_of(prepared, doc, result, stop_ids, said or None)

    def _how(self, prepared: Prepared, prefill: Prefill | None) -> dict[str, Any]:
        """The arguments of every generation from a prompt."""
        chunk = self.chunks.of(self.loaded.model, len(prepared.ids) - prepared.known.question)
        own = {"attn": self.attn, "graph": self.graph, "kernels": self.kernels}
        return {**own, "question_tokens": prepared.known.question, "prefill": prefill, "prefill_chunk": chunk}

    def reader_beside(self, request: Instance, prefill: Prefill) -> Callable[[], None] | None:
        """What reads Full's answer again beside methods that read it in lockstep; None for tasks without such an answer."""
        prepared = self.reader.read(request)
        if not prepared.beside_full:
            return None
        prompt, how = torch.tensor([prepared.ids], device=self.loaded.device), self._how(prepared, prefill)
        reference = self._reference(prepared, prompt, self.ends(prepared)[0], how)
        return partial(read_again, self.loaded.model, method_class("full")(), prompt, reference, **how)

    def _reference(self, prepared: Prepared, prompt: torch.Tensor, end: Collection[int], how: dict) -> Reference:
        """Full's answer to a prompt, written once for all cells of a session that read it in turn."""
        known = self.reader.known
        key = prepared.known.mark, prepared.known.question, self.attn, self.graph, self.kernels
        if known.reference is None or known.reference[0] != key:
            full = method_class("full")()
            made = write_reference(self.loaded.model, full, prompt, tokens=prepared.new_tokens, end=end, **how)
            known.reference = key, made
        return known.reference[1]

    def _beside_full(self, prepared: Prepared, doc: dict, read: Fidelity) -> Sample:
        """The sample of an answer of Full that the method has read: its response has each step's numbers."""
        steps = {
            "kl": [float(f"{value:.6g}") for value in read.kl],
            "equal": [int(value) for value in read.equal],
            "logprobs": [round(value, 6) for value in read.logprobs],
            "text": answers.decode(self.loaded.tokenizer, read.result.token_ids, thinking=False),
        }
        response = json.dumps(steps, ensure_ascii=False)
        score = self.scorer(prepared.task, doc, response) if self.scorer is not None else None
        return self._line(prepared, response, score, read.result)

    def begin(self, task: str, doc_id: int, ids: Sequence[int]) -> None:
        """Warm the kernels up once, and seed.

        A random step of a method must not depend on which samples ran before, or a resumed run would differ.
        """
        if not self.computes:
            raise Missing(f"{task} sample {doc_id}: no worker has computed it")
        if not self.warm and not in_lockstep():  # there nothing is timed
            self.warm = True
            start = torch.tensor([list(ids[:WARM_TOKENS])], device=self.loaded.device)
            chunk = self.chunks.of(self.loaded.model, len(ids))
            with contextlib.suppress(ValueError):  # what the method refuses, the sample will report
                how: dict[str, Any] = {"max_new_tokens": 3, "attn": self.attn, "prefill_chunk": chunk}
                selective.generate(self.loaded.model, self.method, start, kernels=self.kernels, **how)
        torch.manual_seed(zlib.crc32(f"{self.seed}/{task}/{doc_id}".encode()))

    def ends(self, prepared: Prepared) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(tokens that end the answer, tokens that cannot begin it)."""
        tokenizer = self.loaded.tokenizer
        stop_ids = self.loaded.stop_ids()
        vocabulary = tokenizer.get_vocab()
        special = set(tokenizer.all_special_tokens)
        # Decoding drops special tokens, so that the text would never hold these stop strings.
        stop_ids |= {vocabulary[s] for s in prepared.until if s in special and s in vocabulary}
        not_first: set[int] = set()
        # Its last token ends the answer, too. An answer begins neither with it nor with an end token.
        if prepared.stop_token:
            stop_ids.add(tokenizer(prepared.stop_token, add_special_tokens=False)["input_ids"][-1])
            not_first = stop_ids
        return tuple(sorted(stop_ids)), tuple(sorted(not_first))

    def stopper(self, prepared: Prepared) -> Callable[[list[int]], bool]:
        """Whether a stop string of the request has just been completed. Is called with every token: see Within."""
        stop = answers.stopper(self.loaded.tokenizer, prepared.until, thinking=self.thinks) if prepared.until else None
        return self.within.watched(stop)

    def sample_of(
        self, prepared: Prepared, doc: dict, result: GenerationResult, stop_ids: Collection[int], said: Any = None
    ) -> Sample:
        """The sample of a finished generation: its answer as text, or as JSON the answers of a chat, and the score."""
        text = self._text_of(prepared, stop_ids, result.token_ids)
        response = text if said is None else json.dumps(said, ensure_ascii=False)
        score = self.scorer(prepared.task, doc, self._scored_part(response)) if self.scorer is not None else None
        if self.thinks:
            result.extra["thinking_ended"] = int(answers.END in text)
        return self._line(prepared, response, score, result)

    def _text_of(self, prepared: Prepared, stop_ids: Collection[int], ids: list[int]) -> str:
        """An answer as text, without the tokens and strings that end it."""
        while ids and ids[-1] in stop_ids:
            ids = ids[:-1]
        text = answers.decode(self.loaded.tokenizer, ids, thinking=self.thinks)
        return answers.cut(text, prepared.until, thinking=self.thinks)

    def _scored_part(self, response: str) -> str:
        """What of an answer is scored: without its thoughts."""
        return answers.scored(response) if self.thinks else response

    def log_answer(self, request: Instance, prepared: Prepared, sample: Sample) -> Sample:
        """Record a finished answer, with what its line says of its prompt and its target."""
        if prepared.known.cut is not None:
            sample["extra"]["cut_tokens"] = prepared.known.cut[1]
        if prepared.sampling is not None:
            sample["draw"] = prepared.draw
        text = self.reader.whole(request) if self.whole_prompts else prepared.known.end
        return self._record(request, sample, text, prepared.known.sha256)

    # -- scored texts --------------------------------------------------------------------------------------------------

    def score_all(self, request: Instance, recorded: Prefill | None = None) -> list[tuple[Text, Sample]]:
        """The texts of a request and their samples, from the log or computed now. Raises TooLong.

        recorded: of the prompt of a request's only text; a method that needs its own forward pass takes that.
        """
        try:
            return [(text, self._score(request, text, recorded)) for text in self.reader.texts(request)]
        except OwnPrefill:
            return self.score_all(request)

    def _score(self, request: Instance, text: Text, recorded: Prefill | None = None) -> Sample:
        """The sample of one scored text, from the log or computed now."""
        if (sample := self.find(text)) is not None:
            return sample
        ids, first, prefill = text.ids, text.first, text.prefill
        try:
            self.begin(text.task, text.doc_id, ids[:prefill])
            chunk = self.chunks.of(self.loaded.model, prefill)
            scored = likelihood(
                self.loaded.model,
                self.method,
                torch.tensor([ids], device=self.loaded.device),
                first=first,
                prefill=prefill,
                attn=self.attn,
                watchers=self.recorder.watchers(text.task, text.doc_id) if self.recorder is not None else (),
                prefill_chunk=chunk,
                kernels=self.kernels,
                recorded=recorded,
            )
        except NonFinite as error:
            sample = self.fail(error, text, json.dumps({"logprobs": [0.0] * (len(ids) - first), "greedy": False}))
        else:
            scored.result.extra.update(self.chunks.fact(chunk))
            answer = {"logprobs": [round(value, 7) for value in scored.logprobs], "greedy": all(scored.greedy)}
            sample = self._line(text, json.dumps(answer), None, scored.result)
        read = str(self.loaded.tokenizer.decode(ids if self.whole_prompts else ids[-PROMPT_END:]))
        return self._record(request, sample, read, text.known.sha256)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _line(self, asked: Prepared | Text, response: str, score: float | None, result: GenerationResult) -> Sample:
        if not self.timed:
            result = replace(result, prefill_s=None, tt2t_s=None)
        if together := in_lockstep():  # a step's time is that of all: each has its share
            result.extra["lockstep"] = together
            result.step_s = [seconds / together for seconds in result.step_s]
        key, question = (asked.task, asked.doc_id, asked.known.mark), asked.known.question
        return make_sample(result, key, response, score, question, attention_kernel(self.attn)[0], self.facts)

    def fail(self, error: Exception, asked: Prepared | Text, response: str) -> Sample:
        """The line of a sample that is no answer."""
        nothing = GenerationResult([], len(asked.ids), None, None, [], 0.0, None, None, None, {}, {}, {})
        return {**self._line(asked, response, None, nothing), "question_tokens": 0, "failed": str(error)}

    def _record(self, request: Instance, sample: Sample, text: str, sha256: str) -> Sample:
        """Append a line to the log. text: of the prompt."""
        if self.recorder is not None and "failed" not in sample:
            # before the log: its line promises that the files exist
            self.recorder.save(sample)
        task = self.tasks.get(str(request.task_name))
        target = target_marks(task, request.doc) if task is not None else {}
        whole: Any = {"prompt": text} if self.whole_prompts else {}
        sample = {**sample, "prompt_sha256": sha256, "prompt_end": text[-PROMPT_END:], **whole, **target}
        self.log.append(sample)
        self.computed += 1
        return sample

    # -- what the row says ---------------------------------------------------------------------------------------------

    @property
    def protocol(self) -> dict[str, Any]:
        """The prompt side of the row: what was done to the prompts of this evaluation."""
        prompts = self.prompts.values()
        wrappers = dict.fromkeys(prompt.wrapper for prompt in prompts)
        bare = dict.fromkeys(task for (task, *_), prompt in self.prompts.items() if prompt.wrapper == "none")
        cuts = [prompt.cut for prompt in prompts if prompt.cut is not None]
        cut = ", ".join(f"middle, to {n} tokens before wrapping" for n in dict.fromkeys(n for n, _ in cuts))
        if self.smoke:
            cut = f"middle, to {PROMPT_TOKENS} tokens (smoke)"
        first = [
            {"task": task, "doc_id": doc_id, "tokens": prompt.tokens, "sha256": prompt.sha256}
            for (task, doc_id, *_), prompt in list(self.prompts.items())[:1]
        ]
        return {
            "wrapper": " / ".join(wrappers) or self.loaded.wrapper(),
            "unwrapped": list(bare) if self.loaded.chat else [],
            "system": self.loaded.system if self.loaded.chat else None,
            "bos_count": max((prompt.bos_count for prompt in prompts if prompt.bos_count is not None), default=None),
            "truncation": cut or "none; longer is left out",
            "truncated_prompts": sum(dropped > 0 for _, dropped in cuts),
            "first_prompt": first[0] if first else None,
        }
