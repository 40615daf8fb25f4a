"""Deliberate bugs of wire and groups: what is kept, said in portions, outlives a boot, is shared.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from directory.core import transfers
from directory.core.actions import Action, AnyReply, CopyPart, Matched, SubmitCopy
from directory.core.copies import Copy, Guard
from directory.core.events import Evicted, Flush, Live, Request
from directory.core.group import GroupLog
from directory.core.ids import PoolId
from directory.core.place import PoolState
from directory.core.requests import Requests
from directory.protocol import endpoint
from directory.protocol.codec import decode_envelope
from directory.protocol.endpoint import Endpoint
from directory.protocol.messages import Envelope
from directory.protocol.stream import ReceiveStream
from scheduler_shim.leases import LeasesOut
from scheduler_shim.mirror import GivenUpPages, Mirror
from tests.simulation.mutants_seams import Call, Mutant, seam, swapped


@seam(Endpoint, "take")
def take_from_any_epoch(original: Call) -> Call:
    def take(self: Endpoint, identity: bytes, *frames: bytes) -> None:
        def decode_any(frame: bytes) -> Envelope:
            return msgspec.structs.replace(decode_envelope(frame), epoch=self.epoch)

        with swapped(endpoint, "decode_envelope", decode_any):
            original(self, identity, *frames)

    return take


@seam(ReceiveStream, "gone")
def gone_never(original: Call) -> Call:
    def gone(self: ReceiveStream, seq: int) -> bool:
        return False

    return gone


@seam(ReceiveStream, "awaits")
def awaits_nothing(original: Call) -> Call:
    def awaits(self: ReceiveStream, seq: int) -> None:
        """A restore that has not ended looks like one whose answer was dropped."""

    return awaits


@seam(LeasesOut, "unknown")
def unknown_forgotten(original: Call) -> Call:
    def unknown(self: LeasesOut, body: Request) -> None:
        """Whoever asked is not remembered: no list is due before a rest."""

    return unknown


@seam(Mirror, "evict")
def evict_with_last_words_first(original: Call) -> Call:
    def evict(self: Mirror, pages: int) -> GivenUpPages:
        given: GivenUpPages = original(self, pages)
        last = {slot: value for report in given.reports for slot, value in _words(report)}
        reports = [
            Evicted(report.runs, tuple((slot, last[slot]) for slot, _ in report.words))
            if isinstance(report, Evicted)
            else report
            for report in given.reports
        ]
        return GivenUpPages(given.pages, tuple(reports))

    return evict


def _words(report: Evicted | Flush) -> tuple[tuple[int, int], ...]:
    return report.words if isinstance(report, Evicted) else ()


@seam(Requests, "_live")
def live_falls_with_each_part(original: Call) -> Call:
    def _live(self: Requests, pool: PoolState, seq: int, body: Live) -> list[Action]:
        whole = msgspec.structs.replace(body, first=True, last=True)
        found: list[Action] = original(self, pool, seq, whole)
        return found

    return _live


@seam(GroupLog, "again")
def again_with_less(original: Call) -> Call:
    def again(self: GroupLog, member: PoolId, seq: int) -> AnyReply | None:
        reply: AnyReply | None = original(self, member, seq)
        if isinstance(reply, Matched) and reply.host_pages:
            beyond = reply.restorable_pages - reply.host_pages
            return msgspec.structs.replace(reply, restorable_pages=beyond, host_pages=0)
        return reply

    return again


@seam(transfers, "submissions")
def submissions_into_one_shard(original: Call) -> Call:
    def submissions(
        copy: Copy, parts: tuple[CopyPart, ...], guard: Guard, pools: dict[PoolId, PoolState]
    ) -> list[SubmitCopy]:
        shards: list[SubmitCopy] = original(copy, parts, guard, pools)
        return [msgspec.structs.replace(shard, shard_offset=0) for shard in shards]

    return submissions


WIRE: Final = (
    Mutant(
        "epoch-unchecked",
        "a boot carries out messages meant for the boot before it",
        (take_from_any_epoch,),
        pins={"network_us": 8_000},
        rates={"daemon_restart": 8.0, "duplicate": 0.5, "late": 0.5, "dead_boot": 1.0},
    ),
    Mutant(
        "answer-gone-unsaid",
        "whose answer a limit has dropped asks for it for ever",
        (gone_never,),
        pins={"kept_bytes": 1},
        rates={"loss": 0.1},
    ),
    Mutant(
        "restore-taken-for-gone",
        "a restore that has not ended is told that its answer is kept no longer",
        (awaits_nothing,),
        pins={"kept_bytes": 1},
        rates={"duplicate": 0.5, "copy_slow": 0.3},
    ),
    Mutant(
        "gone-lease-forgotten",
        "the lease of an answer that is gone is not listed away before a rest",
        (unknown_forgotten,),
        pins={"kept_bytes": 1},
        rates={"loss": 0.1},
    ),
    Mutant(
        "words-before-their-pages",
        "the first of an eviction's reports has the words as they are after the last one",
        (evict_with_last_words_first,),
        pins={"portion": 1, "network_us": 3_000},
        rates={"loss": 0.2, "late": 0.2},
        mode="mirrored",
    ),
    Mutant(
        "leases-fall-with-each-part",
        "each part of a list of live requests is taken for the whole of it",
        (live_falls_with_each_part,),
        pins={"portion": 1},
    ),
    Mutant(
        "ranks-told-differently",
        "a rank that asks later is not told of the host's pages",
        (again_with_less,),
        ranks=2,
    ),
    Mutant(
        "shards-over-one-another",
        "every rank's shard is copied to and from the beginning of the host slot",
        (submissions_into_one_shard,),
        ranks=2,
    ),
)
