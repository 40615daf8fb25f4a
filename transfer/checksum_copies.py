"""Checksums and copies: what a backup leaves behind, and what a load back is compared with.

Owns, for each copy, the units of the host tier that it touches. A backup's are without a checksum
from before its first byte until it has landed. A load's are compared *after* they were copied: what
was damaged before or meanwhile is seen then. It computes a bounded amount at a time and decides
nothing: the engine lands or loses the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from directory.core.actions import SubmitCopy
from directory.core.ids import HOST, PoolId
from directory.core.limits import MIB
from transfer.checksum import (
    DAMAGED,
    NONE,
    Form,
    Hash,
    SumTable,
    Units,
    digest,
    form_of,
    slot_of,
    units_of,
)
from transfer.host_tier import HostTierMemory
from transfer.layout import PoolLayout
from transfer.plan import Shard

STEP_BYTES: Final = 4 * MIB
"""Computed in one step, and a unit more: at some GB/s that is about a millisecond."""


class Check:
    """What is still to be computed for one copy. `damaged`: slots that differ; `unknown`: units
    of a load that have no checksum, and are believed."""

    __slots__ = ("damaged", "fill", "form", "found", "todo", "unknown")

    def __init__(self, fill: bool, form: Form, runs: list[Units]) -> None:
        self.fill = fill
        self.form = form
        self.todo = deque(runs)
        self.found: list[tuple[Units, list[int]]] = []
        self.damaged: list[int] = []
        self.unknown = 0

    @property
    def done(self) -> bool:
        """Whether everything was computed."""
        return not self.todo

    def __repr__(self) -> str:
        kind = "fill" if self.fill else "load"
        return f"<Check of a {kind}, {len(self.todo)} runs to do, {len(self.damaged)} damaged>"


class Verdict(NamedTuple):
    """Of one step's units: how many are as they were, have no checksum, and those that differ."""

    good: int
    unknown: int
    damaged: list[int]


class Checksums:
    """The checksums of a host tier, as one mover keeps them. `verify`: loads are compared."""

    def __init__(
        self, table: SumTable, tier: HostTierMemory, hash_of: Hash, *, verify: bool
    ) -> None:
        self.table = table
        self.tier = tier
        self.hash_of = hash_of
        self.verify = verify

    def begin(self, request: SubmitCopy, layouts: Mapping[PoolId, PoolLayout]) -> Check | None:
        """A copy is about to be submitted; returns what it has to compute before it lands.

        Raises `TransferError` where a backup must not begin.
        """
        shard = Shard(request.slot_bytes, request.shard_offset)
        for part in request.parts:
            if HOST not in (part.source, part.target) or not part.source_pages:
                continue
            fill = part.target == HOST
            pool = part.source if fill else part.target
            form = form_of(shard, layouts[pool].page_bytes)
            if fill:  # a backup has this one part
                runs = [
                    run for run in units_of(part, form, shard.offset) if self.table.begin(run, form)
                ]
                return Check(True, form, runs) if runs else None
            if self.verify:
                # All parts of a load are of one pool, so of one form.
                loads = [p for p in request.parts if p.source == HOST and p.source_pages]
                return Check(
                    False, form, [run for p in loads for run in units_of(p, form, shard.offset)]
                )
        return None

    def advance(self, check: Check, nbytes: int = STEP_BYTES) -> None:
        """Compute some more; at least one unit."""
        left = max(1, nbytes // check.form.unit_bytes)
        while check.todo and left > 0:
            run = check.todo.popleft()
            if run.length > left:
                check.todo.appendleft(Units(run.segment, run.first + left, run.length - left))
                run = run._replace(length=left)
            left -= run.length
            if check.fill:
                check.found.append((run, digest(self.hash_of, self.tier, run, check.form)))
                continue
            verdict = self.judge(run, check.form)
            check.unknown += verdict.unknown
            check.damaged += verdict.damaged

    def judge(self, run: Units, form: Form) -> Verdict:
        """Compare units that nothing is being copied into with their entries.

        Those that differ are marked, so that they differ from now on whatever becomes of them.
        """
        entries = list(self.table.read(run))
        if not any(entries) or self.table.form(run.segment) != form:
            return Verdict(0, run.length, [])
        now = digest(self.hash_of, self.tier, run, form)
        again = self.table.read(run)
        good, unknown = 0, 0
        damaged: list[int] = []
        for at, (entry, found) in enumerate(zip(entries, now, strict=True)):
            if entry == NONE or again[at] != entry:
                unknown += 1  # without a checksum, or another process has begun to write there
            elif entry == found:
                good += 1
            else:
                unit = run.first + at
                self.table.write(Units(run.segment, unit, 1), [DAMAGED])
                damaged.append(slot_of(run.segment, unit, form))
        return Verdict(good, unknown, damaged)

    def commit(self, check: Check) -> None:
        """A backup has landed: keep what was computed of it."""
        for run, entries in check.found:
            self.table.write(run, entries)

    def close(self) -> None:
        """Close the table."""
        self.table.close()

    def __repr__(self) -> str:
        return f"<Checksums of {self.tier!r}, {'verified' if self.verify else 'kept'}>"
