"""Deliberate bugs of the end of a pool, which is taken out of the tree bit by bit.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from typing import Final

from directory.core.actions import Action, MoreToClose
from directory.core.closing import Closing
from directory.core.directory import Directory
from directory.core.ids import Place, PoolId
from directory.core.node import RESIDENT, Node
from directory.core.page_set import PageSet
from directory.core.place import PoolState
from directory.core.transfers import Transfers
from tests.simulation.mutants_seams import Call, Mutant, seam


@seam(Transfers, "_source")
def source_though_dead(original: Call) -> Call:
    def _source(
        self: Transfers,
        node: Node,
        *,
        not_pool: PoolId = 0,
        peers: bool = True,
        hosts: bool = True,
    ) -> Place | None:
        at = node.here if peers else None
        while at is not None:
            if at.state is RESIDENT and at.place != not_pool and at.place in self._pools:
                return at.place
            at = at.next
        found: Place | None = original(self, node, not_pool=not_pool, peers=peers, hosts=hosts)
        return found

    return _source


@seam(Directory, "_close_more")
def close_no_more(original: Call) -> Call:
    def _close_more(self: Directory) -> list[Action]:
        return [action for action in original(self) if not isinstance(action, MoreToClose)]

    return _close_more


@seam(Closing, "begin")
def begin_and_own_on(original: Call) -> Call:
    def begin(self: Closing, pool: PoolState) -> None:
        owned = PageSet(pool.owned)
        original(self, pool)
        pool.owned = owned

    return begin


@seam(Closing, "_climb")
def climb_not(_: Call) -> Call:
    def _climb(self: Closing, left: object, node: Node, room: int) -> int:
        return room

    return _climb


ENDS: Final = (
    Mutant(
        "dead-pool-is-a-source",
        "what is left of a pool that has ended is matched and read",
        (source_though_dead,),
        pins={"closed_a_step": 1},
        rates={"crash": 5.0},
    ),
    Mutant(
        "end-goes-no-further",
        "nobody asks for the next step of a pool's end",
        (close_no_more,),
        pins={"closed_a_step": 1},
        rates={"crash": 5.0},
    ),
    Mutant(
        "dead-pool-owns-on",
        "a pool that has ended has its pages still",
        (begin_and_own_on,),
        pins={"closed_a_step": 1},
        rates={"crash": 5.0},
    ),
    Mutant(
        "end-takes-nothing",
        "each step of a pool's end asks for the next one and takes no node out",
        (climb_not,),
        pins={"closed_a_step": 1},
        rates={"crash": 5.0},
    ),
)
