"""Shared by the tests of the embedded model: its tokenizer and a maker of training rows, each made once."""

import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import load_tokenizer
from scripts.embedded.training_rows import RowMaker


@pytest.fixture(scope="session")
def tok() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="session")
def maker(tok: PreTrainedTokenizerBase) -> RowMaker:
    """Reads the prose of the standard library, which takes seconds."""
    return RowMaker(tok)
