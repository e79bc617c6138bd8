"""LongBench's metrics against values of the official evaluation."""

import importlib
import sys
import types
from unittest.mock import Mock

import pytest

from pqcache.harness.tasks import metrics
from tests.harness.cells import Patch


def test_normalization() -> None:
    assert metrics.normalized("The U.S.-led  A-team, an 'apple' & the\tend.") == "usled ateam apple end"


def test_qa_f1() -> None:
    assert metrics.qa_f1("The red cat.", "red cat") == 1.0
    assert metrics.qa_f1("red red dog", "red cat") == pytest.approx(0.4)  # P = 1/3, R = 1/2
    assert metrics.qa_f1("", "cat") == metrics.qa_f1("dog", "cat") == 0.0


@pytest.mark.rest
def test_chinese_metrics_are_lm_evals(monkeypatch: Patch) -> None:
    fuzzywuzzy = types.ModuleType("fuzzywuzzy")  # of its code metric, which is not compared
    fuzzywuzzy.fuzz = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fuzzywuzzy", fuzzywuzzy)
    theirs = importlib.import_module("lm_eval.tasks.longbench.metrics")
    texts = ["厦门大学。", "在厦门大学举办的。", "6.5亿元。", "约６.５亿元", "郗鉴拒绝了外戚庾亮废王导的建议。", "“庾亮”的 建议",
             "《长生殿》、iPhone\t和IPHONE", "人民币57081.86元", "……", ""]  # fmt: skip
    values = {(a, b): metrics.qa_f1_zh(a, b) for a in texts for b in texts}
    assert values == {(a, b): theirs.qa_f1_zh_score(a, b) for a in texts for b in texts}
    assert values[texts[0], texts[0]] == 1.0 and 0 < values[texts[1], texts[0]] < 1 and values[texts[0], texts[2]] == 0
    assert metrics.retrieval("段落12", "段落12") == 1.0
    for answer in ("段落12", "12", "段落1和段落12", "段落", "段落3"):
        assert metrics.retrieval(answer, "段落12") == theirs.retrieval_zh_score(answer, "段落12")


def test_rouge_l() -> None:
    assert metrics.rouge_l("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(0.999999995)
    assert metrics.rouge_l("", "a b") == metrics.rouge_l(".", "a b") == 0.0
    assert metrics.rouge_l("A b", "a b") == pytest.approx(0.5)  # case counts
    assert metrics.rouge_l("a b. ", "a b c") == pytest.approx(0.667, abs=1e-3)


def test_a_sentence_too_long_for_the_package_scores_nothing(monkeypatch: Patch) -> None:
    # what `rouge` ends in for two sentences of some 1500 words
    monkeypatch.setattr("rouge.Rouge.get_scores", Mock(side_effect=RecursionError))
    assert metrics.rouge_l("a b", "a b") == 0.0


def test_classification() -> None:
    classes = ["Food", "Food and drink", "Animal"]
    assert metrics.classification("Animal", "Animal", classes) == 1.0
    assert metrics.classification("Animal Food", "Animal", classes) == 0.5
    assert metrics.classification("Food and drink", "Food and drink", classes) == 1.0  # "Food" is part of the right one
    assert metrics.classification("nothing", "Animal", classes) == 0.0
    # a class right after a removed one is skipped, as in the official code
    assert metrics.classification("a b c", "a b c", ["a", "b", "a b c"]) == 0.5


def test_numbers() -> None:
    assert metrics.count("There are 5 of 12", "5") == 0.5
    assert metrics.count("5.0", "5") == 0.5
    assert metrics.count("none", "5") == 0.0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert metrics.retrieval("1 and 12", "Paragraph 12") == 0.5
    assert metrics.exact_number("from 3 to 1,234.", "1234") == 1.0
    assert metrics.exact_number("1234 then 5", "1234") == metrics.exact_number("", "1234") == 0.0


def test_code_similarity_takes_the_first_line_that_is_code() -> None:
    assert metrics.code_similarity("\n\n# a comment\nreturn x\nreturn y", "return x") == 1.0
    assert metrics.code_similarity("# only a comment", "return x") == 0.0
    assert metrics.code_similarity("abcd", "abxd") == 0.75
    assert metrics.code_similarity("", "x") == metrics.code_similarity("x", "") == 0.0
    assert metrics.code_similarity("# only a comment", "") == 1.0  # as fuzzywuzzy: two equal lines, empty or not
