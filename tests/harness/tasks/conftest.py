from typing import Any

import pytest

from pqcache.embedded import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded model's."""
    return load_tokenizer()
