"""KV events of two real engines: who reads them knows what the daemon's own match says.

The reader is ours, and knows SGLang's wire format and hashes alone; tests/consumers has others'
programs in its place. Pools and host tier are too small for what is served.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from directory.cli.asking import Asking
from directory.core.tokens import pack_tokens
from directory.protocol.admin import AdminExplain, ExplainReport
from tests.integration.daemon.listening import Listener, streams
from tests.integration.daemon.support import DaemonProcess, wait_until
from tests.ports import free_ports
from tests.property.test_kv_events import hash_chain
from tests.sglang import model
from tests.sglang.engines import Engine, Nursery
from tests.sglang.node import Mode, Node

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PAGE = 16
DOCUMENTS, PROMPTS, LONGEST = 5, 30, 400
NAMES = ("a", "b")


class Held(NamedTuple):
    """Of a prompt, in tokens: in an engine's pool, and there or at the host. `peer`: whether the
    daemon would copy a part from another engine's pool, of which no event tells."""

    own: int
    with_host: int
    peer: bool = False


class TellingNode(Node):
    """Its daemon publishes KV events."""

    port = 0

    def _daemon(self) -> DaemonProcess:
        self.port = free_ports(6)
        flags = ("--host-tier", self.host_tier, "--segment", "256KiB")
        return DaemonProcess(
            self.folder / "rt", *flags, "--kv-events", f"tcp://127.0.0.1:{self.port}"
        )

    def held(self, name: str, tokens: list[int]) -> Held:
        """What the daemon says of a prompt's whole pages, as seen from an engine."""
        with Asking(self.daemon.runtime_dir, 60.0, "test") as daemon:
            # One token more than what is asked about: the last one is always computed.
            question = AdminExplain(pack_tokens([*tokens, 0]), instance=name)
            report = daemon.ask(question, ExplainReport)
        found = dict.fromkeys(("own", "host", "peer"), 0)
        for stretch in report.stretches:
            if stretch.verdict in found:
                found[stretch.verdict] += stretch.tokens
        assert sum(found.values()) == report.matched_tokens
        return Held(found["own"], report.matched_tokens, found["peer"] > 0)


class Reader:
    """Who listens to one engine's stream."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def held(self, tokens: list[int]) -> Held:
        """What it knows of a prompt by now."""
        while self.listener.socket.poll(0):
            self.listener.hear()
        known = self.listener.blocks
        own = both = 0
        for at, block in enumerate(hash_chain(tokens, PAGE), 1):
            media = known.get(block, set())
            if "GPU" in media and own == at - 1:
                own = at
            if not media:
                break
            both = at
        return Held(own * PAGE, both * PAGE)


def prompts() -> list[list[int]]:
    """Documents, cut somewhere, with something new behind."""
    draw = Random(5)
    documents = [model.prompt(seed, LONGEST) for seed in range(DOCUMENTS)]
    found = []
    for number in range(PROMPTS):
        cut = draw.choice(documents)[: draw.randrange(LONGEST)]
        found.append([*cut, *model.prompt(100 + number, draw.randrange(1, 60))])
    return found


@contextmanager
def engines(
    nursery: Callable[[str], Nursery], models: Path, folder: Path, version: str, mode: Mode
) -> Iterator[tuple[TellingNode, list[Engine]]]:
    """A daemon that tells, and two engines."""
    with TellingNode(folder, nursery, models / "one", host_tier="1MiB") as node:
        both = [node.engine(name, version, mode, page_size=PAGE) for name in NAMES]
        for engine in both:
            engine.wait_up()
        yield node, both


def serve(both: list[Engine], asked: list[list[int]]) -> None:
    """Have every prompt served, by one engine or the other."""
    draw = Random(6)
    for prompt in asked:
        draw.choice(both).generate(prompt, new=4)


CASES = (
    pytest.param("0.5.23", "mirrored"),
    pytest.param("0.5.23", "thin", marks=pytest.mark.every_cell),
    pytest.param("0.5.16", "thin", marks=pytest.mark.every_cell),
    pytest.param("0.5.16", "mirrored", marks=pytest.mark.every_cell),
)


@pytest.mark.parametrize(("version", "mode"), CASES)
def test_who_reads_the_events_of_real_engines_knows_what_the_daemons_match_says(
    version: str, mode: Mode, nursery: Callable[[str], Nursery], models: Path, tmp_path: Path
) -> None:
    asked = prompts()
    with ExitStack() as stack:
        node, both = stack.enter_context(engines(nursery, models, tmp_path, version, mode))
        where = streams(node.daemon, *NAMES)
        early = Reader(stack.enter_context(Listener(where["a"])))
        serve(both, asked)
        late = Reader(stack.enter_context(Listener(where["b"])))  # has missed everything
        readers = dict(zip(NAMES, (early, late), strict=True))
        node.wait_at_rest()
        wait_until(partial(agree, node, readers, asked))
        # What is told is not nothing, and not everything.
        told = [reader.held(tokens) for reader in readers.values() for tokens in asked]
        assert any(held.own for held in told)
        assert any(held.with_host > held.own for held in told)
        assert any(not held.with_host for held in told)
        assert node.counter("host_pages_evicted") > 0
        # And an engine that is asked hits as much as a reader of its stream expected.
        compared = 0
        for tokens in asked[-8:]:
            for engine in both:
                node.wait_at_rest()
                wait_until(partial(agree, node, readers, [tokens]))
                if node.held(engine.name, tokens[:-1]).peer:
                    continue
                expected = readers[engine.name].held(tokens[:-1]).with_host
                assert engine.generate(tokens, new=4).cached == expected
                compared += expected > 0
        assert compared
        node.assert_clean()
        both[0].stop()
        wait_until(lambda: not early.held(asked[-1]).with_host and not early.listener.blocks)
        assert late.held(asked[-1]).own


def agree(node: TellingNode, readers: dict[str, Reader], asked: list[list[int]]) -> bool:
    """Whether readers and daemon say the same of every prompt and engine; what the daemon would
    copy from another pool is compared for the own pool alone."""
    for name, reader in readers.items():
        for tokens in asked:
            wanted, found = node.held(name, tokens), reader.held(tokens)
            if found.own != wanted.own:
                return False
            if not wanted.peer and found.with_host != wanted.with_host:
                return False
    return True
