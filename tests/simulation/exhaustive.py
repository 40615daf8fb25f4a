"""Exhaustive small scope: every order of events of a tiny node, breadth first.

Owns the search. Of a state only its digest, the state it came from and the move that led there
are kept; it is followed once, from a node that is set back (`saved`) along the path of the state
before, which is mostly the same. Every state is checked when it is first reached. A level can be
shared out to processes, in rounds: each is a fork that knows all that is known, and writes what
it finds to a file. Nothing is drawn here, and the states of whole levels do not depend on the
number of processes.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec

from directory.core.events import Mode
from tests.simulation.nameless import DIGEST_BYTES, key
from tests.simulation.saved import Saved, load, save
from tests.simulation.tiny import Tiny
from tests.simulation.tiny_parts import MODES, Move, move_of

CHUNK = 256
"""States that a process takes at once: near ones, whose paths are alike."""
ROUND = 128 * CHUNK
"""States that are followed before processes tell each other what they found."""
RECORD = Struct(f"<{DIGEST_BYTES}sIH")


class Report(NamedTuple):
    """How far a search got. `closed`: no state was left to be followed.

    `depth`: every state of at most so many moves was reached and checked; `states` counts those
    of a level that was begun as well. `broken`: what does not hold, and the moves that led there.
    """

    states: int
    transitions: int
    depth: int
    closed: bool
    seconds: float
    broken: str


class Share(msgspec.Struct):
    """What a process says of its share of a level."""

    transitions: int = 0
    whole: bool = True
    broken: str = ""


class Search:
    """All states known so far, in the order in which they were found."""

    def __init__(self, modes: tuple[Mode, Mode] = MODES) -> None:
        self._modes = modes
        self._tiny = Tiny(modes)
        self._parents = array("I", [0])
        self._made_by = array("H", [0])
        self._seen = {key(self._tiny)}
        self._stack: list[Saved] = [save(self._tiny)]
        self._path: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def path_to(self, state: int) -> list[int]:
        """The moves that led to a state first, by code."""
        path: list[int] = []
        while state:
            path.append(self._made_by[state])
            state = self._parents[state]
        path.reverse()
        return path

    def learn(self, records: bytes) -> None:
        """Take in what was found."""
        for digest, parent, move in RECORD.iter_unpack(records):
            if digest not in self._seen:
                self._seen.add(digest)
                self._parents.append(parent)
                self._made_by.append(move)

    def follow(self, states: Iterator[int], write: Callable[[bytes], object]) -> Share:
        """Make every move of these states, and write down each state that is new."""
        share = Share()
        fresh: set[bytes] = set()
        tiny, seen = self._tiny, self._seen
        for state in states:
            here = self._go_to(state)
            at_hand = True
            for move in list(tiny.moves()):
                if not at_hand:
                    load(tiny, here)
                at_hand = False
                share.transitions += 1
                try:
                    tiny.do(move)
                    digest = key(tiny)
                    if digest in seen or digest in fresh:
                        continue
                    tiny.check()
                except Exception as error:  # noqa: BLE001 - whatever is raised is a finding
                    share.broken = self._tell(error, [*self.path_to(state), move.code()])
                    return share
                fresh.add(digest)
                write(RECORD.pack(digest, state, move.code()))
        return share

    def _go_to(self, state: int) -> Saved:
        """Set the node to a state, from where its path leaves that of the state before."""
        path, stack, tiny = self.path_to(state), self._stack, self._tiny
        same = 0
        for mine, before in zip(path, self._path, strict=False):
            if mine != before:
                break
            same += 1
        del stack[same + 1 :]
        load(tiny, stack[same])
        for code in path[same:]:
            tiny.do(move_of(code))
            stack.append(save(tiny))
        self._path = path
        return stack[-1]

    def _tell(self, error: Exception, path: list[int]) -> str:
        """What was found, and whether a node that was never set back shows it, too."""
        try:
            replay([move_of(code) for code in path], self._modes).check()
            again = "a node that was never set back does not show this: look into saved.py"
        except Exception as same:  # noqa: BLE001 - likewise
            again = f"replayed: {type(same).__name__}: {same}"
        moves = "\n".join(str(move_of(code)) for code in path)
        return f"{type(error).__name__}: {error}\n{again}\n{moves}"


def replay(moves: list[Move], modes: tuple[Mode, Mode] = MODES) -> Tiny:
    """A tiny node after these moves."""
    tiny = Tiny(modes)
    for move in moves:
        tiny.do(move)
    return tiny


def search(
    *,
    states_max: int = 1_000_000,
    depth_min: int = 10,
    seconds_max: float = 0,
    jobs: int = 1,
    modes: tuple[Mode, Mode] = MODES,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Follow every order of events, breadth first, until nothing new comes, or until both
    `states_max` states are known and all of `depth_min` moves are followed, or time is over.

    `say` is told of every round."""
    began = time.monotonic()
    deadline = began + seconds_max if seconds_max else 0.0
    known = Search(modes)
    transitions = depth = 0
    first, last = 0, 1  # what is to be followed of the present level
    broken, whole, closed = "", True, False
    collecting = gc.isenabled()
    gc.disable()  # nodes and their parents are cycles: collected once a chunk instead
    try:
        while whole and not broken and not closed:
            if len(known) >= states_max and depth >= depth_min:
                break
            part = range(first, min(first + ROUND, last))
            shares = list(_round(known, part, jobs, deadline))
            transitions += sum(share.transitions for share in shares)
            whole = all(share.whole for share in shares)
            broken = next((share.broken for share in shares if share.broken), "")
            first = part.stop
            if first == last and whole and not broken:
                closed = len(known) == last
                depth += not closed
                last = len(known)
            if say is not None:
                seconds = time.monotonic() - began
                say(
                    f"depth {depth} whole, {last - first} of it to follow: {len(known)} states, "
                    f"{transitions} transitions, {seconds:.0f} s, "
                    f"{len(known) / seconds:.0f} states a second"
                )
    finally:
        if collecting:
            gc.enable()
    return Report(len(known), transitions, depth, closed, time.monotonic() - began, broken)


