"""What the torture's driver remembers, and what it says at the end."""

import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from directory.core.actions import CopyKind
from scheduler_shim.landings import Landing
from tests.gpu import torture_messages as t
from transfer.host_tier import TierShape
from transfer.ipc.channel import FdChannel

PROTECTIONS = ("destination-fence", "forward-fence", "word-recheck", "generation-check")
WRONG_SHOWN_MAX = 3


class Copying:
    """A copy: its pages (host slots of a load back) and what they must contain.

    `source`: (side, pool, span) of a copy out of a pool.
    """

    def __init__(
        self,
        kind: CopyKind,
        source: tuple[int, int, t.Published] | None,
        pages: tuple[int, ...],
        contents: tuple[int, ...],
    ) -> None:
        self.kind = kind
        self.source = source
        self.pages = pages
        self.contents = contents
        self.onto: tuple[int, ...] = ()
        self.side = self.token = 0
        self.landing: Landing | None = None  # of a load that lands layer by layer

    def __repr__(self) -> str:
        return f"<{self.kind} of {len(self.pages)} pages from {self.source and self.source[:2]}>"


class HostPages:
    """The slots of the host tier: free, filling, or kept with known contents."""

    def __init__(self, shape: TierShape, page_bytes: int) -> None:
        each = shape.slots_of(0, page_bytes)
        self._free = deque(s << 16 | i for s in range(shape.segment_count) for i in range(each))
        self._kept: deque[tuple[int, ...]] = deque()
        self._readers: Counter[int] = Counter()
        self.contents: dict[int, int] = {}

    def allocate(self, count: int) -> list[int] | None:
        """Take slots; the oldest that nobody reads make room."""
        while len(self._free) < count:
            for _ in range(len(self._kept)):
                oldest = self._kept.popleft()
                if not any(self._readers[slot] for slot in oldest):
                    self._free.extend(oldest)
                    break
                self._kept.append(oldest)
            else:
                return None
        return [self._free.popleft() for _ in range(count)]

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back that were never filled."""
        self._free.extend(slots)

    def keep(self, slots: tuple[int, ...], contents: Sequence[int]) -> None:
        """Slots are filled."""
        self._kept.append(slots)
        self.contents.update(zip(slots, contents, strict=True))

    def take(self, rng: random.Random) -> list[int] | None:
        """Choose slots to restore from; they stay until they are given back."""
        if not self._kept:
            return None
        chosen = list(rng.choice(self._kept))
        rng.shuffle(chosen)
        self._readers.update(chosen)
        return chosen

    def give_back(self, slots: Iterable[int]) -> None:
        """Nobody reads them for this restore any more."""
        self._readers.subtract(slots)


class Side:
    """A scheduler: its process, its pool now, and pools that are being unmapped."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], channel: FdChannel) -> None:
        self.number = number
        self.channel = channel
        self.pool = 0  # of the present generation, once it is imported
        self.generation = 0
        self.coming = 0
        self.leaving: dict[int, int] = {}  # generation by pool
        self.held: tuple[t.Registered, list[int]] | None = None
        self.ended = False
        self._process = process
        self._names: dict[int, int] = {}  # pool by generation

    def comes(self, pool: int, generation: int, *, keep_names: bool) -> None:
        """A new generation is being imported. `keep_names`: the mutant mixes generations up."""
        if keep_names:
            self._names = dict.fromkeys(self._names, pool)
        else:
            self._names.clear()
        self.coming = pool
        self._names[generation] = pool
        self.generation = generation

    def arrived(self) -> None:
        """It is imported."""
        self.pool, self.coming = self.coming, 0

    def pool_of(self, generation: int) -> int:
        """The pool that a report of a generation speaks of, or 0."""
        return self._names.get(generation, 0)

    def say(self, message: t.ToScheduler) -> None:
        """Send a message."""
        self.channel.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """End the process."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


def report(seed: int, without: str, counts: Counter[str], wrong: Sequence[str]) -> int:
    """Print what happened; returns the exit status."""
    protections = f"without the {without}" if without else "all protections"
    lines = [f"torture: seed {seed}, {protections}"]
    lines += [f"  {name}: {count}" for name, count in sorted(counts.items())]
    lines += [f"  WRONG {line}" for line in wrong[:WRONG_SHOWN_MAX]]
    verified = sum(count for name, count in counts.items() if name.startswith("pages verified"))
    expected = bool(wrong) == bool(without) and (bool(without) or verified > 0)
    lines.append(
        f"torture: {verified} pages verified, {len(wrong)} copies with wrong bytes: "
        f"{'as it should be' if expected else 'NOT AS IT SHOULD BE'}"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if expected else 1
