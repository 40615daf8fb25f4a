"""The copy engine: when a copy may start, in which order slices go, and whether it counts.

Owns the copies under way and the imported pools. Every copy ends in exactly one `CopyDone`, and
only after nothing touches its pages any more. It never blocks and reads no clock of its own: the
mover calls `step` and hands in the time. It must never submit before all fences have passed and
the words are as reported, and never call a copy "ok" before it has looked at the words again.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from directory.core.actions import SubmitCopy
from directory.core.errors import TransferError
from directory.core.events import CopyDone, Outcome, PagesDamaged
from directory.core.ids import HOST, PoolId
from transfer.checksum import packed_slots
from transfer.checksum_copies import Checksums
from transfer.copies import Copy, CopyState, CopyStep
from transfer.device.protocol import Device, PageDevice, Ticket
from transfer.engine_limits import EngineLimits
from transfer.fence import describe_fence, describe_word, mismatched, pending
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool, devices_of, slab_for, translated
from transfer.ipc.marks import mark
from transfer.lanes import FASTEST, Lanes
from transfer.open_pools import OpenPools
from transfer.slicing import Slicer
from transfer.submissions import Submissions


class PoolReleased(NamedTuple):
    """A pool is unmapped. `detail`: what could not be closed (empty: everything was)."""

    pool: PoolId
    detail: str = ""


EngineEvent = CopyDone | PoolReleased | PagesDamaged


class Engine:
    """Runs copies on one device."""

    def __init__(
        self,
        device: Device,
        clock_us: Callable[[], int],
        limits: EngineLimits | None = None,
        computing: Callable[[], bool] = lambda: True,
        links: Collection[str] = (),
    ) -> None:
        """`computing`: whether the GPU has computed lately; `links`: GPUs behind its fast links."""
        self._device, self._clock_us, self._links = device, clock_us, links
        self._limits = limits or EngineLimits()
        self._tier: HostTierMemory | None = None
        self._segments_attached = 0
        self._pools = OpenPools(device)
        self._copies: dict[int, Copy] = {}  # by op; until their CopyDone
        self._fenced: dict[int, Copy] = {}
        self._staged: dict[int, Copy] = {}  # started, by way of a slab
        pages = device if isinstance(device, PageDevice) else None
        self._submit: Callable[..., Ticket] = (
            pages.submit_pages if pages else lambda s, urgent, **_: device.submit(s, urgent=urgent)
        )
        self._slicer = Slicer(self._limits.sizes, whole_pages=pages is not None)
        # Copies that are READY, or RUNNING with slices left, in order.
        self._lanes = Lanes(*self._limits.bounds, computing)
        self._submissions = Submissions(self._limits.device_deadline_us)
        self._sums: Checksums | None = None
        self._checking: list[Copy] = []  # copied, but for their checksums
        self._events: list[EngineEvent] = []

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do until something is submitted or released."""
        return not self._copies and not self._pools.leaving and not self._events

    @property
    def only_fences(self) -> bool:
        """Whether all copies wait for fences, or for their schedulers to pack and unpack, so that
        there is nothing to do but to look again."""
        parked = sum(copy.parked for copy in self._staged.values())
        return not self._events and len(self._fenced) + parked == len(self._copies)

    @property
    def pool_count(self) -> int:
        """Pools that are mapped, those being released included."""
        return len(self._pools)

    def open_tier(self, tier: HostTierMemory) -> None:
        """Use a host tier, or those of its segments that were opened since the last call."""
        if self._tier is not None and self._tier is not tier:
            raise TransferError("there is a host tier already")
        first = self._segments_attached
        for number, mapping in enumerate(tier.segments[first:], first):
            self._device.attach((HOST, number), mapping)
            self._segments_attached = number + 1
        self._tier = tier

    def use_checksums(self, sums: Checksums) -> None:
        """Keep checksums of what is backed up from now on, and compare loads with them."""
        self._sums = sums

    def add_pool(self, pool: ImportedPool) -> None:
        """Use a pool from now on; the engine closes it. Raises `TransferError`: still yours."""
        self._pools.take(pool, self._limits.stage_bytes)

    def release_pool(self, pool: PoolId) -> None:
        """Lose every copy that involves the pool; unmap it once none touches it any more.

        Ends in `PoolReleased`, also for a pool that is not here.
        """
        if pool not in self._pools:
            self._events.append(PoolReleased(pool))
            return
        self._pools.leaving.add(pool)
        for copy in [c for c in self._copies.values() if pool in c.pools]:
            self._lose(copy, "void", f"pool {pool} was released")
            if copy.staged is not None and copy.staged.slab.pool == pool:
                self._abandon(copy)  # its owner may be dead, and touches nothing but its own

    def submit(self, request: SubmitCopy) -> None:
        """Take a copy. Raises `TransferError` for a full queue, and the copy is not taken.

        An op that is under way already is lost with its first copy: the two have one end, and
        that comes only when nothing is in flight.
        """
        under_way = self._copies.get(request.op)
        if under_way is not None:
            self._lose(under_way, "failed", f"copy {request.op} was submitted twice")
            return
        if len(self._copies) >= self._limits.copies_max:
            raise TransferError(f"there are {len(self._copies)} copies under way already")
        copy = Copy(request, self._clock_us() + self._limits.fence_deadline_us)
        self._copies[request.op] = copy
        self._fenced[request.op] = copy
        mark("taken", request.op, request.kind)
        gone = [pool for pool in copy.pools if not self._pools.alive(pool)]
        if gone:
            self._lose(copy, "void", f"pool {min(gone)} is not imported (any more)")

    def step(self) -> list[EngineEvent]:
        """Do what can be done now, in bounded time; returns what has ended."""
        self._collect()
        self._look_at_slabs()
        self._look_at_fences()
        self._submit_slices()
        self._compute_sums()
        self._finish_releases()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Unmap all pools and let go of the tier; only when nothing is in flight."""
        for pool in list(self._pools):
            self.release_pool(pool)
        self._finish_releases()
        for number in range(self._segments_attached):
            self._device.detach((HOST, number))
        self._segments_attached = 0
        self._tier = None

    def __repr__(self) -> str:
        return (
            f"<Engine on {self._device.name}: {len(self._pools)} pools, {len(self._copies)} "
            f"copies, {len(self._fenced)} fenced>"
        )

    # The parts of a step, in order.

    def _collect(self) -> None:
        done, now = self._device.poll(), self._clock_us()
        for ticket, error in done:
            copy = self._submissions.end(ticket)
            self._lanes.ended(copy, ticket, now)
            landed = not error if copy.staged is None else copy.staged.moved(ticket, error)
            if error and copy.state is CopyState.RUNNING:
                self._lose(copy, "failed", f"the device failed: {error}", broken=True)
                continue
            if copy.progress is not None and landed:
                copy.progress.done(ticket)
                self._tell_landed(copy)
            if not copy.busy:
                self._settle(copy)
        self._lanes.looked(now)
        self._submissions.watch(self._clock_us())

    def _look_at_slabs(self) -> None:
        """See what schedulers have packed and unpacked; let those go on that waited for it."""
        now = self._clock_us()
        for copy in list(self._staged.values()):
            staged = copy.staged
            assert staged is not None
            moved, landed = staged.look(now, parked=copy.parked)
            for ticket in landed:
                if copy.progress is not None:
                    copy.progress.done(ticket)
            late = staged.waited_us(now) >= self._limits.fence_deadline_us
            if staged.error or late:
                self._lose(copy, "failed", staged.error or f"its scheduler is late: {staged!r}")
                if late and copy.request.kind == "backup":  # what is open is its owner's alone
                    self._abandon(copy)
            elif copy.state is CopyState.RUNNING:
                told = not landed or self._tell_landed(copy)
                if told and copy.more is None:
                    copy.more = staged.next_slice()
                    if copy.more is not None:
                        self._lanes.add(copy)
            if moved and not copy.busy:
                self._settle(copy)

    def _look_at_fences(self) -> None:
        for copy in list(self._fenced.values()):
            try:
                copy.fences = pending(copy.fences, self._pools.timeline)
            except TransferError as error:
                self._lose(copy, "failed", str(error))
                continue
            if not copy.fences:
                copy.step(CopyStep.PASS)
                mark("fenced", copy.request.op)
                del self._fenced[copy.request.op]
                copy.lies_at(devices_of(copy.request, self._pools), self._device.name, self._links)
                self._lanes.add(copy)
            elif self._clock_us() >= copy.deadline_us:
                fence = copy.fences[0]
                stand = describe_fence(fence, self._pools.timeline(fence.pool, fence.timeline))
                self._lose(copy, "failed", f"fence timeout: {stand}")

    def _submit_slices(self) -> None:
        for copy in self._lanes.ready(self._clock_us):
            # The words are read before every slice, not only before the first: once a word has
            # moved on, the rest of the copy is wasted work.
            if not self._words_hold(copy):
                continue
            begins = copy.state is CopyState.READY
            if begins and self._lanes.begins_later(copy, self._staged.values(), self._clock_us()):
                break
            if begins and not self._start(copy):
                continue
            if copy.more is not None:
                turn = self._lanes.turn(copy, self._clock_us())
                self._slicer.shorten(copy, turn)
                try:
                    how = {"calm": turn in FASTEST, "beside": copy.staged is not None}
                    ticket = self._submit(copy.more, urgent=copy.urgent, **how)
                except TransferError as error:
                    self._lose(copy, "failed", str(error), broken=True)
                    continue
                now = self._clock_us()
                self._submissions.add(ticket, copy, now)
                if copy.staged is not None:
                    copy.staged.submitted(ticket)
                if copy.progress is not None:
                    copy.progress.submitted(ticket)
                nbytes = sum(batch.nbytes for batch in copy.more)
                self._lanes.submitted(copy, ticket, nbytes, now, turn)
                copy.nbytes += nbytes
                mark("slice", copy.request.op, nbytes)
                copy.more = copy.next_slice()
            if copy.more is None:
                self._lanes.discard(copy)
                if not copy.busy:  # there was nothing to copy
                    self._settle(copy)
                if begins and copy.staged is not None:
                    break  # what was packed meanwhile goes before another copy begins

    def _finish_releases(self) -> None:
        for pool in sorted(self._pools.leaving):
            if not any(pool in copy.pools for copy in self._copies.values()):
                self._slicer.forget(pool)
                self._events.append(PoolReleased(pool, self._pools.leave(pool)))

    # Steps of one copy.

    def _start(self, copy: Copy) -> bool:
        try:
            tier = self._tier.shape if self._tier is not None else None
            # Only now do names stand for pages: the fences have passed, the words hold.
            parts = [translated(part, self._pools) for part in copy.request.parts]
            given = copy.request, parts, self._pools.layouts, tier
            slab = slab_for(parts, self._pools, self._limits.stage_chunks_min)
            if slab is not None:
                copy.staged, copy.progress = self._slicer.staged(*given, slab)
                self._staged[copy.request.op] = copy
            else:
                copy.slices, copy.progress = self._slicer.slices(
                    *given, near=copy.near, local=copy.local
                )
            if self._sums is not None:
                copy.check = self._sums.begin(copy.request, self._pools.layouts)
        except TransferError as error:
            self._lose(copy, "failed", str(error))
            return False
        if not self._tell_landed(copy):
            return False
        copy.more = copy.next_slice()
        mark("started", copy.request.op)
        copy.started_us = self._clock_us()
        copy.step(CopyStep.START)
        return True

    def _tell_landed(self, copy: Copy) -> bool:
        """Let the landing counter of a copy that is not lost say what has landed.

        False when it is lost now: the counter's owner, or somebody before it, has moved the
        counter on, so nobody waits for this load any more.
        """
        landing, progress = copy.request.landing, copy.progress
        if landing is None or progress is None or copy.state is CopyState.DRAINING:
            return True
        table = self._pools[landing.pool].landings
        try:
            if progress.tell(table, landing, hold=not copy.checked):
                mark("landed", copy.request.op, progress.told)
        except TransferError as error:
            self._lose(copy, "failed", str(error))
            return False
        return True

    def _settle(self, copy: Copy) -> None:
        """Nothing of the copy is in flight: end it, unless slices are still to come."""
        if copy.state is CopyState.RUNNING and copy.whole:
            if not copy.checked:
                self._checking.append(copy)
            elif self._tell_landed(copy) and self._words_hold(copy):
                if self._sums is not None and copy.check is not None and copy.check.fill:
                    self._sums.commit(copy.check)
                copy.step(CopyStep.LAND)
                self._report(copy)
        elif copy.state is CopyState.DRAINING:
            copy.step(CopyStep.DRAIN)
            self._report(copy)

    def _compute_sums(self) -> None:
        """Compute some of the checksums that copies wait for, loads before backups."""
        if self._sums is None or not self._checking:
            return
        copy = next((copy for copy in self._checking if copy.urgent), self._checking[0])
        assert copy.check is not None, "nothing else waits here"
        self._sums.advance(copy.check)
        if copy.check.damaged:
            self._events.append(PagesDamaged(packed_slots(copy.check.damaged), copy.request.kind))
            found = f"{len(copy.check.damaged)} host pages differ from their checksums"
            self._lose(copy, "failed", found)
        elif copy.check.done:
            self._checking.remove(copy)
            self._settle(copy)

    def _words_hold(self, copy: Copy) -> bool:
        """Whether the words are as reported; otherwise the copy is lost."""
        try:
            moved = mismatched(copy.request.words, self._pools.word)
        except TransferError as error:
            self._lose(copy, "failed", str(error))
            return False
        if moved:
            word = moved[0]
            self._lose(copy, "void", describe_word(word, self._pools.word(word.pool, word.slot)))
        return not moved

    def _lose(self, copy: Copy, outcome: Outcome, detail: str, *, broken: bool = False) -> None:
        """Give a copy up; it is reported once nothing of it is in flight.

        `broken`: it is the device that failed, not this copy.
        """
        if copy.state is CopyState.DRAINING:
            return
        copy.outcome, copy.detail, copy.broken = outcome, detail, broken
        if copy.state is CopyState.RUNNING:
            self._leave_lane(copy)
            copy.step(CopyStep.LOSE)
            if not copy.busy:
                self._settle(copy)
            return
        self._leave_lane(copy)
        copy.step(CopyStep.DROP)
        self._report(copy)

    def _abandon(self, copy: Copy) -> None:
        """Wait no longer for the scheduler of a lost copy that goes through its slab."""
        assert copy.staged is not None
        copy.staged.abandon()
        if copy.state is CopyState.DRAINING and not copy.busy:
            self._settle(copy)

    def _leave_lane(self, copy: Copy) -> None:
        copy.more = None
        if copy.staged is not None:
            copy.staged.lose()
        self._fenced.pop(copy.request.op, None)
        if copy in self._checking:
            self._checking.remove(copy)
        self._lanes.discard(copy)

    def _report(self, copy: Copy) -> None:
        del self._copies[copy.request.op]
        self._staged.pop(copy.request.op, None)
        mark("done", copy.request.op, copy.outcome, copy.nbytes)
        self._events.append(copy.done(self._clock_us()))
