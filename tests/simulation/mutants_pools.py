"""Deliberate bugs of the core around pools: duplicates, leases, generations, backups, restores.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from typing import Any, Final

from directory.core import pool as core_pool
from directory.core.actions import Action
from directory.core.copies import Copy, Guard
from directory.core.events import CopyDone, Restore
from directory.core.ids import HOST, OpId, Place, PoolId, is_pool
from directory.core.lease import Lease, LeaseTable
from directory.core.node import Node, Residency, RootedSpace
from directory.core.place import PoolState
from directory.core.pool import OwnMatch
from directory.core.registry import Registry
from directory.core.states import LeaseEvent, ResidencyState
from directory.core.transfers import Transfers
from directory.core.tree import Step, Tree
from directory.protocol.endpoint import Endpoint
from tests.simulation.mutants_seams import Call, Mutant, seam, swapped

# A pool's pages and leases.


@seam(core_pool, "_held_prefix")
def held_prefix_of_any_pool(original: Call) -> Call:
    def _held_prefix(pool: PoolState, steps: list[Step]) -> bytes:
        held: list[bytes] = []
        for node, pages in steps:
            found = [r for place, r in node.places.items() if is_pool(place)]
            if not found:
                break
            held.append(found[0].pages[: 4 * pages])
        return b"".join(held)

    return _held_prefix


@seam(core_pool, "match_path")
def match_path_without_use(original: Call) -> Call:
    def match_path(
        tree: Tree,
        pool: PoolState,
        space: RootedSpace,
        tokens: bytes,
        host_tick: int = 0,
        after: OwnMatch | None = None,
    ) -> OwnMatch:
        steps = tree.walk(space, tokens)
        here = [node.places[pool.place] for node, _ in steps if pool.place in node.places]
        ticks = [residency.tick for residency in here]
        found: OwnMatch = original(tree, pool, space, tokens, host_tick, after)
        for residency, tick in zip(here, ticks, strict=True):
            residency.tick = tick
        if found.pages:
            found.node.places[pool.place].tick = ticks[-1]
            tree.refresh(found.node, pool.place)
        return found

    return match_path


@seam(LeaseTable, "release")
def release_but_for_the_dead(original: Call) -> Call:
    def release(self: LeaseTable, pool: PoolState, lease: Lease, event: LeaseEvent) -> None:
        if event is not LeaseEvent.OWNER_GONE:
            original(self, pool, lease, event)

    return release


class _Newest(dict[PoolId, PoolState]):
    """Pools by number, where the number of an ended generation stands for the present one."""

    def __init__(self) -> None:
        super().__init__()
        self._instances: dict[PoolId, str] = {}

    def __setitem__(self, place: PoolId, pool: PoolState) -> None:
        self._instances[place] = pool.instance
        super().__setitem__(place, pool)

    def get(self, place: PoolId, default: Any = None) -> Any:
        """The pool, or the live one of the same instance."""
        found = super().get(place, default)
        if found is not None and found.live:
            return found
        instance = self._instances.get(place)
        return next((p for p in self.values() if p.instance == instance and p.live), found)


@seam(Registry, "__init__")
def registry_of_instances(original: Call) -> Call:
    def begin(self: Registry, tree: Tree) -> None:
        original(self, tree)
        self.members = _Newest()

    return begin


@seam(Endpoint, "close_pool")
def close_pool_of_nobody(original: Call) -> Call:
    def close_pool(self: Endpoint, pool: PoolId) -> None:
        """The old generation's stream stays open."""

    return close_pool


# Copies.


