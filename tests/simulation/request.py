"""One request of a model scheduler: its tokens, its row of pages and where it stands.

Owns the data of a request's life, not its steps. Lengths are counted in key units (tokens, or
pairs of them in a bigram namespace). The first `tree_pages` pages of a row belong to the tree.
"""

from __future__ import annotations

from enum import Enum

from directory.core.ids import NO_LEASE, LeaseId
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import pack_tokens
from tests.simulation.contents import Contents


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"  # is to be looked up
    MATCHING = "matching"  # what lies beyond the own pool is asked for
    RESTORING = "restoring"  # a mover writes into its target pages
    READY = "ready"  # waits to be admitted
    RUNNING = "running"  # computes
    ENDED = "ended"  # holds nothing


class ModelRequest:
    """A request. `attempt` moves on with every retract, so that late results find nobody."""

    def __init__(
        self,
        number: int,
        name: str,
        key: NamespaceKey,
        prompt: list[int],
        output: list[int],
        page_size: int,
    ) -> None:
        self.number = number
        self.name = name
        self.key = key
        self.page_size = page_size
        self.page_key = page_size * key.unit_bytes
        self.prompt = prompt
        self.output = output
        self.packed = pack_tokens(prompt + output, bigram=key.bigram, wide=key.wide)
        self.units = len(self.packed) // key.unit_bytes
        self.prompt_units = min(self.units, len(prompt))
        self.phase = Phase.WAITING
        self.attempt = 0
        self.losses = 0
        self.seq = 0
        self.row: list[int] = []
        self.tree_pages = 0
        self.node: Node | None = None
        self.receipt: LeaseId = NO_LEASE
        self.launched = 0
        self.computed = 0
        self.overshot = False
        self.aborting = False
        self.error = ""
        self._contents: list[int] | None = None
        self._root = 0

    @property
    def match_pages(self) -> int:
        """Whole pages of all but the prompt's last unit, which is always computed."""
        return max(0, self.prompt_units - 1) // self.page_size

    @property
    def match_tokens(self) -> bytes:
        """Packed tokens of `match_pages`."""
        return self.packed[: self.match_pages * self.page_key]

    @property
    def all_pages(self) -> int:
        """Pages of prompt and output, a partial last one included."""
        return -(-self.units // self.page_size)

    def contents(self, contents: Contents, root: int) -> list[int]:
        """What each whole page must hold."""
        if self._contents is None:
            self._root = root
            self._contents = contents.path(root, self.packed, self.page_key)
        return self._contents

    def written(
        self, contents: Contents, root: int, first: int, last: int
    ) -> list[tuple[int, int]]:
        """(place in the row, content) of the pages touched by computing units [first, last)."""
        whole = self.contents(contents, root)
        touched: list[tuple[int, int]] = []
        for at in range(first // self.page_size, -(-last // self.page_size)):
            if (at + 1) * self.page_size <= last:
                touched.append((at, whole[at]))
            else:
                above = whole[at - 1] if at else self._root
                start = at * self.page_key
                tail = self.packed[start : last * self.key.unit_bytes]
                touched.append((at, contents.page(above, tail)))
        return touched

    def start_over(self) -> None:
        """Forget what an attempt brought; what it held was released."""
        self.phase = Phase.WAITING
        self.attempt += 1
        self.launched = self.computed = 0
        self.overshot = False

    def __repr__(self) -> str:
        return (
            f"<{self.name} attempt {self.attempt} {self.phase.value}, row {self.row}, "
            f"{self.tree_pages} in the tree, {self.launched}/{self.units} units>"
        )
