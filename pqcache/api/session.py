"""`pqcache.use`: a model under a method inside a `with` block."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import fmean
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pqcache.api.call import Call, check_cache
from pqcache.api.checks import check_model, make_method, typed_value, unwrapped
from pqcache.api.report import Report
from pqcache.naming import suggestion
from pqcache.selective import Budget, Method, SelectiveCache, attach
from pqcache.selective.ledger import synchronize
from pqcache.selective.placement import home
from pqcache.selective.support import ATTN, KERNELS

BUDGET = 0.2  # the command's default, too
_MAKING = threading.Lock()
_TURNS: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
CALIBRATION_WORDS = 16_000  # of the text that a tokenizer encodes for methods that calibrate


def use(
    model: PreTrainedModel,
    method: str | type[Method] | Method = "pqcache",
    *,
    budget: float | int | str | Budget | None = None,
    dense_layers: int | None = None,
    protocol: str = "aligned",
    attn: str = "auto",
    kernels: str = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration: torch.Tensor | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> Session:
    """Run `model` under a KV-cache method inside `with pqcache.use(...) as session:`.

    model: a loaded transformers causal LM of a supported architecture (docs/architectures.md), also inside PEFT or torch.compile.
    method: a name of `pqcache.methods()`, `module:Class` or a class of your own, or an object of a Method, which has its budget
      and options already.
    budget: a share of the prompt, a float in (0, 1], or tokens per KV head, an int >= 64. Default 0.2.
    dense_layers: how many first layers keep and attend everything. None: the method's own number under `protocol`.
    protocol: "aligned" (one rule for all methods), "paper" or "release" (as published).
    attn: the attention kernel of the prompt: "auto", "sdpa", "flash_attention_2" or "standard".
    kernels: what computes decode steps on a CUDA device: "torch", or "auto" (Triton kernels where the method allows it).
    tokenizer: the model's, for methods that look at the text of tokens or calibrate on a text.
    calibration: token ids (1, t) for methods that calibrate (infinigen, double_sparsity, duo_attention). Without it and
      without a tokenizer these take random tokens.
    cache_dir: where calibrations are stored. None: they are computed again in every session.
    options: the method's hyper-parameters.

    Everything is checked here, before the block begins. Raises ValueError for values and unsupported models, NotApplicable (a
    ValueError) where the method cannot honour budget or protocol, and TypeError for unknown options and wrong types: one line
    that names the option.
    """
    model = unwrapped(model)
    check_model(model)
    for key, value, known in (("attn", attn, ATTN), ("kernels", kernels, KERNELS)):
        typed_value(key, value, str, known[0])
        if value not in known:
            raise ValueError(f"{key}={value!r}: unknown; {suggestion(value, known)}")
    if isinstance(method, str) or (isinstance(method, type) and issubclass(method, Method)):
        made = make_method(method, BUDGET if budget is None else budget, dense_layers, protocol, options, model)
    elif isinstance(method, Method):
        given = {"budget": budget, "dense_layers": dense_layers, **options}
        if extra := [key for key, value in given.items() if value is not None]:
            raise TypeError(f"{extra[0]}: goes with a method's name; a {type(method).__name__} object has its own")
        made = method
    else:
        raise TypeError(f"method={method!r}: expected a name of pqcache.methods() or an object of a Method")
    made.check_model(model.config.get_text_config(decoder=True))
    if tokenizer is not None:
        made.know_tokenizer(tokenizer)
    if type(made).prepare is not Method.prepare:
        text = calibration if calibration is not None or tokenizer is None else _calibration_text(tokenizer)
        with _turn_of(model):
            made.prepare(model, text, None if cache_dir is None else Path(cache_dir).expanduser())
    return Session(model, made, attn, kernels)


def _turn_of(model: PreTrainedModel) -> Any:
    """The lock under which threads take turns: hooks and attention are the model's, and know one pass at a time."""
    with _MAKING:
        return _TURNS.setdefault(model, threading.RLock())


