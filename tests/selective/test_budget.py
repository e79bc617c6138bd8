import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.selective import Budget, partition_plan


@pytest.mark.parametrize("value", [0, 0.0, 1.5, -3, "x", "0", True, None, 63, float("nan")])
def test_bad_values_are_refused_with_the_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match=r"budget=.*allowed is a ratio in \(0, 1\] or a number of tokens >= 64"):
        Budget.parse(value)  # type: ignore[arg-type]


def test_good_values() -> None:
    assert Budget.parse(0.2) == Budget.parse("0.2") == Budget(ratio=0.2)
    assert Budget.parse(1) == Budget.parse("1") == Budget.parse(1.0) == Budget(ratio=1.0)
    assert Budget.parse(512) == Budget.parse("512") == Budget(tokens=512)
    assert (str(Budget(ratio=0.2)), str(Budget(tokens=512))) == ("0.2", "512tok")


@given(s=st.integers(1, 40000), n_sink=st.integers(0, 64), recent=st.floats(0, 1))
def test_budget_one_loses_no_token(s: int, n_sink: int, recent: float) -> None:
    assert partition_plan(Budget(ratio=1.0), s, n_sink, recent).total == s


@given(s=st.integers(1, 40000), tokens=st.integers(64, 4096), n_sink=st.integers(0, 32), recent=st.floats(0, 1))
def test_token_budgets_include_the_sinks(s: int, tokens: int, n_sink: int, recent: float) -> None:
    assert partition_plan(Budget(tokens=tokens), s, n_sink, recent).total == min(s, tokens)
