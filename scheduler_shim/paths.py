"""A path as the key of a table: a namespace and packed tokens.

Owns how such keys are hashed and compared. Two are equal where all of their tokens are; but only
their number and the last ones are hashed, for hashing 131,072 tokens takes longer than matching
them across processes.
"""

from __future__ import annotations

from typing import Final

from directory.core.namespace import NamespaceKey

HASHED_BYTES: Final = 64


class TokenPath:
    """Immutable."""

    __slots__ = ("_hash", "key", "tokens")

    def __init__(self, key: NamespaceKey, tokens: bytes) -> None:
        self.key = key
        self.tokens = tokens
        self._hash = hash((key, len(tokens), tokens[-HASHED_BYTES:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenPath) and (
            self._hash == other._hash and self.key == other.key and self.tokens == other.tokens
        )

    def __repr__(self) -> str:
        return f"<TokenPath of {len(self.tokens)} bytes in {self.key}>"
