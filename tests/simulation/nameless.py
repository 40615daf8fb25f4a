"""States without names: when two states of the tiny node are one.

Owns the digest of a state. Ids, page and slot numbers, absolute ticks and words, and which of two
schedulers of one mode is which make no difference to what can follow, nor does which of the two
long paths is which; so they are left out, and of the ways to name the rest the least is taken.

Left out as well, and why that loses nothing: what free pages hold (only a copy whose words have
moved on may read them, and it cannot succeed any more; what the others would bring is in), the
values of words (they only rise, so all that counts is whether a copy's still hold; `Tiny.check`
compares both sides'), and which words a copy has (its pages tell, while they hold).

Digests have 16 bytes. Two states with one digest would hide what follows from one of them; among
some millions of states the odds of that are below 1 to 10^24.
"""

from __future__ import annotations

from hashlib import blake2b

from directory.core.actions import SubmitCopy
from directory.core.ids import HOST
from directory.core.node import Node
from directory.core.states import ResidencyState, TransferState
from directory.core.tokens import unpack_pages
from tests.simulation.tiny import Tiny
from tests.simulation.tiny_parts import KEYS, Scheduler

DIGEST_BYTES = 16
SPOILT = 4
PATHS = {b"": 0, KEYS[0]: 1, KEYS[1]: 2, KEYS[2]: 3, b"?": SPOILT}
PLAIN = (0, 1, 2, 3, SPOILT)
SWAPPED = (0, 1, 3, 2, SPOILT)
STATES = {state: at for at, state in enumerate(ResidencyState)}
COPY_STATES = {state: at for at, state in enumerate(TransferState)}
KINDS = {"backup": 0, "load_back": 1, "peer_copy": 2, "mixed": 3}
END = 255
"""Ends every list, so that no two states are written alike."""


def key(tiny: Tiny) -> bytes:
    """A digest that is equal for states which differ in names only."""
    orders = [tiny.schedulers]
    if tiny.modes[0] == tiny.modes[1]:
        orders.append(tiny.schedulers[::-1])
    first = _feature(tiny, KEYS[1])
    second = _feature(tiny, KEYS[2])
    namings = (PLAIN, SWAPPED) if first == second else (PLAIN if first > second else SWAPPED,)
    least = min(_written(tiny, order, naming) for order in orders for naming in namings)
    return blake2b(least, digest_size=DIGEST_BYTES).digest()


def _feature(tiny: Tiny, path: bytes) -> int:
    """Something about a path that swapping the long paths, or the schedulers, does not change."""
    found = 0
    for scheduler in tiny.schedulers:
        if scheduler is None:
            continue
        if path in scheduler.held.values():
            found += 1
        if scheduler.receipt and scheduler.key == path:
            found += 4
    last = path[-4:]
    for node in tiny.directory.tree.nodes.values():
        if node.edge[-4:] == last:
            found += 16 + 32 * len(node.places) + (128 if HOST in node.places else 0)
    return found


def _written(tiny: Tiny, schedulers: list[Scheduler | None], naming: tuple[int, ...]) -> bytes:
    """The state in small numbers."""
    directory = tiny.directory
    tree = directory.tree
    numbers = {HOST: 0}
    for at, scheduler in enumerate(schedulers, 1):
        if scheduler is not None:
            numbers[scheduler.pool] = at
    gone = 1 + len(schedulers)
    for op in tiny.copies:
        # A pool without a scheduler is there for its copies only.
        for pool in directory.transfers.copies[op].pools:
            if pool not in numbers:
                numbers[pool] = gone
                gone += 1
    out: list[int] = []
    _write_nodes(tiny, numbers, naming, out)
    for scheduler in schedulers:
        if scheduler is not None:
            _write_scheduler(tiny, scheduler, naming, out)
        out.append(END)
    for op, copy in tiny.copies.items():
        _write_copy(tiny, op, copy, numbers, naming, out)
    for node_id, pool in directory.transfers.wished.items():
        out += (naming[_end(tree.nodes[node_id])], numbers.get(pool, END))
    return bytes(out)