def _calibration_text(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Token ids (1, t) of plain sentences, the same in every run."""
    from pqcache.embedded.documents import filler_text

    return torch.tensor([tokenizer(filler_text(Random(0), CALIBRATION_WORDS), verbose=False)["input_ids"]])


class Session:
    """A model under a method; made by `use`. May be entered again after it was left.

    model, method, attn, kernels: what it was made of. Inside the block `model.generate` answers under the method, one call at a
    time, whatever thread it comes from, and so do loops of your own: `model(...)` without past_key_values begins with a new
    cache, which its output holds. Outside of the block the model is exactly as it was.
    """

    def __init__(self, model: PreTrainedModel, method: Method, attn: str = "auto", kernels: str = "torch") -> None:
        self.model, self.method, self.attn, self.kernels = model, method, attn, kernels
        self._stack: ExitStack | None = None
        self._last: Report | None = None
        self._turn = _turn_of(model)
        # cache -> the sequences that `generate` returned with it, (rows, columns); None after beam search
        self._seen: WeakKeyDictionary[SelectiveCache, torch.Tensor | None] = WeakKeyDictionary()

    # -- the block --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        attributes = self.model.__dict__
        with self._turn, ExitStack() as stack:
            before = attributes.get("generate")
            if isinstance(before, _Generate):
                raise RuntimeError(
                    f"the model is in a session already (method {before.session.method.name}): leave that block first"
                )
            stack.enter_context(attach(self.model))
            stack.callback(attributes.pop if before is None else attributes.__setitem__, "generate", before)
            attributes["generate"] = _Generate(self, self.model.generate)
            # a pass of a loop of one's own is a turn, too
            hooks = self.model.register_forward_pre_hook(self._before_pass, prepend=True, with_kwargs=True)
            stack.callback(hooks.remove)
            stack.callback(self.model.register_forward_hook(lambda *_: self._turn.release(), always_call=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:  # after the call of another thread
            stack, self._stack = self._stack, None
            if stack is not None:
                stack.close()

    def _before_pass(self, _: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A pass without a cache gets one of the method: without it, it would be full attention unnoticed."""
        kwargs = {**dict(zip(inspect.signature(self.model.forward).parameters, args, strict=False)), **kwargs}
        self._turn.acquire()  # the hook after the pass gives it back, also after an error
        check_cache(kwargs.get("past_key_values"), kwargs.get("use_cache"))
        if kwargs.get("past_key_values") is None:
            kwargs |= {"past_key_values": self.cache(), "use_cache": True}
        return (), kwargs

    def cache(self) -> SelectiveCache:
        """A new, empty cache of the method, to be passed as `past_key_values` to every call of a conversation or of your loop."""
        return SelectiveCache(self.model, self.method, attn=self.attn, kernels=self.kernels)

    # -- figures ----------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What the last call of `generate` did and cost. Raises RuntimeError before the first one.

        Of a loop of your own ask its cache: `resident_bytes()`, `content_by_tier()`, `ledger.attended(all_layers=False)`.
        """
        if self._last is None:
            raise RuntimeError(
                "no call of model.generate has ended in this session yet; of a loop of your own ask its cache, such as"
                " cache.content_by_tier()"
            )
        return self._last

    @property
    def bytes(self) -> dict[str, int]:
        """Tier -> bytes of the cache at the end of the last call of `generate`, over all layers and rows."""
        return dict(self.report().bytes)

    # -- generate ---------------------------------------------------------------------------------------------------

    def _generate(
        self, stock: Callable[..., Any], inputs: Any, config: GenerationConfig | None, rest: Sequence[Any], kwargs: dict
    ) -> Any:
        """The model's own `generate` with a cache of the method, and the report of it."""
        call = Call(self.model, inputs, config, kwargs)
        call.check(self.method)
        cache = kwargs.get("past_key_values")
        cache = self.cache() if cache is None else cache
        if cache.columns == 0:
            call.begin(cache)
        else:
            self._check_turn(cache, call)
        if call.inferred is not None:
            kwargs["attention_mask"] = call.inferred
        device = home(self.model)
        synchronize(device)
        start, past = time.perf_counter(), max(cache.past, default=0)
        try:
            out = stock(inputs, config, *rest, **{**kwargs, "past_key_values": cache})
            synchronize(device)
            seconds = time.perf_counter() - start
            sequences = out if isinstance(out, torch.Tensor) else out.sequences
            self._last = self._make_report(cache, call, sequences, past, seconds)
        finally:
            cache.lanes.close()  # the cache can be used again
        if call.beams > 1:
            self._seen[cache] = None
        elif call.ids is not None:
            self._seen[cache] = sequences.cpu()
        return out

    def _check_turn(self, cache: SelectiveCache, call: Call) -> None:
        """Refuse a conversation that does not go on from what its cache has seen."""
        if self._seen.get(cache, ...) is None:
            raise ValueError(
                "past_key_values: the rows of this cache are the beams of a search; start with a new session.cache()"
            )
        known = self._seen.get(cache)
        if call.ids is not None and known is not None:
            self._compare(cache, call, call.expand(call.ids).cpu(), known)
        if call.columns > cache.columns + 1:  # one token is a decode step
            cache.begin_turn(call.columns - cache.columns)

    @staticmethod
    def _compare(cache: SelectiveCache, call: Call, ids: torch.Tensor, known: torch.Tensor) -> None:
        """ids and known (rows, columns): what the call gives, and what the cache has seen and generated."""
        if ids.shape[1] <= cache.columns:
            if call.columns > cache.columns:
                return  # the new tokens alone, under a mask of all
            raise ValueError(
                f"input_ids: {ids.shape[1]} tokens, but this cache has seen {cache.columns}: pass the whole conversation"
            )
        seen = min(cache.columns, known.shape[1])
        if ids.shape[0] == known.shape[0] and not torch.equal(ids[:, :seen], known[:, :seen]):
            at = int((ids[:, :seen] != known[:, :seen]).any(0).nonzero()[0])
            raise ValueError(
                f"input_ids: token {at} is not the one that this cache has seen: go on from what generate returned, or"
                " start a new session.cache()"
            )

    def _make_report(
        self, cache: SelectiveCache, call: Call, sequences: torch.Tensor, past: int, seconds: float
    ) -> Report:
        cache.wait()
        ledger, shape = cache.ledger, cache.shape
        resident = cache.resident_bytes()
        ledger.note_resident(resident)
        new = sequences.shape[1] - (0 if call.ids is None else call.ids.shape[1])
        held = sum(cache.past)  # the last new token was never fed
        full = held * shape.n_layers * shape.token * self.model.dtype.itemsize
        return Report(
            method=self.method.name,
            budget=None if self.method.ignores_budget else str(self.method.budget),
            rows=len(cache.past),
            prompt_tokens=fmean(length - new + 1 for length in cache.past),
            new_tokens=new,
            attended_tokens=ledger.attended(all_layers=False),
            bytes=resident,
            content_bytes=cache.content_by_tier(),
            peak_bytes=dict(ledger.peak),
            bytes_per_step=ledger.bytes_per_step(),
            full_bytes=full,
            seconds=seconds,
        )


class _Generate:
    """What `model.generate` is inside a session: the model's own, with its signature and documentation."""

    def __init__(self, session: Session, stock: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock)
        self.session, self.stock = session, stock

    def __call__(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, *rest: Any, **kwargs: Any
    ) -> Any:
        with self.session._turn:
            if self.session._stack is None:
                raise RuntimeError("the session was left while this call waited for its turn")
            return self.session._generate(self.stock, inputs, generation_config, rest, kwargs)
