"""Deliberate bugs around the core: streams, client, copy engine, span words, processes.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from directory.core.actions import Action, AnyReply, SubmitCopy, Word
from directory.core.events import Live, Outcome, Request, Unlock
from directory.core.ids import POOL_WORD
from directory.core.place import PoolState
from directory.core.requests import Requests
from directory.protocol.stream import Arrival, ReceiveStream
from scheduler_shim.client import DaemonClient
from scheduler_shim.spans import SpanTable
from scheduler_shim.speaking import Speaker
from tests.simulation.daemon import Session, SimDaemon
from tests.simulation.mutants_seams import Call, Mutant, seam, swapped
from tests.simulation.process import Process
from tests.simulation.request import ModelRequest
from tests.simulation.restoring import Restoring
from tests.simulation.scheduler import ModelScheduler
from tests.simulation.simulation import Simulation
from transfer.copies import Copy, CopyState
from transfer.engine import Engine
from transfer.ipc.sync import WordTable

# Streams and client.


@seam(ReceiveStream, "arrive")
def arrive_again(original: Call) -> Call:
    def arrive(self: ReceiveStream, seq: int, answered: int) -> Arrival:
        arrival: Arrival = original(self, seq, answered)
        again = arrival is Arrival.DUPLICATE and seq == self.acked
        return Arrival.NEW if again else arrival

    return arrive


@seam(Speaker, "_push")
def push_a_release_once(original: Call) -> Call:
    def _push(self: Speaker, body: Request, *, asks: bool, hold: bool = False) -> int:
        unsent = self.counters.get("frames_not_sent", 0)
        seq: int = original(self, body, asks=asks, hold=hold)
        if isinstance(body, Unlock) and self.counters.get("frames_not_sent", 0) > unsent:
            # The socket was full: the release is forgotten and its number used again.
            del self._stream._open[seq]
            self._stream._last -= 1
        return seq

    return _push


@seam(Requests, "_live")
def live_without_effect(original: Call) -> Call:
    def _live(self: Requests, pool: PoolState, seq: int, body: Live) -> list[Action]:
        return self._report(pool, seq)

    return _live


@seam(DaemonClient, "_release_late")
def release_late_not_at_all(original: Call) -> Call:
    def _release_late(self: DaemonClient, body: AnyReply) -> None:
        """The receipt of an answer that came too late is thrown away with it."""

    return _release_late


# Fences.


@seam(ModelScheduler, "written")
def written_on_current_alone(original: Call) -> Call:
    def written(self: ModelScheduler) -> tuple[int, int]:
        return 0, original(self)[1]

    return written


@seam(Restoring, "quiet")
def quiet_at_once(original: Call) -> Call:
    def quiet(self: Restoring) -> tuple[int, int]:
        return 0, 0

    return quiet


@seam(Restoring, "quiet")
def quiet_on_current_alone(original: Call) -> Call:
    def quiet(self: Restoring) -> tuple[int, int]:
        return 0, original(self)[1]

    return quiet


# Words and copies.


@seam(Engine, "_settle")
def settle_unseen(original: Call) -> Call:
    def _settle(self: Engine, copy: Copy) -> None:
        with swapped(Engine, "_words_hold", lambda *_: True):
            original(self, copy)

    return _settle


@seam(Engine, "submit")
def submit_with_words_of_now(original: Call) -> Call:
    def submit(self: Engine, request: SubmitCopy) -> None:
        if all(self._pools.alive(word.pool) for word in request.words):
            now = [Word(w.pool, w.slot, self._pools.word(w.pool, w.slot)) for w in request.words]
            request = msgspec.structs.replace(request, words=tuple(now))
        original(self, request)

    return submit


@seam(Engine, "_lose")
def lose_at_once(original: Call) -> Call:
    def _lose(
        self: Engine, copy: Copy, outcome: Outcome, detail: str, *, broken: bool = False
    ) -> None:
        original(self, copy, outcome, detail, broken=broken)
        if copy.state is CopyState.DRAINING:
            self._report(copy)

    return _lose


@seam(Engine, "_report")
def report_the_first_time(original: Call) -> Call:
    def _report(self: Engine, copy: Copy) -> None:
        if copy.request.op in self._copies:
            original(self, copy)

    return _report


@seam(SpanTable, "give_up")
def give_up_behind_the_same_word(original: Call) -> Call:
    def give_up(self: SpanTable, slot: int, value: int, pages: int) -> None:
        original(self, slot, self.word(slot), pages)

    return give_up


@seam(SpanTable, "give_up_all")
def give_up_all_behind_the_same_word(original: Call) -> Call:
    def give_up_all(self: SpanTable) -> int:
        with swapped(WordTable, "bump_pool", lambda words: words.read(POOL_WORD)):
            value: int = original(self)
        return value

    return give_up_all


# Restores and processes.


@seam(Restoring, "release_row")
def release_row_and_targets(original: Call) -> Call:
    def release_row(self: Restoring, request: ModelRequest) -> None:
        seq = request.seq
        original(self, request)
        if seq in self.landing:
            targets, _, attempt, start = self.landing[seq]
            self.landing[seq] = (array("I"), request, attempt, start)
            self.free(targets)

    return release_row


@seam(Process, "look_for_loss")
def look_for_loss_without_quarantine(original: Call) -> Call:
    def look_for_loss(self: Process) -> bool:
        lost: bool = original(self)
        if lost:
            self.free(self.quarantined)
            self.quarantined = []
        return lost

    return look_for_loss


@seam(SimDaemon, "still_touched")
def still_touched_by_nobody(original: Call) -> Call:
    def still_touched(self: SimDaemon, session: Session) -> bool:
        return False

    return still_touched


@seam(Simulation, "movers_of_earlier_boots_live")
def movers_of_earlier_boots_forgotten(original: Call) -> Call:
    def movers_of_earlier_boots_live(self: Simulation) -> bool:
        return False

    return movers_of_earlier_boots_live


_WARM: Final = {"warm": 1.0, "damage": 0.0}
_RELEASES: Final = {"full": 0.2, "abort": 0.3}

EDGES: Final = (
    Mutant(
        "retry-applied-twice",
        "the message that was carried out last is carried out again when it comes again",
        (arrive_again,),
    ),
    Mutant(
        "lost-release-never-resent",
        "a release for which the socket was full is forgotten, and there is no live list",
        (push_a_release_once, live_without_effect),
        mode="mirrored",
        rates=_RELEASES,
    ),
    Mutant(
        "lost-release-left-to-the-live-list",
        "a release for which the socket was full is forgotten until the live list heals it",
        (push_a_release_once,),
        mode="mirrored",
        rates=_RELEASES,
    ),
    Mutant(
        "late-receipt-leaked",
        "the lease of an answer that came too late is not released",
        (release_late_not_at_all, live_without_effect),
        rates={"tight_deadlines": 0.5, "late": 0.1},
    ),
    Mutant(
        "source-fence-on-the-current-stream-only",
        "pages are published behind a fence of the current stream alone",
        (written_on_current_alone,),
    ),
    Mutant(
        "no-destination-fence",
        "restores do not wait until their target pages are quiet",
        (quiet_at_once,),
    ),
    Mutant(
        "destination-fence-on-the-current-stream-only",
        "restores wait for the current stream alone",
        (quiet_on_current_alone,),
    ),
    Mutant(
        "word-not-looked-at-after-the-copy",
        "words are compared before a copy only",
        (settle_unseen,),
    ),
    Mutant(
        "word-sampled-at-submission",
        "a copy is held to the words as they are when it is submitted, not as reported",
        (submit_with_words_of_now,),
    ),
    Mutant(
        "host-slot-reused-while-written",
        "a lost copy is reported before the device is done with its pages",
        (lose_at_once, report_the_first_time),
        rates={"copy_slow": 0.3},
    ),
    Mutant(
        "evict-without-a-bump",
        "span words stay as they are when pages are given up",
        (give_up_behind_the_same_word,),
    ),
    Mutant(
        "flush-without-a-bump",
        "the pool word stays as it is when the pool is flushed",
        (give_up_all_behind_the_same_word,),
        rates={"flush_pool": 5.0},
    ),
    Mutant(
        "target-freed-before-the-answer",
        "an aborted request frees the pages that its restore still writes into",
        (release_row_and_targets,),
        rates={"abort": 0.5, "copy_slow": 0.2},
    ),
    Mutant(
        "no-quarantine",
        "a scheduler that has lost its daemon uses the targets of its restores at once",
        (look_for_loss_without_quarantine,),
        rates={"daemon_restart": 3.0, "orphan": 0.2, "tight_deadlines": 0.5, "copy_slow": 0.3},
    ),
    Mutant(
        "registered-while-still-written",
        "a registration is answered before the mover has let go of the earlier generation",
        (still_touched_by_nobody,),
        rates={"tight_deadlines": 0.5, "copy_slow": 0.3},
    ),
    Mutant(
        "old-mover-writes-after-a-restart",
        "a boot takes the host tier while an earlier boot's mover still lives",
        (movers_of_earlier_boots_forgotten,),
        pins=_WARM,
        rates={"daemon_restart": 5.0, "orphan": 0.2, "copy_slow": 0.3},
    ),
)
