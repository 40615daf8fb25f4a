"""Landings: what a mover has brought is inserted into the own tree, as evictable, or freed.

Owns the row that is being inserted, because the daemon may be lost in the middle of it. It must
never insert behind a path that does not stand any more.
"""

from __future__ import annotations

from directory.core.ids import NO_LEASE
from scheduler_shim.fills import Fill
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.sglang.waiting import Around


class Landings:
    """Inserts of one engine; mutated by its scheduler's thread alone."""

    def __init__(self, around: Around) -> None:
        self.rows: list[Request] = []
        """The row that is being inserted, if one is."""
        self._around = around

    def insert(self, fill: Fill, requests: list[Request]) -> bool:
        """Insert a fill's targets, and free what the tree has already; False: all were freed.

        `requests`: those that waited for it.
        """
        around, tree = self._around, self._around.room.tree
        if isinstance(tree, MirroredTree):
            row = fill.orphan(tree.mirror)
        else:
            row = self._lead(fill, requests)
        if row is None:
            around.count("landings_freed", len(fill.targets))
            around.room.free(fill.targets)
            return False
        self.rows.append(row)
        try:
            # A mover has written it, and that was over before its answer was sent. (Ranks of a
            # group would each say a time of their own here, and their reports are compared.)
            done = around.publish(row, len(row.row), around.pool.now(), keep=False)
            if done is None:
                around.room.free(fill.targets)
            else:
                around.count("duplicates_freed", around.room.free(done.duplicates))
                around.look_for_loss()
        finally:
            self.rows.clear()
            around.room.tree.release(row)  # a loss in the middle may have protected it
        return done is not None

    def _lead(self, fill: Fill, requests: list[Request]) -> Request | None:
        """Thin: a row for the landing, whose first pages some request's lease protects."""
        for request in requests:
            if request.receipt != NO_LEASE and fill.agreeing_pages(request) > fill.start:
                row = Request(0, fill.name, fill.key, fill.tokens, b"", fill.page_key)
                row.row = request.row[: fill.start] + fill.targets
                row.tree_pages = fill.start
                return row
        return None

    def __repr__(self) -> str:
        return f"<Landings {self.rows}>"
