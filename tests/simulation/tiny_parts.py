"""What the tiny node is made of: its sizes, its moves and its schedulers.

Owns data only; `tiny` lets the moves happen. A move is named by places in lists, never by an id,
so that it means the same in every state that differs in names only.
"""

from __future__ import annotations

from typing import NamedTuple

from directory.core.events import Mode, Outcome
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_tokens

MODES: tuple[Mode, Mode] = ("mirrored", "thin")
POOLS = len(MODES)
PAGES = 2
HOST_PAGES = 2
KEYS = (pack_tokens([1]), pack_tokens([1, 2]), pack_tokens([1, 3]))
KEY = NamespaceKey()
PATHS_BYTES = 4
OUTCOMES: dict[str, Outcome] = {"ok": "ok", "void": "void", "failed": "failed"}


WHATS = (
    "register",
    "close",
    "match",
    "insert",
    "evict",
    "flush_pool",
    "unlock",
    "restore",
    "ok",
    "void",
    "failed",
    "mover_lost",
    "flush_host",
)
SIDE = 16
"""More schedulers, copies and keys than there ever are."""


class Move(NamedTuple):
    """One thing that can happen. `who`: a scheduler or a copy, by its place in a list."""

    what: str
    who: int = 0
    which: int = 0

    def code(self) -> int:
        """The move as a number of 16 bits."""
        return (WHATS.index(self.what) * SIDE + self.who) * SIDE + self.which


def move_of(code: int) -> Move:
    """The move of a code."""
    rest, which = divmod(code, SIDE)
    what, who = divmod(rest, SIDE)
    return Move(WHATS[what], who, which)


class Broken(AssertionError):
    """An invariant does not hold."""


class Scheduler:
    """A scheduler: its pages and what they hold, its words, its lease and its restore."""

    __slots__ = (
        "beyond",
        "content",
        "free",
        "held",
        "key",
        "mode",
        "own",
        "pool",
        "receipt",
        "restore",
        "seq",
        "span_of",
        "words",
    )

    def __init__(self, pool: int, mode: Mode) -> None:
        self.pool = pool
        self.mode = mode
        self.seq = 0
        self.free = list(range(PAGES))
        self.held: dict[int, bytes] = {}  # page -> path, of pages in the tree
        self.content: dict[int, bytes] = {}
        self.words = [0] * (PAGES + 1)
        self.span_of: dict[int, int] = {}
        self.receipt = 0
        self.key = b""
        self.own = 0
        self.beyond = 0
        self.restore: tuple[bytes, int, list[int]] | None = None