@seam(Transfers, "_finish_backup")
def finish_backup_though_void(original: Call) -> Call:
    def _finish_backup(self: Transfers, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        done: list[Action] = original(self, copy, landed or event.outcome == "void", event)
        return done

    return _finish_backup


@seam(Transfers, "_finish_restore")
def finish_restore_though_partial(original: Call) -> Call:
    def _finish_restore(self: Transfers, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        done: list[Action] = original(self, copy, landed or event.nbytes > 0, event)
        return done

    return _finish_restore


@seam(Transfers, "doom")
def doom_nothing(original: Call) -> Call:
    def doom(self: Transfers, pool: PoolState) -> None:
        """What the dead have begun counts."""

    return doom


@seam(Transfers, "_begin_backup")
def begin_backup_below_a_fill(original: Call) -> Call:
    def there(self: Node, place: Place) -> Residency | None:
        residency = self.places.get(place)
        if residency is None or place == HOST:
            return residency
        return residency if residency.state is ResidencyState.RESIDENT else None

    def _begin_backup(self: Transfers, node: Node, not_pool: PoolId) -> list[Action]:
        with swapped(Node, "resident", there):
            begun: list[Action] = original(self, node, not_pool)
        return begun

    return _begin_backup


@seam(Tree, "begin_fill")
def begin_fill_as_resident(original: Call) -> Call:
    def begin_fill(self: Tree, node: Node, place: Place, pages: bytes, op: OpId, tick: int) -> None:
        original(self, node, place, pages, op, tick)
        residency = node.places[place]
        residency.state = ResidencyState.RESIDENT
        self._count(place, node, residency, 1)
        self.refresh(node, place)

    return begin_fill


def _filling_again(tree: Tree, op: OpId, place: Place) -> None:
    """Undo the early publication, so that only what happened meanwhile is wrong."""
    for node in tree.fills[op]:
        residency = node.places[place]
        if residency.state is ResidencyState.RESIDENT:
            tree._count(place, node, residency, -1)
            residency.state = ResidencyState.FILLING
            tree.refresh(node, place)


@seam(Tree, "land")
def land_what_was_resident(original: Call) -> Call:
    def land(self: Tree, op: OpId, place: Place) -> Any:
        _filling_again(self, op, place)
        return original(self, op, place)

    return land


@seam(Tree, "lose")
def lose_what_was_resident(original: Call) -> Call:
    def lose(self: Tree, op: OpId, place: Place) -> Any:
        _filling_again(self, op, place)
        return original(self, op, place)

    return lose


@seam(Transfers, "_begin_restore")
def begin_restore_without_claim(original: Call) -> Call:
    def _begin_restore(
        self: Transfers,
        pool: PoolState,
        seq: int,
        body: Restore,
        end: Node | None,
        *,
        peers: bool,
    ) -> list[Action]:
        before = set(self.copies)
        begun: list[Action] = original(self, pool, seq, body, end, peers=peers)
        for op in self.copies.keys() - before:
            claim, self.copies[op].claim = self.copies[op].claim, None
            if claim is not None:
                self._tree.unlock(claim, HOST)
        return begun

    return _begin_restore


@seam(Guard, "source")
def guard_without_the_pool_word(original: Call) -> Call:
    def source(self: Guard, pool: PoolState, residency: Residency) -> None:
        original(self, pool, residency)
        self._words.pop((pool.place, 0), None)

    return source


POOLS: Final = (
    Mutant(
        "duplicate-freed-in-the-wrong-pool",
        "pages that another pool holds make an insert's pages duplicates",
        (held_prefix_of_any_pool,),
    ),
    Mutant(
        "match-is-no-use",
        "a thin pool's match does not count as a use, so the mirror would evict others",
        (match_path_without_use,),
        mode="thin",
        pins={"arrival_us": 3_000, "running_max": 5, "waiting_max": 4},
        rates={"abort": 0.5},
    ),
    Mutant(
        "leases-of-the-dead-stay",
        "the end of a session releases no leases",
        (release_but_for_the_dead,),
        rates={"crash": 3.0},
    ),
    Mutant(
        "generation-unchecked",
        "late messages of an ended generation are carried out for the present one",
        (registry_of_instances, close_pool_of_nobody),
        rates={"crash": 5.0, "late": 0.2},
    ),
    Mutant(
        "void-backup-published",
        "a backup counts though its source was given up meanwhile",
        (finish_backup_though_void,),
    ),
    Mutant(
        "partial-restore-landed",
        "a restore has landed once some of it was copied",
        (finish_restore_though_partial,),
        rates={"copy_failure": 0.2},
    ),
    Mutant(
        "doomed-copy-published",
        "copies go on to count when their pool's owner is gone",
        (doom_nothing,),
        pins={"network_us": 3_000, "copy_us": 100},
        rates={"crash": 8.0},
    ),
    Mutant(
        "child-backed-up-before-its-parent",
        "a backup begins while its parent's is under way",
        (begin_backup_below_a_fill,),
    ),
    Mutant(
        "published-before-the-copy-ended",
        "host residency is published when its copy begins",
        (begin_fill_as_resident, land_what_was_resident, lose_what_was_resident),
    ),
    Mutant(
        "host-slot-reused-while-read",
        "a restore holds no claim on the host pages it reads",
        (begin_restore_without_claim,),
        rates={"abort": 0.5, "flush_host": 5.0, "copy_slow": 0.3},
    ),
    Mutant(
        "pool-word-unguarded",
        "copies do not compare the pool word",
        (guard_without_the_pool_word,),
        rates={"flush_pool": 5.0},
    ),
)
