"""Answers as they grow and as they end: stop strings, thoughts before the answer, and a line for who waits.

`model.thinking=true` asks for thoughts. The rule, which is lm-eval's: what stands up to the last `</think>` is not scored, and
stop strings are looked for behind it. An answer without `</think>` is scored as a whole. While it is generated, it is not
stopped by stop strings before it has one.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from pqcache.harness.run.model_files import Unusable

END = "</think>"
SWITCH = "enable_thinking"  # a variable of chat templates that can have the model think or not
EVERY_S = 30.0  # between two lines on an answer that grows
BAR_S = 1.0  # between two changes of the bar


def check(name: str, thinking: bool, tokenizer: Any, *, chat: bool) -> None:
    """Refuse `model.thinking` where the chat template does not know it. Raises Unusable."""
    typed = f"model.thinking={str(thinking).lower()}"
    if not chat:
        raise Unusable(f"{typed}: goes with a chat template, and {name} gets its prompts without one")
    template = str(tokenizer.chat_template)
    if SWITCH in template or (thinking and END in template):
        return
    knows = f"neither {SWITCH} nor {END}" if thinking else f"no {SWITCH}"
    raise Unusable(f"{typed}: the chat template of {name} knows {knows}")


def decode(tokenizer: Any, ids: list[int], *, thinking: bool) -> str:
    """The text of an answer without special tokens; the end of its thoughts is kept where it is one."""
    if thinking and END in tokenizer.all_special_tokens:
        end = tokenizer.convert_tokens_to_ids(END)
        if end in ids:
            at = len(ids) - 1 - ids[::-1].index(end)
            thoughts, answer = (decode(tokenizer, part, thinking=False) for part in (ids[:at], ids[at + 1 :]))
            return thoughts + END + answer
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def scored(text: str) -> str:
    """What of an answer is scored."""
    return text.rpartition(END)[2].lstrip() if END in text else text


def cut(text: str, until: list[str], *, thinking: bool = False) -> str:
    """The text before the first stop string. thinking: its thoughts stay."""
    thoughts, end, answer = text.rpartition(END) if thinking else ("", "", text)
    ends = [at for s in until if (at := answer.find(s)) >= 0]
    return thoughts + end + (answer[: min(ends)] if ends else answer)


def stopper(tokenizer: Any, until: list[str], *, thinking: bool = False) -> Callable[[list[int]], bool]:
    """Whether a stop string has just been completed; called with all tokens of one answer as it grows.

    Looks at the last tokens only, so a step stays cheap.
    """
    # A token has at least one byte; a character that the tail cuts has at most four.
    tail = max(len(s.encode()) for s in (*until, *([END] if thinking else []))) + 4
    thought = thinking

    def stop(token_ids: list[int]) -> bool:
        nonlocal thought
        text = decode(tokenizer, token_ids[-tail:], thinking=thinking)
        if thinking and END in text:
            thought, text = False, text.rpartition(END)[2]
        return not thought and any(s in text for s in until)

    return stop


class Within:
    """How far the answers are that grow now: a line every half minute, or the bar's last words on a terminal."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """label: of the cell. stream: where lines go."""
        self.label, self.stream, self.clock = label, stream or sys.stderr, clock
        self.bar: Any = None  # a tqdm bar, while there is one
        self._name, self._most, self._start, self._last = "", 0, 0.0, 0.0

    def begin(self, name: str, most: int) -> None:
        """An answer begins, or a batch of them. most: tokens of the longest one."""
        self._name, self._most = name, most
        self._start = self._last = self.clock()

    def watched(self, stop: Callable[[list[int]], bool] | None) -> Callable[[list[int]], bool]:
        """`stop` for an answer that is watched while it grows."""

        def watched(token_ids: list[int]) -> bool:
            now, count = self.clock(), len(token_ids)
            shown = self.bar is not None and not getattr(self.bar, "disable", True)
            if now - self._last >= (BAR_S if shown else EVERY_S):
                self._last = now
                rate = count / max(now - self._start, 1e-9)
                text = f"{self._name}: {count:,} of at most {self._most:,} tokens, {rate:.1f} tokens/s"
                if shown:
                    self.bar.set_postfix_str(text)
                else:
                    print(f"{self.label}: {text}", file=self.stream, flush=True)
            return stop is not None and stop(token_ids)

        return watched
