"""Full: the whole KV cache, kept and attended; the reference of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape


@dataclass(kw_only=True)
class Full(Method):
    """Keeps every token and attends to every token. Ignores the budget."""

    name: ClassVar[str] = "full"
    kind: ClassVar[str] = "keep all"
    ignores_budget: ClassVar[bool] = True
    serves_windows: ClassVar[bool] = True

    def published_ratio(self, tokens: int, shape: ModelShape) -> float:
        """The full cache is what the others are compared with."""
        return 1.0
