"""The budget, and how a method divides it over sinks, local window and selected tokens."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64  # an int budget below this is almost surely a ratio typed wrongly (budget=2 for 0.2)
REFRESHED = 64  # tokens that a refreshing evictor drops at once, at most half of its budget
# How a budget of B tokens is kept while the answer grows: of c earlier tokens a are attended at a step, the current one apart.
RULES = {
    "prompt": "planned once, when the prompt ends",
    "exact": "a = min(B, c)",
    "whole": "whole pages or blocks, rounded down: B - size < a <= B once c > B",
    "refreshed": "everything until B tokens are held, then ranked again, down to max(B - 64, B / 2), whenever B is reached",
    "pooled": "as refreshed, for the mean of the layers",
    "extra": "a = min(B + the method's stated compensation, c)",
    "context": "a = floor(ratio x c) at every step",
    "ignored": "the method ignores the budget",
    "own": "what a recorded run attended",
}
# Rules that were changed: raised by one, so that samples of two meanings never share a folder.
REVISIONS = {"context": 2}  # 1: the sinks are within the share; 2: the window grows in every turn
_LARGEST = 2**63  # numbers from here on are no one's budget
_EPS = 1e-6  # 0.1 * 8160 is 815.999... in binary floating point; without this a token is lost


def floor_share(total: int, share: float) -> int:
    """floor(total * share), unharmed by binary rounding."""
    return int(total * share + _EPS)


@dataclass(frozen=True)
class Budget:
    """Tokens a method may keep or attend per layer and KV head: a share of the prompt, or a number of tokens.

    Exactly one field is set. `ratio` is in (0, 1]; `tokens` is at least 64.
    """

    ratio: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.tokens is None):
            raise ValueError("budget: give either a ratio or a number of tokens")
        if self.ratio is not None and MIN_TOKENS <= self.ratio < _LARGEST:
            raise ValueError(f"budget={self.ratio}: a number of tokens is an integer, as budget={int(self.ratio)}")
        tokens, ratio = self.tokens, self.ratio or 0
        if tokens < MIN_TOKENS if tokens is not None else not 0 < ratio <= 1:
            value = self.ratio if tokens is None else tokens
            raise ValueError(f"budget={value}: allowed is a ratio in (0, 1] or a number of tokens >= {MIN_TOKENS}")

    @classmethod
    def parse(cls, value: Budget | float | int | str) -> Budget:
        """A Budget from what a user typed: 0.2, "0.2", 512, 1. Raises ValueError with one line that names the value."""
        if isinstance(value, Budget):
            return value
        number: float | int | None = None
        if isinstance(value, str):
            for kind in (int, float):
                try:
                    number = kind(value)
                    break
                except ValueError:
                    continue
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        if number is None:
            raise ValueError(f"budget={value}: allowed is a ratio in (0, 1] or a number of tokens >= {MIN_TOKENS}")
        if isinstance(number, int) and number != 1:
            return cls(tokens=number)
        return cls(ratio=float(number))

    @property
    def is_everything(self) -> bool:
        """True for ratio 1.0, the no-op of every method with a budget."""
        return self.ratio == 1.0

    def total(self, s: int) -> int:
        """This budget in tokens for a prompt of `s` tokens."""
        if self.tokens is not None:
            return min(self.tokens, s)
        assert self.ratio is not None
        return floor_share(s, self.ratio)

    def __str__(self) -> str:
        return f"{self.tokens}tok" if self.tokens is not None else f"{self.ratio:g}"


@dataclass(frozen=True)
class Allowance(Budget):
    """Tokens that a method gives itself for a time. They may be fewer than a user's budget."""

    def __post_init__(self) -> None:
        if self.tokens is None or self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: allowed is an int >= 1")


def refreshed_to(tokens: int) -> int:
    """Tokens that an evictor keeps when it ranks again because it holds more than `tokens`."""
    return max(1, tokens - REFRESHED, tokens // 2)


@dataclass(frozen=True)
class Plan:
    """How a budget is spent in one layer, in tokens per KV head: of a prompt, or of the step after so many tokens.

    The current token is always attended and never counted here.
    """

    sinks: int  # first tokens, always kept
    local: int  # most recent tokens, always kept
    k: int  # selected (or, for evictors, kept) among the candidates between sinks and local window

    @property
    def total(self) -> int:
        return self.sinks + self.local + self.k


def partition_plan(budget: Budget, s: int, n_sink: int, recent_ratio: float) -> Plan:
    """Sinks + local window + selected tokens for a prompt of `s` tokens.

    A ratio is of the tokens after the sinks, and the sinks come on top, as in PQCache's experiments. A token budget
    includes the sinks, so that budget=512 attends 512 tokens. The total is rounded once and then split: two independent
    truncations lose a token, and budget 1.0 would no longer be full attention. The window holds at least one token.
    """
    sinks = min(n_sink, s)
    rest = s - sinks
    total = min(rest, max(0, budget.tokens - sinks)) if budget.tokens is not None else budget.total(rest)
    local = min(rest, max(1, floor_share(total, recent_ratio)))
    return Plan(sinks=sinks, local=local, k=max(0, total - local))


def window_plan(budget: Budget, s: int, n_sink: int, recent: int) -> Plan:
    """As `partition_plan`, with a local window of `recent` tokens as far as the budget has them. It may be 0."""
    whole = partition_plan(budget, s, n_sink, recent_ratio=1.0)
    local = min(recent, whole.local)
    return Plan(sinks=whole.sinks, local=local, k=whole.local - local)
