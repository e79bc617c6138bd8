"""Options that a method refuses, in one line that names the option, its value and what is allowed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pqcache.outside import read_yaml
from pqcache.registry import method_class
from pqcache.selective import Budget, NotApplicable

FIFTH = {"budget": Budget(ratio=0.2)}
REFUSED = read_yaml(Path(__file__).with_name("refusals.yaml"))


def cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, refused in REFUSED.items():
        for options, *message in refused:
            last = "{}={}: .*allowed is".format(*next(iter(options.items())))
            given = {key: Budget.parse(x) if key == "budget" else x for key, x in options.items()}
            yield name, given, message[0] if message else last


@pytest.mark.parametrize(("name", "options", "message"), [*cases()])
def test_what_is_not_allowed_is_named(name: str, options: dict[str, Any], message: str) -> None:
    takes_bits = name in ("zipcache", "mikv")
    with pytest.raises(ValueError, match=message) as caught:
        method_class(name)(**(FIFTH if takes_bits else {}) | options)
    assert "\n" not in str(caught.value)
    no_code_or_room = any(part in message for part in ("no code", "budget=64", "window of", "or 1", "init tokens"))
    assert not no_code_or_room or isinstance(caught.value, NotApplicable)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi", {}, "group=32: allowed is a divisor of the head dimension 40"),
        ("kivi", {"group": 8}, None),
        ("kivi", {"bits": 16}, None),
        ("gear", {}, None),
        ("gear", {"backbone": "kivi"}, "group=64: allowed is a divisor of 80"),
        ("gear", {"backbone": "kivi", "bits": 16}, None),
        ("zipcache", {**FIFTH, "granularity": "group", "group": 7}, "group=7: allowed is a divisor of the head dim"),
        ("kvcrush_mixed", {"group": 32}, "group=32: allowed is a divisor of the head dimension 40"),
    ],
)
def test_groups_must_divide_the_heads(name: str, options: dict[str, Any], message: str | None) -> None:
    config = LlamaConfig(hidden_size=160, num_attention_heads=4, num_key_value_heads=2)  # head dimension 40
    method = method_class(name)(**options)
    if message is None:
        method.check_model(config)
        return
    with pytest.raises(ValueError, match=message):
        method.check_model(config)
