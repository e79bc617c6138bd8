"""The lm-eval adapter: every request runs through our own decode loop, greedy or drawn, under any method.

    lm = HarnessLM(loaded, method, log, seed=0)
    lm_eval.evaluator.evaluate(lm, task_dict, limit=20)

The adapter wraps prompts itself (chat template, opening tokens once), so lm-eval's apply_chat_template stays off.
A sample found in the log is not computed again.

With decode.samples=n each document has n answers, which are n samples of the log. lm-eval sees one answer per document: it
evaluates n times, with `lm.draw` = 0 .. n - 1. The first evaluation computes all answers, document by document.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from pqcache.harness.config import environment
from pqcache.harness.config.options import DecodeOptions
from pqcache.harness.run import batches, thinking
from pqcache.harness.run.chunks import Chunk, Chunks
from pqcache.harness.run.likelihood import LikelihoodLM, TokenTask, bar_options
from pqcache.harness.run.models import MARKERS, LoadedModel, question_start
from pqcache.harness.run.prepared import Prepared, PromptRead, drawn_marks, stops
from pqcache.harness.run.prompts import PromptFacts, Prompts, key_of
from pqcache.harness.run.samples import (
    PROMPT_END,
    Missing,
    Sample,
    SampleLog,
    SampleMarks,
    fingerprint,
    make_sample,
    prompt_marks,
)
from pqcache.harness.run.smoke_models import NEW_TOKENS, PROMPT_TOKENS, middle
from pqcache.harness.run.timing import warm_up
from pqcache.harness.run.too_long import TooLong
from pqcache.harness.run.within import Within
from pqcache.selective import GenerationResult, NonFinite, Sampling, generate
from pqcache.selective.support import attention_kernel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.recorder import Recorder
    from pqcache.selective import Method, Prefill

DEFAULT_NEW_TOKENS = 256
Scorer = Callable[[str, dict, str], float | None]  # (lm-eval task, document, response) -> 0..100


class HarnessLM(LikelihoodLM):
    """One model under one method, one sample at a time, or `batch` of them."""

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        log: SampleLog,
        *,
        attn: str = "auto",
        seed: int = 0,
        question_as_decode: bool = False,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        scorer: Scorer | None = None,
        label: str = "",
        facts: environment.Facts | None = None,
        recorder: Recorder | None = None,
        tokens: TokenTask | None = None,
        smoke: bool = False,
        computes: bool = True,
        prefill_chunk: Chunk = None,
        graph: str = "auto",
        kernels: str = "torch",
        known: Prompts | None = None,
        batch: int = 1,
        batch_check: int = 0,
        tasks: Mapping[str, Any] | None = None,
        whole_prompts: bool = False,
        decode: DecodeOptions | None = None,
    ) -> None:
        super().__init__()
        self.loaded = loaded
        self.method = method
        self.log = log
        self.attn = attn
        self.chunks = Chunks(prefill_chunk, batch)
        self.graph, self.kernels = graph, kernels
        self.seed = seed
        self.question_as_decode = question_as_decode
        self.max_new_tokens = max_new_tokens
        self.scorer = scorer
        self.label = label
        self.facts = facts or environment.facts(loaded.device, loaded.kept)
        self.recorder = recorder
        self.stderr = sys.stderr  # for our progress bar: the caller may mute lm-eval's
        self.tokens = tokens
        self.used: dict[tuple, Sample] = {}  # (task, document[, request]) -> the samples of this evaluation
        self.resumed = 0
        self.decode = decode or DecodeOptions()
        self.draws = range(self.decode.samples)  # the numbers of a document's answers
        self.draw = 0  # of the answers that lm-eval gets
        self.thinks = bool(loaded.thinking)  # answers begin with thoughts, which are not scored
        self.within = Within(label)
        self.batch, self.batch_check = batch, batch_check
        self.said: set[str] = set()  # notes on batches that were printed
        self.computed: set[tuple] = set()  # keys, as of `used`, of samples of this evaluation's batches
        self.smoke = smoke
        self.tasks = tasks or {}
        self.whole_prompts = whole_prompts
        self.known = known if known is not None else Prompts()  # the prompts that were read
        self.computes = computes  # false: the model has no weights, and every sample must be in the log
        self.timed = True  # false: times would not be of this process alone, and are dropped
        # a smoke run needs no warm-up: its times mean nothing; samples of batches have none
        self.warm = smoke or batch > 1
        self.prompts: dict[tuple, PromptRead] = {}  # the same keys -> the prompts

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer number `draw` to each request, in their order."""
        answers = []
        draws = self.draws if self.draw == 0 else (self.draw,)
        silent = disable_tqdm or self.draw > 0  # all of them were computed with the first
        with (
            contextlib.redirect_stderr(self.stderr),
            self.attached(),
            tqdm(total=len(requests) * len(draws), desc=self.label, unit="sample", **bar_options(silent=silent)) as bar,
        ):
            if self.batch > 1 and self.draw == 0:
                batches.fill(self, requests, bar.update)
                if self.computes:
                    batches.check(self, requests)
            self.within.bar = bar
            for request in requests:
                own = [self._known(request, draw) or self.answer(request, draw=draw) for draw in draws]
                answers.append(self.scored(own[0]["response"]))
                scores = [s["score"] for s in self.used.values() if s["score"] is not None]
                if scores:
                    bar.set_postfix_str(f"score {sum(scores) / len(scores):.1f}", refresh=False)
                if self.batch == 1:
                    bar.update(len(draws))
        return answers

    # -- one sample ----------------------------------------------------------------------------------------------------

    def prompt(self, request: Instance) -> tuple[list[int], int]:
        """The token ids of a request, and how many of them, at the end, go through the decode path."""
        prepared = self.read(request)
        return prepared.ids, prepared.question

    def has(self, request: Instance) -> bool:
        """Whether the log holds every answer to a request."""
        return not self.lacking(request)

    def lacking(self, request: Instance) -> list[int]:
        """The numbers of the answers that the log does not hold. Raises TooLong."""
        prepared = self.read(request, tokens=False)
        return [draw for draw in self.draws if self.find(self._numbered(prepared, draw)) is None]

    def key(self, task: str, doc_id: int, draw: int) -> tuple:
        """Of a sample in `used`."""
        return (task, doc_id, draw) if len(self.draws) > 1 else (task, doc_id)

    def _known(self, request: Instance, draw: int) -> Sample | None:
        """The sample that an earlier evaluation of this adapter used. Diagnostics have one evaluation."""
        return self.used.get(self.key(str(request.task_name), int(request.doc_id or 0), draw)) if self.draw else None

    def find(self, prepared: Prepared) -> Sample | None:
        """The request's sample in the log."""
        return self.log.find(prepared.task, prepared.doc_id, prepared.mark, prepared.old_mark)

    def answer(self, request: Instance, prefill: Prefill | None = None, draw: int = 0) -> Sample:
        """The sample of a request's answer, from the log or computed now; prefill: a recording of its prompt."""
        prepared = self.read(request, tokens=False, draw=draw)
        task, doc_id, mark = prepared.task, prepared.doc_id, prepared.mark
        key = self.key(task, doc_id, draw)
        sample = self.find(prepared)
        if sample is None or self.unrecorded(sample):
            try:
                sample = self.generate_alone(self.read(request, draw=draw), request.doc, prefill)
            except NonFinite as error:
                sample = self.fail(error, task, doc_id, mark, "", prepared.known.tokens)
            sample = self.log_sample(request, prepared, sample)
        elif key not in self.computed:
            self.resumed += 1
        self.used[key] = sample
        known = prepared.known
        self.prompts[task, doc_id] = PromptRead(known.wrapper, known.cut, known.tokens, known.bos_count, known.sha256)
        return sample

    def log_sample(self, request: Instance, prepared: Prepared, sample: Sample) -> Sample:
        """Record a finished sample, with what its line says of its prompt and its target."""
        if prepared.cut is not None:
            sample["extra"]["cut_tokens"] = prepared.cut[1]
        if self.recorder is not None and "failed" not in sample:
            # before the log: its line promises that the files exist
            self.recorder.save(prepared.task, prepared.doc_id, prepared.mark)
        sample = {**sample, **self._about(request, prepared.known)}
        if prepared.sampling is not None:
            sample["draw"] = prepared.draw
        self.log.append(sample)
        return sample

    def read(self, request: Instance, *, tokens: bool = True, draw: int = 0) -> Prepared:
        """A request in the model's terms. Raises TooLong.

        tokens: with its token ids; facts alone are read once a session. draw: the number of the answer.
        """
        prompt, settings = request.args[0], dict(request.args[1])
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        until, new_tokens = stops(settings, self.decode), self._new_tokens(settings)
        # The document may give the beginning of the model's turn.
        begin = str(request.doc["answer_prefix"]) if settings.get("begin_answer") else ""
        rules = {"until": until, "max_new_tokens": new_tokens, "weights": self.loaded.weights}
        if stop_token := settings.get("stop_token"):
            rules["stop_token"] = stop_token
        loaded = self.loaded
        side = [loaded.name, loaded.old_weights, loaded.chat, loaded.system, loaded.max_length]
        key = key_of(prompt, begin, settings, rules, side, self.question_as_decode, self.smoke, self.max_new_tokens)

        def made() -> tuple[PromptFacts, list[int]]:
            return self._tokenize(task, prompt, begin, settings, rules)

        known = self.known.facts(key, made)
        self.check_length(task, doc_id, known.tokens, new_tokens)
        ids = self.known.ids(key, made) if tokens else []
        marks = known.mark, known.old_mark
        prepared = Prepared(
            task, doc_id, ids, until, new_tokens, *marks, stop_token, known.wrapper, known.cut, known.question, known
        )
        return self._numbered(prepared, draw)

    def _numbered(self, prepared: Prepared, draw: int) -> Prepared:
        """A request's answer of this number."""
        decode, known = self.decode, prepared.known
        if not decode.drawn:
            return prepared
        mark, old_mark = drawn_marks(known.mark, known.old_mark, decode, self.seed, draw)
        key = f"{self.seed}/{prepared.task}/{prepared.doc_id}/{draw}"
        sampling = Sampling(decode.temperature, decode.top_p, key)
        return replace(prepared, mark=mark, old_mark=old_mark, draw=draw, sampling=sampling)

    def _tokenize(
        self, task: str, prompt: str, begin: str, settings: dict[str, Any], rules: dict[str, Any]
    ) -> tuple[PromptFacts, list[int]]:
        """A prompt's facts and token ids. begin: of the answer. rules: of the fingerprint."""
        text, wrapper, cut = self._prompt(task, prompt, settings)
        text += begin
        ids = middle(self.loaded.encode(text), PROMPT_TOKENS if self.smoke else None)
        markers = settings.get("question_markers", MARKERS)
        question = self._question(text, markers)
        # Samples made before data sets had their own markers were split by the general rule.
        if question and question_start(text, markers) != question_start(text) and question != self._question(text):
            rules = {**rules, "question_tokens": question}
        mark = fingerprint(ids, rules)
        old_mark = fingerprint(ids, {**rules, "weights": self.loaded.old_weights})
        bos = self.loaded.tokenizer.bos_token_id
        bos_count = ids.count(bos) if bos is not None else None
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        end = text[-PROMPT_END:]
        return PromptFacts(len(ids), question, mark, old_mark, wrapper, cut, bos_count, sha256, end), ids

    def _about(self, request: Instance, known: PromptFacts) -> SampleMarks:
        """What a sample's line says of its prompt and its target."""
        text = known.end
        if self.whole_prompts:
            settings = dict(request.args[1])
            begin = str(request.doc["answer_prefix"]) if settings.get("begin_answer") else ""
            text = self._prompt(str(request.task_name), request.args[0], settings)[0] + begin
        return {**prompt_marks(text, known.sha256, whole=self.whole_prompts), **self.target(request)}

    def note_prompt(self, key: tuple, wrapper: str, cut: tuple[int, int] | None, ids: list[int], text: str) -> None:
        bos = self.loaded.tokenizer.bos_token_id
        bos_count = ids.count(bos) if bos is not None else None
        self.prompts[key] = PromptRead(wrapper, cut, len(ids), bos_count, hashlib.sha256(text.encode()).hexdigest())

    def begin(self, task: str, doc_id: int, ids: list[int]) -> None:
        """Warm the kernels up once, and seed.

        A random step of a method must not depend on which samples ran before, or a resumed run would differ.
        """
        if not self.computes:
            raise Missing(f"{task} sample {doc_id}: no worker has computed it")
        if not self.warm:
            self.warm = True
            warm_up(self.loaded.model, self.method, ids, self.attn, self.chunks.of(self.loaded.model, len(ids)))
        torch.manual_seed(zlib.crc32(f"{self.seed}/{task}/{doc_id}".encode()))

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
        kernel = attention_kernel(self.attn)[0]
        if not self.timed:
            result = replace(result, prefill_s=None, tt2t_s=None)
        return make_sample(
            result,
            task=task,
            doc_id=doc_id,
            mark=mark,
            response=response,
            score=score,
            question_tokens=question,
            attn=kernel,
            facts=self.facts,
            method=self.method,
        )

    def fail(self, error: Exception, task: str, doc_id: int, mark: str, response: str, tokens: int) -> Sample:
        nothing = GenerationResult([], tokens, None, None, [], 0.0, None, None, None, {}, {}, {})
        return {**self.finish(task, doc_id, mark, response, None, 0, nothing), "failed": str(error)}

    def _question(self, text: str, markers: Sequence[str] = MARKERS) -> int:
        """Tokens of a wrapped prompt that go through the decode path."""
        question = self.loaded.question_tokens(text, markers) if self.question_as_decode else 0
        # Decode steps take most of a smoke run's time.
        return min(question, NEW_TOKENS) if self.smoke else question

    def _prompt(self, task: str, prompt: str, settings: dict[str, Any]) -> tuple[str, str, tuple[int, int] | None]:
        """(text for the model, its wrapper, how it was cut), by the task's settings.

        wrapper: see LoadedModel.wrapper. cut_middle: the longest prompt in tokens before it is wrapped; 0: as many as
        the model has room for beside an answer of `longest_answer` tokens.
        """
        cut = None
        if "cut_middle" in settings:
            max_tokens = settings["cut_middle"] or self.loaded.room(settings.get("longest_answer", self.max_new_tokens))
            if max_tokens is not None:
                if max_tokens < 2:
                    longest = self.loaded.max_length
                    raise TooLong(f"{task}: {longest} tokens (model.max_length) leave no room for a prompt")
                prompt, dropped = self.loaded.cut_middle(prompt, max_tokens)
                cut = max_tokens, dropped
        style = settings.get("wrapper", "template")
        return self.loaded.wrap(prompt, style), self.loaded.wrapper(style), cut

    @property
    def first_prompt(self) -> dict[str, Any] | None:
        """Task, document, length and hash of the first prompt; None before there is one."""
        for (task, doc_id, *_), prompt in self.prompts.items():
            return {"task": task, "doc_id": doc_id, "tokens": prompt.tokens, "sha256": prompt.sha256}
        return None

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
        return {
            "wrapper": " / ".join(wrappers) or self.loaded.wrapper(),
            "unwrapped": list(bare) if self.loaded.chat else [],
            "system": self.loaded.system if self.loaded.chat else None,
            "bos_count": max((prompt.bos_count for prompt in prompts if prompt.bos_count is not None), default=None),
            "truncation": cut or "none; longer is left out",
            "truncated_prompts": sum(dropped > 0 for _, dropped in cuts),
            "first_prompt": self.first_prompt,
        }

    def _new_tokens(self, settings: Mapping[str, Any]) -> int:
        """How many tokens an answer may have."""
        asked = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_new_tokens)
        return min(asked, NEW_TOKENS) if self.smoke else asked

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
        return self.within.watched(thinking.stopper(self.loaded.tokenizer, prepared.until, thinking=self.thinks))

    def generate_alone(self, prepared: Prepared, doc: dict, prefill: Prefill | None = None) -> Sample:
        """The sample of one request, computed now by itself. Raises NonFinite."""
        task, doc_id, ids = prepared.task, prepared.doc_id, prepared.ids
        stop_ids, not_first = self.ends(prepared)
        self.begin(task, doc_id, ids)
        self.within.begin(f"{task} sample {doc_id}", prepared.new_tokens)
        chunk = self.chunks.of(self.loaded.model, len(ids) - prepared.question)
        result = generate(
            self.loaded.model,
            self.method,
            torch.tensor([ids], device=self.loaded.device),
            max_new_tokens=prepared.new_tokens,
            eos_token_ids=stop_ids,
            stop=self.stopper(prepared),
            question_tokens=prepared.question,
            not_first=not_first,
            sampling=prepared.sampling,
            attn=self.attn,
            watchers=self.recorder.watchers(task, doc_id) if self.recorder is not None else (),
            prefill=prefill,
            prefill_chunk=chunk,
            graph=self.graph,
            kernels=self.kernels,
        )
        result.extra.update(self.chunks.fact(chunk))
        return self.sample_of(prepared, doc, result, stop_ids)

    def sample_of(self, prepared: Prepared, doc: dict, result: GenerationResult, stop_ids: Collection[int]) -> Sample:
        """The sample of a finished generation: its answer as text, without the tokens that end it, and the score."""
        answer = result.token_ids
        while answer and answer[-1] in stop_ids:
            answer = answer[:-1]
        text = thinking.decode(self.loaded.tokenizer, answer, thinking=self.thinks)
        response = thinking.cut(text, prepared.until, thinking=self.thinks)
        score = self.scorer(prepared.task, doc, self.scored(response)) if self.scorer is not None else None
        if self.thinks:
            result.extra["thinking_ended"] = int(thinking.END in text)
        return self.finish(prepared.task, prepared.doc_id, prepared.mark, response, score, prepared.question, result)

    def scored(self, response: str) -> str:
        """What of an answer is scored: without its thoughts."""
        return thinking.scored(response) if self.thinks else response
