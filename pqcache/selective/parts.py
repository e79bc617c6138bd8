"""Methods made of other methods: parts are named by hyper-parameters and chosen by what their classes declare."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pqcache.fields import coerce, option_fields
from pqcache.naming import near
from pqcache.registry import METHODS, RETIRED, method_class
from pqcache.selective.method import Method
from pqcache.selective.shape import NotApplicable


@dataclass(kw_only=True)
class ComposedMethod(Method):
    """Base of methods made of others: calls that happen once per model or prompt are passed on to every part."""

    def parts(self) -> tuple[Method, ...]:
        """The methods that this one is made of, made in `setup`."""
        raise NotImplementedError

    def check_model(self, config: PreTrainedConfig) -> None:
        for part in self.parts():
            part.check_model(config)
        super().check_model(config)

    def check_prompt(self, lengths: list[int], token_ids: torch.Tensor | None) -> None:
        for part in self.parts():
            part.check_prompt(lengths, token_ids)

    def check_prepared(
        self, config: PreTrainedConfig, device: torch.device, dtype: str, cache_dir: Path | None
    ) -> None:
        for part in self.parts():
            part.check_prepared(config, device, dtype, cache_dir)

    def chunk_unit(self, s: int) -> int:
        return math.lcm(*(part.chunk_unit(s) for part in self.parts()))

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        for part in self.parts():
            part.prepare(model, text, cache_dir)

    def know_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for part in self.parts():
            part.know_tokenizer(tokenizer)

    def spent(self) -> dict[str, Any]:
        """The options by which a part that spends the budget does so as this method does, by a rule of its own."""
        rule = "prompt" if self.budget_rule == "prompt" else None
        return {"budget": self.budget, "protocol": self.protocol, "budget_rule": rule, "budget_of": self.budget_of}

    # -- shared -----------------------------------------------------------------------------------------------------

    def must_keep_its_choice(self, option: str, evictor: Any, cannot: str) -> None:
        """Refuse an evictor that evicts at every step, or keeps K and V per query head; `option` is its hyper-parameter."""
        self.require(option, not evictor.is_dynamic, "an evictor that prunes once (mode: static)")
        if self.protocol == "release" and evictor.repeats_kv:
            raise NotApplicable(
                f"protocol=release: {self.name} {cannot} repeated K and V, as {evictor.name} keeps them"
            )
        self.require(option, not evictor.repeats_kv, "one choice per KV head (repeat_kv: false)")

    def part_class(self, option: str, fits: Callable[[type[Any]], bool]) -> type[Any]:
        """The class of the method that hyper-parameter `option` names.

        Raises ValueError with the allowed names: the methods whose class `fits` accepts.
        """
        name = getattr(self, option)
        if name in METHODS and fits(method_class(name)):
            return method_class(name)
        allowed = [known for known in METHODS if fits(method_class(known))]
        raise ValueError(f"{option}={name}: allowed is {', '.join(allowed)}{near(str(name), allowed)}")

    def make_part(self, option: str, cls: type[Any], common: dict[str, Any], **defaults: Any) -> Any:
        """A part: cls made of `defaults`, overridden by the user's options in hyper-parameter `option`, and of `common`.

        The user may not set a key of `common`. Raises ValueError with one line that begins with `option`, and NotApplicable
        where the part does.
        """
        gone = RETIRED.get(cls.name, {})
        options = {key: value for key, value in getattr(self, option).items() if key not in gone or value != gone[key]}
        known = option_fields(cls, common)
        for key, value in options.items():
            if key in common:
                raise ValueError(f"{option}={options}: allowed is what is the part's own, without {key}")
            if key not in known:
                raise ValueError(f"{option}={options}: {cls.name} has no {key}; known: {', '.join(known)}")
            try:
                coerce(value, known[key][0])
            except TypeError as expected:
                raise ValueError(f"{option}={options}: {key} takes {expected}") from None
            except ValueError:  # out of its range, which the part says itself
                break
        try:
            return cls(**{**defaults, **options, **common})
        except NotApplicable:
            raise
        except ValueError as error:
            raise ValueError(f"{option}={options}: {error}") from None
