"""The metrics of LongBench v1: one answer against one gold text, 0..1. PocketBench uses them too.

As in the official evaluation: ROUGE by `rouge`, not `rouge_score`; rapidfuzz's ratio, which gives fuzzywuzzy's numbers;
class names removed from the list during the loop over it.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from pqcache.harness.tasks.sources import published_texts

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def contains(prediction: str, gold: str) -> float:
    """1 if the gold text is in the answer, regardless of case and white space."""
    return float(" ".join(gold.lower().split()) in " ".join(prediction.lower().split()))


def exact(prediction: str, gold: str) -> float:
    """1 if both texts have the same normalized words."""
    return float(normalized(prediction) == normalized(gold))


def qa_f1(prediction: str, gold: str) -> float:
    """F1 of the two bags of normalized words."""
    return _f1(normalized(prediction).split(), normalized(gold).split())


def qa_f1_zh(prediction: str, gold: str) -> float:
    """F1 of the two bags of words that jieba cuts the texts into, lower case, without punctuation and white space."""
    return _f1(_words_zh(prediction), _words_zh(gold))


@cache
def _jieba() -> tuple[Any, dict[int, None]]:
    """(jieba with its own dictionary, the punctuation to drop). jieba alone would take any dictionary of the machine's
    temporary folder, and log that it does.
    """
    import jieba

    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter, dict.fromkeys(map(ord, string.punctuation + published_texts("longbench")["punctuation_zh"]))


def _words_zh(text: str) -> list[str]:
    cutter, punctuation = _jieba()
    words = ("".join(word.lower().translate(punctuation).split()) for word in cutter.cut(text))
    return [word for word in words if word]


def _f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, gold: str) -> float:
    """ROUGE-L F of the package `rouge`; 0 where it refuses a text (empty, or one endless sentence)."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([prediction], [gold], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """1 / the number of class names in the answer, or 0 if the right one is not among them."""
    named = [name for name in classes if name in prediction]
    # Removing a name from the list in the loop skips the next one, as in the official code.
    for name in named:
        if name in gold and name != gold:
            named.remove(name)
    return 1.0 / len(named) if gold in named else 0.0


def count(prediction: str, gold: str) -> float:
    """Share of the answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return sum(number == gold for number in numbers) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, gold: str) -> float:
    """Share of the answer's numbers that are the paragraph's; gold is `Paragraph <number>`, in Chinese `段落<number>`."""
    return count(prediction, re.findall(r"(?:Paragraph |段落)(\d+)", gold)[0])


def code_similarity(prediction: str, gold: str) -> float:
    """Edit similarity, in whole percents, of the first line that is neither comment nor fence."""
    from rapidfuzz import fuzz

    lines = [x for x in prediction.lstrip("\n").split("\n") if not any(mark in x for mark in ("`", "#", "//"))]
    line = lines[0] if lines else ""
    if line == gold:
        return 1.0  # two empty lines, too
    return round(fuzz.ratio(line, gold)) / 100 if line and gold else 0.0


def exact_number(prediction: str, gold: str) -> float:
    """GSM8k's flexible exact match: 1 if the answer's last number is the right one."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", prediction)
    return float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == gold)
