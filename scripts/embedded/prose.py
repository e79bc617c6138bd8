"""English prose that ships with every Python: the language reference (`pydoc_data.topics`) and stdlib docstrings.

Used to train the tokenizer and as filler of training documents; needed at training time only.
"""

import ast
import pydoc_data.topics
import re
import sysconfig
from collections import Counter
from functools import lru_cache
from pathlib import Path

_SKIP_DIRS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_CODE_LIKE = re.compile(r"[=\\{}<>|_@#$%^&~`*]|\.\.\.|\(\)|::|--|\d\.\d")


def _docstrings() -> list[str]:
    """Docstrings of all stdlib modules, read by parsing (nothing is imported), in sorted file order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if _SKIP_DIRS & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts += filter(None, [ast.get_docstring(node)])
    return texts


def _is_prose(sentence: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in sentence)
    return len(sentence.split()) >= 4 and letters >= 0.9 * len(sentence) and not _CODE_LIKE.search(sentence)


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """All distinct prose sentences in a fixed order, whitespace collapsed, code-like ones left out."""
    texts = [pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)] + _docstrings()
    distinct: dict[str, None] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            flat = " ".join(paragraph.split()).replace('"', "")
            for sentence in re.split(r"(?<=[.?!:]) +", flat):
                if _is_prose(sentence):
                    distinct[sentence] = None
    return tuple(distinct)


@lru_cache(maxsize=1)
def word_counts() -> dict[str, int]:
    """Lower-case words of the prose (letters only) with how often each occurs."""
    return Counter(word for sentence in sentences() for word in re.findall(r"[a-z]+", sentence.lower()))
