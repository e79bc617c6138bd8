"""The lm-eval adapter: every request runs through our own greedy decode loop, under any method.

    lm = HarnessLM(loaded, method, log, seed=0)
    lm_eval.evaluator.evaluate(lm, task_dict, limit=20)

The adapter wraps prompts itself (chat template, opening tokens once), so lm-eval's apply_chat_template stays off.
A sample found in the log is not computed again.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import LM
from tqdm import tqdm

from pqcache.harness import environment
from pqcache.harness.models import LoadedModel
from pqcache.harness.samples import Sample, SampleLog, fingerprint
from pqcache.harness.timing import warm_up
from pqcache.selective import attach, generate
from pqcache.selective.support import attention_kernel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.diagnostics import Recorder
    from pqcache.selective import GenerationResult, Method, Prefill

DEFAULT_NEW_TOKENS = 256
Scorer = Callable[[str, dict, str], float | None]  # (lm-eval task, document, response) -> 0..100


@dataclass(frozen=True)
class _Asked:
    """One request in the model's terms."""

    task: str
    doc_id: int
    text: str  # the prompt, wrapped
    ids: list[int]
    until: list[str]  # stop strings
    new_tokens: int  # at most
    mark: str  # the sample's fingerprint


class HarnessLM(LM):
    """One model under one method, one sample at a time."""

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
    ) -> None:
        super().__init__()
        self.loaded = loaded
        self.method = method
        self.log = log
        self.attn = attn
        self.seed = seed
        self.question_as_decode = question_as_decode
        self.max_new_tokens = max_new_tokens
        self.scorer = scorer
        self.label = label
        self.facts = facts or environment.facts(loaded.device)
        self.recorder = recorder
        self.stderr = sys.stderr  # the caller may mute lm-eval, but not our progress bar
        self.used: dict[tuple[str, int], Sample] = {}  # the samples of this evaluation, found or computed
        self.resumed = 0
        self.warm = False
        self.bos_count: int | None = None

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, in the order of the requests."""
        answers = []
        with (
            contextlib.redirect_stderr(self.stderr),
            attach(self.loaded.model),
            tqdm(total=len(requests), desc=self.label, unit="sample", disable=disable_tqdm, leave=False) as bar,
        ):
            for request in requests:
                sample = self.answer(request)
                answers.append(sample["response"])
                scores = [s["score"] for s in self.used.values() if s["score"] is not None]
                if scores:
                    bar.set_postfix_str(f"score {sum(scores) / len(scores):.1f}", refresh=False)
                bar.update()
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError("log-likelihood tasks are not built yet; choose a task that generates")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("perplexity tasks are not built yet; choose a task that generates")

    # -- one sample ----------------------------------------------------------------------------------------------------

    def prompt(self, request: Instance) -> tuple[list[int], int]:
        """The token ids of a request, and how many of the last of them go through the decode path."""
        asked = self._read(request)
        return asked.ids, self._question(asked)

    def has(self, request: Instance) -> bool:
        """Whether the log holds the sample."""
        asked = self._read(request)
        return self.log.find(asked.task, asked.doc_id, asked.mark) is not None

    def answer(self, request: Instance, prefill: Prefill | None = None) -> Sample:
        """The request's sample, from the log or computed now; prefill: a recording of its prompt."""
        asked = self._read(request)
        task, doc_id, mark = asked.task, asked.doc_id, asked.mark
        sample = self.log.find(task, doc_id, mark)
        if sample is None or (self.recorder is not None and not self.recorder.complete(task, doc_id, mark)):
            sample = self._generate(asked, request.doc, prefill)
            if self.recorder is not None:
                self.recorder.save(task, doc_id, mark)  # first the files: a line in the log says they are there
            self.log.append(sample)
        else:
            self.resumed += 1
        self.used[task, doc_id] = sample
        return sample

    def _read(self, request: Instance) -> _Asked:
        """What a request asks for, in the model's terms. Raises ValueError if it is too long for the model."""
        prompt, settings = request.args[0], dict(request.args[1])
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        until, new_tokens = self._settings(settings)
        text = self.loaded.wrap(prompt)
        ids = self.loaded.encode(text)
        if self.loaded.max_length is not None and len(ids) + new_tokens > self.loaded.max_length:
            raise ValueError(
                f"{task} sample {doc_id}: {len(ids)} prompt tokens + {new_tokens} new ones exceed the"
                f" {self.loaded.max_length} tokens the model was made for (model.max_length)"
            )
        if self.bos_count is None:
            self.bos_count = ids.count(bos) if (bos := self.loaded.tokenizer.bos_token_id) is not None else 0
        mark = fingerprint(ids, {"until": until, "max_new_tokens": new_tokens, "weights": self.loaded.weights})
        return _Asked(task, doc_id, text, ids, until, new_tokens, mark)

    def _question(self, asked: _Asked) -> int:
        return self.loaded.question_tokens(asked.text) if self.question_as_decode else 0

    def _settings(self, settings: dict[str, Any]) -> tuple[list[str], int]:
        """(stop strings, new tokens) of a request; anything but greedy decoding is refused."""
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        if settings.get("do_sample") or int(settings.get("num_beams") or 1) != 1:
            raise ValueError("only greedy decoding is supported: do_sample=false, num_beams=1")
        new_tokens = settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_new_tokens
        return [s for s in until if s], int(new_tokens)

    def _generate(self, asked: _Asked, doc: dict, prefill: Prefill | None = None) -> Sample:
        task, doc_id, ids, until = asked.task, asked.doc_id, asked.ids, asked.until
        tokenizer = self.loaded.tokenizer
        stop_ids = self.loaded.stop_ids()
        vocabulary = tokenizer.get_vocab()
        special = set(tokenizer.all_special_tokens)
        stop_ids |= {vocabulary[s] for s in until if s in special and s in vocabulary}  # decoding would drop these
        if not self.warm:
            self.warm = True
            warm_up(self.loaded.model, self.method, ids, self.attn)
        # A random step of a method must not depend on which samples ran before, or a resumed run would differ.
        torch.manual_seed(zlib.crc32(f"{self.seed}/{task}/{doc_id}".encode()))
        question = self._question(asked)
        result = generate(
            self.loaded.model,
            self.method,
            torch.tensor([ids], device=self.loaded.model.device),
            max_new_tokens=asked.new_tokens,
            eos_token_ids=tuple(sorted(stop_ids)),
            stop=stopper(tokenizer, until),
            question_tokens=question,
            attn=self.attn,
            watchers=self.recorder.watchers(task, doc_id) if self.recorder is not None else (),
            prefill=prefill,
        )
        answer = result.token_ids
        while answer and answer[-1] in stop_ids:
            answer = answer[:-1]
        response = cut(str(tokenizer.decode(answer, skip_special_tokens=True)), until)
        score = self.scorer(task, doc, response) if self.scorer is not None else None
        kernel = attention_kernel(self.attn)[0]
        return _sample(task, doc_id, asked.mark, response, score, question, result, kernel, self.facts)


