"""Loads that land layer by layer, through a real daemon and mover."""

import os
import signal
import threading

import pytest

from directory.core.actions import Matched, Restored
from directory.core.events import Restore
from scheduler_shim.landings import Landing, Landings, LoadLost
from tests.integration.daemon.support import DaemonProcess, RawClient, packed, wait_until
from tests.integration.daemon.test_mover_loss import publish

LAYERS = 48
DEADLINE_S = 30.0


def published_and_gone(daemon: DaemonProcess, pages: list[int]) -> tuple[range, list[bytes]]:
    """Have pages in the host tier alone; returns their tokens and bytes."""
    with RawClient(daemon.runtime_dir, "a", layers=LAYERS) as a:
        tokens = publish(a, 0, pages)
        content = [a.pool_memory.read(page) for page in pages]
        wait_until(lambda: a.stats().get("pages_backed_up") == len(pages))
    return tokens, content


def ask(
    b: RawClient, tokens: range, targets: list[int], landing: Landing, quiet: tuple[int, int]
) -> int:
    """Have a path restored layer by layer; returns the message's number."""
    matched = b.match(tokens)
    assert isinstance(matched, Matched)
    assert matched.host_pages == len(targets)
    body = Restore("r", 0, matched.receipt, 0, packed(targets), quiet, landing.wire)
    return b.send(body)


def in_place(b: RawClient, layer: int, targets: list[int], content: list[bytes]) -> bool:
    """Whether a layer of every page is what it has to be."""
    chunk = b.pool_memory.layout.buffers[0].chunk_bytes
    part = slice(2 * layer * chunk, 2 * (layer + 1) * chunk)
    return all(
        b.pool_memory.read(page)[part] == wanted[part]
        for page, wanted in zip(targets, content, strict=True)
    )


def test_each_layer_is_in_place_when_its_wait_ends(daemon: DaemonProcess) -> None:
    pages = list(range(24))
    tokens, content = published_and_gone(daemon, pages)
    with RawClient(daemon.runtime_dir, "b", layers=LAYERS) as b:
        wait_until(lambda: b.stats()["pools"] == 1)
        landings = Landings(b.pool_memory.timelines)
        for again in range(2):
            landing = landings.begin(LAYERS)
            assert landing is not None
            targets = list(range(32 - 24 * again, 56 - 24 * again))
            seq = ask(b, tokens, targets, landing, b.pool_memory.now())
            for layer in range(LAYERS):
                landing.wait_until(layer, DEADLINE_S)
                assert in_place(b, layer, targets, content), f"layer {layer}"
            answer = b.answer_to(seq)
            assert isinstance(answer, Restored)
            assert landing.take_answer(landed=answer.landed)
            assert landing.first == again * LAYERS
        assert b.stats()["host_pages_restored"] == 48


def test_a_mover_that_dies_loses_the_load_and_whoever_waits_learns_it(
    daemon: DaemonProcess,
) -> None:
    tokens, _ = published_and_gone(daemon, [0, 1])
    with RawClient(daemon.runtime_dir, "b", layers=LAYERS) as b:
        wait_until(lambda: b.stats()["pools"] == 1)
        landings = Landings(b.pool_memory.timelines)
        landing = landings.begin(LAYERS)
        assert landing is not None
        lost: list[str] = []

        def forward() -> None:
            try:
                landing.wait_until(0, DEADLINE_S)
            except LoadLost as error:
                lost.append(str(error))

        waiting = threading.Thread(target=forward)
        waiting.start()
        never = b.pool_memory.now()[0] + 1, 0  # the targets are not quiet before the mover dies
        seq = ask(b, tokens, [7, 8], landing, never)
        os.kill(b.stats()["daemon_mover_pid"], signal.SIGKILL)
        answer = b.answer_to(seq)
        assert isinstance(answer, Restored)
        assert not answer.landed
        assert not landing.take_answer(landed=False, detail=answer.detail)
        waiting.join(DEADLINE_S)
        assert len(lost) == 1
        daemon.wait_for_mover(2)
        again = landings.begin(LAYERS)
        assert again is not None
        seq = ask(b, tokens, [7, 8], again, b.pool_memory.now())
        again.wait_until(LAYERS - 1, DEADLINE_S)
        assert isinstance(b.answer_to(seq), Restored)


def test_a_scheduler_that_waits_no_more_has_its_load_lost_early(daemon: DaemonProcess) -> None:
    tokens, _ = published_and_gone(daemon, [0, 1])
    with RawClient(daemon.runtime_dir, "b", layers=LAYERS) as b:
        wait_until(lambda: b.stats()["pools"] == 1)
        landing = Landings(b.pool_memory.timelines).begin(LAYERS)
        assert landing is not None
        forward, current = b.pool_memory.now()
        seq = ask(b, tokens, [7, 8], landing, (forward + 1, current))
        with pytest.raises(LoadLost):
            landing.wait_until(0, 0.01)
        b.pool_memory.timelines.write(0, forward + 1)
        answer = b.answer_to(seq)
        assert isinstance(answer, Restored)
        assert not answer.landed
        assert "its owner gave the load up" in answer.detail
        assert b.pool_memory.read(7) == bytes(len(b.pool_memory.read(7))), "nothing was copied"
