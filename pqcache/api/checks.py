"""The checks of `pqcache.use` before a session begins: the model, the method's name and its options. One line per error."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedModel

from pqcache.fields import coerce, option_fields
from pqcache.naming import suggestion
from pqcache.registry import METHODS, is_known, method_class
from pqcache.selective import Budget, Method
from pqcache.selective.attach import attention_modules
from pqcache.selective.shape import served
from pqcache.selective.support import check_architecture

COMMON = frozenset(f.name for f in fields(Method))  # fields of every method: parameters of `use`


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside what PEFT (LoRA) or `torch.compile` has made of it; a model as it is.

    Its attention layers are the same objects, adapters included, so that the outer model runs under the method as well. Raises
    TypeError for anything else.
    """
    if isinstance(model, str):
        raise TypeError(
            f"model={model!r}: expected a loaded model, as AutoModelForCausalLM.from_pretrained({model!r}) returns"
        )
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if (compiled := getattr(inner, "_orig_mod", None)) is not None:
            inner = compiled
        elif callable(base := getattr(inner, "get_base_model", None)):
            inner = base()
        else:
            hint = "; pass its .model" if isinstance(getattr(inner, "model", None), PreTrainedModel) else ""
            raise TypeError(f"model of type {type(model).__name__}: expected a transformers PreTrainedModel{hint}")
    return inner


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that are not supported."""
    check_architecture(model.config)
    attention_modules(model)
    if not model.can_generate():
        raise TypeError(f"model of type {type(model).__name__}: cannot generate; load it with AutoModelForCausalLM")


def make_method(
    name: str | type[Method],
    budget: Any,
    dense_layers: int | None,
    protocol: str,
    options: dict[str, Any],
    model: PreTrainedModel,
) -> Method:
    """The method of a name or class. Raises one line that names the option: TypeError for its name or type, else ValueError."""
    if isinstance(name, str) and not is_known(name):
        raise ValueError(f"method={name!r}: unknown; {suggestion(name, METHODS)}")
    cls = method_class(name) if isinstance(name, str) else name
    allowed = {n: known for n, known in option_fields(cls).items() if n not in COMMON}
    typed = {}
    for key, value in options.items():
        if key not in allowed:
            known = [*allowed, "budget", "dense_layers", "protocol", "attn", "tokenizer", "calibration", "cache_dir"]
            raise TypeError(f"{key}: unknown option of method {cls.name}; {suggestion(key, known)}")
        kind, default = allowed[key]
        typed[key] = typed_value(key, value, kind, default)
    common = {
        "budget": Budget.parse(budget),
        "dense_layers": typed_value("dense_layers", dense_layers, int | None, None),
        "protocol": protocol,
    }
    method = cls(**typed, **common)
    layers = len(served(model.config.get_text_config(decoder=True)))
    if method.dense_layers is not None and method.dense_layers > layers:
        raise ValueError(f"dense_layers={method.dense_layers}: the model has {layers} layers that a method serves")
    return method


def typed_value(key: str, value: Any, kind: Any, default: Any) -> Any:
    try:
        return coerce(value, kind)
    except TypeError as expected:
        words = str(expected).replace("null", "None").replace("true or false", "True or False")
        raise TypeError(f"{key}={value!r}: expected {words} (default {default!r})") from None
    except ValueError as out_of_range:
        raise ValueError(f"{key}={value!r}: {out_of_range}") from None