def _end(node: Node | None) -> int:
    """The path that a node ends (all tokens are small), 0 for none."""
    return 0 if node is None else node.edge[-4]


def _write_nodes(
    tiny: Tiny, numbers: dict[int, int], naming: tuple[int, ...], out: list[int]
) -> None:
    tree = tiny.directory.tree
    ranks: dict[int, dict[int, int]] = {}
    for place, state in tree.places.items():
        if state.nodes:
            ticks = {node.places[place].tick for node in state.nodes.values()}
            ranks[place] = {tick: at for at, tick in enumerate(sorted(ticks))}
    ops = {op: at for at, op in enumerate(tiny.copies, 1)}
    ops[0] = 0
    for node in sorted(tree.nodes.values(), key=lambda node: naming[node.edge[-4]]):
        # The first child is the first to be backed up.
        eldest = next(iter(node.children.values()), None)
        parent = node.parent
        short = parent is None or parent.parent is None
        out += (naming[_end(node)], len(node.edge), short, node.ends, naming[_end(eldest)])
        places = dict(node.places)
        if HOST in places and next(iter(places)) != HOST:
            # The order of pools decides which source is taken, the host's place in it nothing.
            places = {HOST: places[HOST], **places}
        for place, residency in places.items():
            out += (
                numbers[place],
                STATES[residency.state],
                residency.locks,
                ranks[place][residency.tick],
                ops[tree.filling.get((node.id, place), 0)],
            )
            for run in residency.runs:
                out += (run.first, run.length)
            out.append(END)
        out.append(END)
    out.append(END)


def _write_scheduler(
    tiny: Tiny, scheduler: Scheduler, naming: tuple[int, ...], out: list[int]
) -> None:
    directory = tiny.directory
    if scheduler.receipt:
        lease = directory.leases.get(scheduler.receipt, scheduler.pool)
        end = lease.end
        known = end is not None and end.id in directory.tree.nodes
        out += (
            naming[_end(lease.claims.get(HOST))],
            naming[_end(lease.claims.get(scheduler.pool))],
            naming[_end(end)] if known else 0,
            naming[PATHS[scheduler.key]],
            scheduler.own,
            scheduler.beyond,
        )
    out.append(END)
    spans: dict[int, int] = {}
    held = sorted((naming[PATHS[path]], page) for page, path in scheduler.held.items())
    for path, page in held:
        span = scheduler.span_of[page]
        out += (path, spans.setdefault(span, len(spans)))
    out.append(END)
    if scheduler.restore is not None:
        wanted, own, targets = scheduler.restore
        out += (naming[PATHS[wanted]], own, len(targets))
    out += (len(scheduler.free), directory.pools[scheduler.pool].restores)


def _write_copy(
    tiny: Tiny,
    op: int,
    copy: SubmitCopy,
    numbers: dict[int, int],
    naming: tuple[int, ...],
    out: list[int],
) -> None:
    inside = tiny.directory.transfers.copies[op]
    end = inside.end
    known = end is not None and end.id in tiny.directory.tree.nodes
    out += (
        KINDS[copy.kind],
        COPY_STATES[inside.state],
        inside.again,
        tiny.words_hold(copy),
        naming[_end(end)] if known else 0,
        naming[_end(inside.claim)],
        0 if inside.body is None else inside.body.start_page,
        numbers[inside.target] if inside.target else 0,
    )
    out += [numbers[place] for place in inside.pools]
    out.append(END)
    for part in copy.parts:
        holds = tiny.memory(part.source)
        out.append(numbers[part.source])
        out += [naming[PATHS[holds.get(page, b"")]] for page in unpack_pages(part.source_pages)]
        out.append(END)
    out.append(END)