def stopper(tokenizer: Any, until: list[str]) -> Callable[[list[int]], bool] | None:
    """Whether a stop string has just been completed. Looks at the last tokens only, so a step stays cheap."""
    if not until:
        return None
    tail = max(len(s.encode()) for s in until) + 4  # a token is at least one byte, a cut character at most four

    def stop(token_ids: list[int]) -> bool:
        text = tokenizer.decode(token_ids[-tail:], skip_special_tokens=True)
        return any(s in text for s in until)

    return stop


def cut(text: str, until: list[str]) -> str:
    """The text before the first stop string."""
    ends = [at for s in until if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def _sample(
    task: str,
    doc_id: int,
    mark: str,
    response: str,
    score: float | None,
    question: int,
    result: GenerationResult,
    attn: str,
    facts: environment.Facts,
) -> Sample:
    return {
        "task": task,
        "doc_id": doc_id,
        "fingerprint": mark,
        "response": response,
        "score": score,
        "new_tokens": len(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "question_tokens": question,
        "prefill_s": result.prefill_s,
        "tt2t_s": result.tt2t_s,
        "step_s": [round(s, 7) for s in result.step_s],
        "index_build_s": result.index_build_s,
        "budget_tokens": result.budget_tokens,
        "attended_tokens": result.attended_tokens,
        "attended_tokens_all_layers": result.attended_tokens_all_layers,
        "resident_bytes": dict(result.resident_bytes),
        "peak_bytes": dict(result.peak_bytes),
        "bytes_per_step": dict(result.bytes_per_step),
        "extra": dict(result.extra),
        "attn": attn,
        "device": facts["device"],
        "git_commit": facts["git_commit"],
        "versions": dict(facts["versions"]),
    }