def _round(known: Search, part: range, jobs: int, deadline: float) -> Iterator[Share]:
    """Follow states of a level, in this process or, if they are many, in several."""
    if jobs == 1 or len(part) < jobs * CHUNK:
        found = bytearray()
        yield _share(known, part, 0, 1, deadline, found.extend)
        known.learn(bytes(found))
        return
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(known, part, job, jobs, deadline, Path(folder)) for job in range(jobs)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for job, code in enumerate(codes):
            if code:
                yield Share(0, False, f"process {job} of the search ended with {code}")
                continue
            known.learn((Path(folder) / f"{job}.states").read_bytes())
            told = (Path(folder) / f"{job}.json").read_bytes()
            yield msgspec.json.decode(told, type=Share)


def _fork(known: Search, part: range, job: int, jobs: int, deadline: float, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder / f"{job}.states").open("wb") as file:
            share = _share(known, part, job, jobs, deadline, file.write)
        (folder / f"{job}.json").write_bytes(msgspec.json.encode(share))
        code = 0
    except Exception:  # noqa: BLE001 - a fork must never go on as its parent would
        traceback.print_exc()
    finally:
        os._exit(code)


def _share(
    known: Search,
    part: range,
    job: int,
    jobs: int,
    deadline: float,
    write: Callable[[bytes], object],
) -> Share:
    """Follow every `jobs`-th chunk of these, until time is over."""
    whole = True

    def states() -> Iterator[int]:
        nonlocal whole
        for at in range(job * CHUNK, len(part), jobs * CHUNK):
            if deadline and time.monotonic() > deadline:
                whole = False
                return
            yield from part[at : at + CHUNK]
            gc.collect(0)

    share = known.follow(states(), write)
    share.whole = whole and not share.broken
    return share
