"""Whether hyper-parameters override a budget: a method that takes far more tokens than its budget gives.

    overriding(method, 2048)     "n_sink=2000: takes 2009 of a prompt's 2048 tokens; budget=0.2 gives 435"

What a budget gives is what it says, or what the method takes with its default hyper-parameters if that is more: sinks, windows
and rounding by a paper's rule override nothing.
"""

import contextlib
from dataclasses import replace
from statistics import fmean
from typing import Any

from pqcache.fields import option_fields
from pqcache.selective.method import Method

SLACK = 32  # tokens; below it is rounding, or a short prompt
LAYERS = 16  # how many layers a plan is asked for: those that differ between layers keep their mean


def overriding(method: Method, s: int) -> str | None:
    """One line if hyper-parameters override the budget for a prompt of `s` tokens: they are named first.

    They do if the method takes more than twice what the budget gives, or more than half of what it leaves out.
    """
    if method.ignores_budget or method.budget.is_everything:
        return None
    takes = planned(method, s)
    usual = _with_defaults(method)
    gives = max(method.budget.total(s), planned(usual, s) if usual is not None else 0)
    if takes <= max(gives + SLACK, min(2 * gives, (gives + s) / 2)):
        return None
    names = _responsible(method, usual, s, takes)
    options = ", ".join(f"{name}={value}" for name, value in names.items()) or method.name
    return f"{options}: takes {takes:.0f} of a prompt's {s} tokens; budget={method.budget} gives {gives:.0f}"


def planned(method: Method, s: int) -> float:
    """Tokens that a method plans for a prompt of `s` tokens: the mean of the layers that are not dense; 0 without a plan."""
    dense = method.dense_layers or 0
    plans = [method.plan(s, layer, dense + LAYERS) for layer in range(dense, dense + LAYERS)]
    return fmean(plan.total if plan is not None else 0 for plan in plans)


def _with_defaults(method: Method) -> Method | None:
    """The method at the same budget with its default hyper-parameters; None if they do not fit the budget."""
    with contextlib.suppress(ValueError):
        return type(method)(budget=method.budget, protocol=method.protocol)
    return None


def _responsible(method: Method, usual: Method | None, s: int, takes: float) -> dict[str, Any]:
    """The changed hyper-parameters without which the method takes fewer tokens; all changed ones if none does so alone."""
    defaults = {name: default for name, (_, default) in option_fields(type(method)).items()}
    own = method.hyper_parameters()
    before = usual.hyper_parameters() if usual is not None else defaults
    changed = {name: own[name] for name in defaults if name in own and own[name] != before[name]}
    alone = {}
    for name in changed:
        with contextlib.suppress(ValueError):
            if planned(replace(method, **{name: before[name]}), s) < takes:
                alone[name] = changed[name]
    return alone or changed
