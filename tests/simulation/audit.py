"""The audit: what the directory says is where it says, compared with the memory itself.

Owns the claims about contents (invariant 2), about pages under leases (3), and about mirrors that
must agree with the directory (the reports say it all). Reads the simulated memories directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from directory.core.ids import HOST, POOL_WORD
from directory.core.node import Node
from directory.core.place import PoolState
from directory.core.states import ResidencyState
from directory.core.tokens import unpack_pages
from scheduler_shim.mirror import PLACE, Mirror
from tests.simulation.checkers import Violation

if TYPE_CHECKING:
    from tests.simulation.contents import Contents
    from tests.simulation.daemon import SimDaemon
    from tests.simulation.process import Process

NAME = "contents"


def audit(daemon: SimDaemon, contents: Contents) -> int:
    """Compare every readable page of every place with its path; returns how many were compared.

    Host: resident pages, and draining ones that somebody still holds. Pools: pages whose fences
    have passed and whose words are as reported, because a mover would take exactly these.
    """
    compared = 0
    tier = daemon.tier
    for space in daemon.directory.tree.spaces.values():
        root = contents.root(space.fingerprint, space.key)
        stack = [(child, root) for child in space.root.children.values()]
        while stack:
            node, above = stack.pop()
            numbers = contents.path(above, node.edge, space.page_key)
            stack += [(child, numbers[-1]) for child in node.children.values()]
            for place, residency in node.places.items():
                readable = residency.state is ResidencyState.RESIDENT or (
                    residency.state is ResidencyState.DRAINING and residency.locks
                )
                if not readable or (node.id, place) in daemon.directory.tree.filling:
                    continue
                if place == HOST:
                    assert tier is not None
                    for slot, number in zip(unpack_pages(residency.pages), numbers, strict=True):
                        problem = tier.wrong(slot, space.page_bytes, number, space.ranks)
                        if problem:
                            raise Violation(NAME, f"host page of {node!r}: {problem}")
                    compared += len(numbers)
                else:
                    compared += _audit_pool(daemon, node, place, numbers)
    return compared


def _audit_pool(daemon: SimDaemon, node: Node, place: int, numbers: list[int]) -> int:
    """A copy of a group's page counts only if every rank's words and fences say so."""
    pool = daemon.directory.pools[place]
    sessions = [daemon.sessions.get(member) for member in pool.members]
    memories = [session.memory for session in sessions if session is not None]
    residency = node.places[place]
    if len(memories) < len(sessions) or not pool.live:
        return 0
    if not all(
        memory.passed(residency.written) and memory.words.values[POOL_WORD] == pool.word
        for memory in memories
    ):
        return 0
    pages = unpack_pages(residency.pages)
    at = compared = 0
    for run in residency.runs:
        value = pool.spans[run.span].value
        if all(memory.words.values[run.span] == value for memory in memories):
            for page, number in zip(
                pages[at : at + run.length], numbers[at : at + run.length], strict=True
            ):
                for memory in memories:
                    problem = memory.wrong(page, number)
                    if problem:
                        raise Violation(NAME, f"page of pool {place}, {node!r}: {problem}")
                compared += 1
        at += run.length
    return compared


def agree(process: Process, daemon: SimDaemon, mirror: Mirror) -> None:
    """A mirror whose every report was carried out, and its pool at the directory, are one.

    Same pages for the same paths, same spans and words. (Use and locks are the mirror's alone.)
    """
    link = process.link
    members = daemon.directory.registry.members
    pool = members.get(link.pool) if link is not None else None
    if pool is None:
        raise Violation("mirror", f"{process.name} is not registered")
    mine = _holdings(mirror.pool, PLACE)
    theirs = _holdings(pool, pool.place)
    if mine != theirs:
        only_mine = sorted(mine.items() - theirs.items())[:4]
        only_theirs = sorted(theirs.items() - mine.items())[:4]
        raise Violation(
            "mirror", f"{process.name}: only the mirror has {only_mine}, not {only_theirs}"
        )
    words = {slot: span.value for slot, span in mirror.pool.spans.items()}
    if words != {slot: span.value for slot, span in pool.spans.items()}:
        raise Violation("mirror", f"{process.name}: spans differ: {words}, {pool.spans}")
    if pool.word != mirror.pool.word:
        raise Violation("mirror", f"{process.name}: pool word {pool.word}, {mirror.pool.word}")


def _holdings(pool: PoolState, place: int) -> dict[tuple[str, int, bytes], int]:
    held: dict[tuple[str, int, bytes], int] = {}
    for node in pool.nodes.values():
        path = node.path()
        tokens = b"".join(part.edge for part in path)
        first = sum(part.page_count for part in path[:-1])
        for at, page in enumerate(unpack_pages(node.places[place].pages), first + 1):
            held[repr(node.space.key), page, tokens[: at * node.space.page_key]] = at
    return held
