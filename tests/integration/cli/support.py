"""What the command's tests share: running it, a made-up trace, and the hits a dictionary finds."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-P", "-c", "from directory.cli.main import app; app()")


class Result(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


def environment(temporary: Path) -> dict[str, str]:
    """Our environment, with runtime folders made below `temporary`."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def treecored(temporary: Path, *arguments: object, timeout_s: float = 110) -> Result:
    """Run the command to its end; it must leave nothing in its temporary folder."""
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(temporary),
        cwd=temporary,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert list(temporary.iterdir()) == []
    return Result(done.returncode, done.stdout, done.stderr)


class Line(NamedTuple):
    """A trace line: tokens of the prompt and its block ids."""

    length: int
    blocks: list[int]


def chats(count: int, seed: int, block_tokens: int) -> list[Line]:
    """Turns of a few chats that grow block by block from shared beginnings."""
    chance = random.Random(seed)
    fresh = iter(range(1_000_000))
    beginnings = [[next(fresh) for _ in range(chance.randint(2, 6))] for _ in range(4)]
    histories = [list(chance.choice(beginnings)) for _ in range(12)]
    lines = []
    for _ in range(count):
        number = chance.randrange(len(histories))
        history = histories[number]
        history += [next(fresh) for _ in range(chance.randint(1, 3))]
        length = len(history) * block_tokens
        if chance.random() < 0.8:
            # The last block is partial; another turn goes on with a block of its own.
            length -= chance.randrange(1, block_tokens)
            lines.append(Line(length, list(history)))
            history[-1] = next(fresh)
        else:
            lines.append(Line(length, list(history)))
        if len(history) > 30:
            histories[number] = list(chance.choice(beginnings))
    return lines


def write_trace(path: Path, lines: Iterable[Line]) -> Path:
    """Write lines as a trace file."""
    with path.open("w") as file:
        for number, line in enumerate(lines):
            fields = {
                "timestamp": number * 10,
                "input_length": line.length,
                "output_length": 1,
                "hash_ids": line.blocks,
            }
            file.write(json.dumps(fields) + "\n")
    return path


class Hits(NamedTuple):
    """What caches without bounds hit in strict order: whole blocks, tokens; of how many."""

    hit_blocks: int
    blocks: int
    hit_tokens: int
    tokens: int


def simulate(lines: Iterable[Line], *, caches: int, page_size: int, block_tokens: int) -> Hits:
    """Keep every page's path in a set, one set a cache, served in turn.

    At least one token of each prompt is computed, so its last page is never hit whole.
    """
    known: list[set[tuple[int, int]]] = [set() for _ in range(caches)]
    hit_blocks = blocks = hit_tokens = tokens = 0
    for number, line in enumerate(lines):
        # A page is named by the block of its last token (which stands for the path) and its end.
        ends = range(page_size, line.length + 1, page_size)
        pages = [(line.blocks[(end - 1) // block_tokens], end) for end in ends]
        cache = known[number % caches]
        hits = 0
        while hits < len(pages) and pages[hits] in cache and pages[hits][1] < line.length:
            hits += 1
        cache.update(pages)
        hit_tokens += hits * page_size
        hit_blocks += hits * page_size // block_tokens
        blocks += len(line.blocks)
        tokens += line.length
    return Hits(hit_blocks, blocks, hit_tokens, tokens)
