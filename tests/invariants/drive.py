"""What feeds tokens through a model: pqcache.api.drive."""

from pqcache.api.drive import VOCABULARY, Session, logits, pad_left, tokens

__all__ = ["VOCABULARY", "Session", "logits", "pad_left", "tokens"]
