"""Shared by the tests of the embedded model: its tokenizer."""

import pytest
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import load_tokenizer
from pqcache.embedded.words import pseudo_words


def held_out(tok: PreTrainedTokenizerBase) -> set[str]:
    """The words that no text of the training has, in lower case."""
    words = pseudo_words(tok)
    return {word.lower() for word in words.names_eval + words.values_eval}


@pytest.fixture(scope="session")
def tok() -> PreTrainedTokenizerBase:
    return load_tokenizer()
