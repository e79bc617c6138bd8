"""Method: the hyper-parameters of one KV-cache method, and the maker of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pqcache.fields import Whole, check_ranges
from pqcache.selective.budget import RULES, Allowance, Budget, Plan
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import SelectiveLayer
from pqcache.selective.shape import ModelShape, NotApplicable

Protocol = Literal["aligned", "paper", "release"]
WITHOUT_BUDGET = ("ignored", "own")  # rules of methods that a budget does not decide
TOKEN_RULES = tuple(rule for rule in RULES if rule not in ("prompt", "context", *WITHOUT_BUDGET))


@dataclass(kw_only=True)
class Method:
    """Base of all methods. A subclass is a dataclass whose fields are its hyper-parameters; `name` is what users type.

    It writes `validate` and what its family's base asks for (RetrievalMethod, EvictionMethod, QuantizationMethod), or
    `make_layer`. Everything else has a default. One outside the project needs no `name`: `module:Class` is it.

    budget: what may be spent. dense_layers: how many first layers stay dense; None takes the method's default under
    `protocol`: "aligned" (one rule for all methods), "paper" (as the method's publication says) or "release" (as its released
    code runs). Raises NotApplicable under "release" if there is no such code.
    budget_rule: how a token budget is kept while the answer grows. None takes the method's own rule under protocol="aligned",
    else "prompt"; see `effective_rule`. budget_of: what a ratio is a share of, the "prompt" or, at each step, the whole
    "context".
    """

    name: ClassVar[str] = "unnamed"
    # keep all | retrieve (keep all, pick some per query) | evict (drop some) | quantize (fewer bits); or two of them
    kind: ClassVar[str] = ""
    ignores_budget: ClassVar[bool] = False
    # Whether it keeps the windows of a model whose layers all slide: nothing is left to choose beyond them.
    serves_windows: ClassVar[bool] = False
    # Whether several prompts may be answered at once.
    takes_batches: ClassVar[bool] = True
    # Of a method from outside: a digest of its files, set when its class is loaded (pqcache/registry.py).
    source: ClassVar[str] = ""
    # Raised by one whenever the algorithm changes: samples of two revisions never share a folder.
    revision: ClassVar[int] = 0
    # The code that protocol=release follows, as <repository>: <part>; empty where none is published.
    released: ClassVar[str] = ""
    # How it keeps an aligned token budget at every decode step, a key of budget.RULES. "prompt": it cannot.
    own_rule: ClassVar[str] = "prompt"
    aligned_dense_layers: ClassVar[int] = 0
    paper_dense_layers: ClassVar[int] = 0
    release_dense_layers: ClassVar[int | None] = None  # None: as the paper's
    noop_options: ClassVar[dict[str, Any]] = {}  # under which, with a budget of 1.0, the method equals dense attention

    budget: Budget = field(default_factory=lambda: Budget(ratio=1.0))
    dense_layers: Whole | None = None
    protocol: Protocol = "aligned"
    budget_rule: str | None = None
    budget_of: Literal["prompt", "context"] = "prompt"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.protocol == "release" and not self.released:
            raise NotApplicable(f"protocol=release: no code of {self.name} is published; aligned and paper apply")
        self.fill()
        if self.dense_layers is None:
            self.dense_layers = self.default_dense_layers(self.protocol)
        self.validate()
        self.setup()
        if self.budget_of == "context" or self.budget_rule is not None:
            self._check_rule()
        self.check_budget()

    def _check_rule(self) -> None:
        """Refuse a rule that is not the method's own here, and a share of the context where nothing is planned again."""
        if self.budget_of == "context":
            why = "protocol=aligned" if self.protocol != "aligned" else "budget_rule=null"
            self.require(
                "budget_of", self.protocol == "aligned" and self.budget_rule != "prompt", f"prompt, except with {why}"
            )
        if self.budget_rule not in (None, "prompt", self.effective_rule):
            own = self.aligned_rule
            also = f", or {own} with protocol=aligned and a budget in tokens" if own in TOKEN_RULES else ""
            raise ValueError(f"budget_rule={self.budget_rule}: allowed is null or prompt{also} ({self.name})")
        if self.budget_rule != "prompt":  # its own by name: as null, also for a copy with another budget
            self.budget_rule = None

    # -- the budget while the answer grows ----------------------------------------------------------------------------

    @property
    def aligned_rule(self) -> str:
        """`own_rule` under these hyper-parameters."""
        return self.own_rule

    @property
    def keeps_rule(self) -> bool:
        """Whether these hyper-parameters let the method keep its own rule. If not, it plans once, when the prompt ends."""
        return True

    @property
    def effective_rule(self) -> str:
        """How this budget is kept while the answer grows: a key of budget.RULES."""
        own = self.aligned_rule
        if own in WITHOUT_BUDGET or self.ignores_budget:
            return own if own in WITHOUT_BUDGET else "ignored"
        if own == "prompt" or self.protocol != "aligned" or self.budget_rule == "prompt" or not self.keeps_rule:
            return "prompt"
        if self.budget.tokens is not None:
            return own
        return "context" if self.budget_of == "context" and not self.budget.is_everything else "prompt"

    @cached_property
    def replans(self) -> bool:
        """Whether every decode step has a plan of its own. Asked several times per step and layer."""
        return self.effective_rule in (*TOKEN_RULES, "context")

    def budget_at(self, s: int) -> Budget:
        """The budget of a plan for `s` tokens: a share of the context is so many tokens of it, sinks included."""
        if self.effective_rule != "context":
            return self.budget
        return Allowance(tokens=max(1, self.budget.total(s)))

    @property
    def traceable(self) -> bool:
        """Whether the tokens that the layers report as attended determine the output. Selection traces need it."""
        return False

    # -- what a subclass may override -------------------------------------------------------------------------------

    def fill(self) -> None:
        """Set hyper-parameters that are null to their default, before they are checked; see `by_protocol`."""

    def validate(self) -> None:
        """Check the hyper-parameters with `require`. Sets nothing."""

    def setup(self) -> None:
        """Derive attributes from the hyper-parameters, which are valid now: parts of a composed method, tables, caches."""

    def check_budget(self) -> None:
        """Raise NotApplicable if this method cannot honour `budget`."""

    def check_model(self, config: PreTrainedConfig) -> None:
        """Raise ValueError if this method cannot run on a model of this configuration."""

    def check_prompt(self, lengths: list[int], token_ids: torch.Tensor | None) -> None:
        """Raise ValueError if this method cannot run on prompts of these lengths; token_ids (n, columns) if known."""

    def check_prepared(
        self, config: PreTrainedConfig, device: torch.device, dtype: str, cache_dir: Path | None
    ) -> None:
        """Raise ValueError if `prepare` needs a file that another command must make first. The message names that command.

        Called before any weights are loaded. dtype: as torch names it, without "torch.".
        """

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        """Work done once per model (calibration, profiling), cached under `cache_dir`.

        text: token ids (1, t) in the model's own tokens. The harness gives text and folder. SelectiveCache gives neither: a
        method that is prepared for this model then returns at once.
        """

    def know_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Receive the model's tokenizer, for methods that look at the text of tokens. The harness calls it before any prompt."""

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan | None:
        """How the budget is spent on a prompt of `s` tokens in one layer; None if the method ignores the budget."""
        return None

    def replan(self, first: Plan, c: int, layer_idx: int, n_layers: int) -> Plan:
        """The plan of a decode step after `c` earlier tokens, where `replans` says so. first: the plan of the prompt."""
        plan = self.plan(c, layer_idx, n_layers)
        assert plan is not None
        return plan

    def chunk_unit(self, s: int) -> int:
        """A prompt of `s` tokens may arrive in chunks of this many tokens, or of a multiple."""
        return 1

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """A prompt's compression against 16 bits as the method's paper counts it, beside measured bytes. None: not published."""
        return None

    def index_bytes(self, tokens: int, shape: ModelShape) -> int | None:
        """Upper bound of what one layer of one row stores beside K and V of `tokens` tokens. None: at most half of them."""
        return None

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        """The layer object of transformer layer `layer_idx` (never one of the dense layers). Default: one that keeps all."""
        return DenseLayer(layer_idx, shape)

    @classmethod
    def noop(cls, **hyper: Any) -> Self:
        """The setting under which this method must equal dense attention."""
        return cls(**{"budget": Budget(ratio=1.0), **hyper, **cls.noop_options})

    @classmethod
    def default_dense_layers(cls, protocol: str) -> int:
        """How many first layers stay dense by default."""
        if protocol == "release" and cls.release_dense_layers is not None:
            return cls.release_dense_layers
        return cls.aligned_dense_layers if protocol == "aligned" else cls.paper_dense_layers

    # -- shared -----------------------------------------------------------------------------------------------------

    def by_protocol(self, **defaults: tuple[Any, ...]) -> None:
        """Set those of these hyper-parameters that are null: to the value of (aligned, paper[, release: the paper's])."""
        place = get_args(Protocol).index(self.protocol)
        for name, values in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, values[min(place, len(values) - 1)])

    def require(self, name: str, ok: bool, allowed: str) -> None:
        """Raise one line that names the hyper-parameter, its value and what is allowed."""
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)}: allowed is {allowed}")

    def layers(self, shape: ModelShape) -> list[SelectiveLayer]:
        """One layer object per transformer layer; the first `dense_layers` keep and attend everything."""
        assert self.dense_layers is not None
        return [
            DenseLayer(i, shape) if i < self.dense_layers else self.make_layer(i, shape) for i in range(shape.n_layers)
        ]

    def hyper_parameters(self) -> dict[str, Any]:
        """The subclass's own fields, for the result row."""
        common = {f.name for f in fields(Method)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}

    def revisions(self) -> dict[str, int | str]:
        """Method -> revision of this method and of those it is built on, where it is not 0; from outside: its `source`."""
        marks = {self.name: mark} if (mark := self.source or self.revision) else {}
        for part in self.parts():
            marks |= part.revisions()
        return marks

    def parts(self) -> tuple[Method, ...]:
        """The methods that this one is built on."""
        return ()


class OnePass(Method):
    """The method of a single forward pass, whose layers are made already."""

    def __init__(self, layers: Sequence[SelectiveLayer]) -> None:
        super().__init__()
        self.made = list(layers)

    def layers(self, shape: ModelShape) -> list[SelectiveLayer]:
        return self.made
