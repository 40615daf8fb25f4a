"""A router's indexer, fed with our events alone, knows what the daemon knows.

Two schedulers with prompts in common, pools and a host tier that are too small; then 1,000 prompts
are looked up in the indexer and asked of the daemon itself, for each scheduler and tier.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from directory.core.actions import Done
from directory.core.events import Flush
from directory.core.namespace import Adapter, NamespaceKey
from directory.daemon.kv_publisher import JOIN_AGAIN_US, JOIN_PAUSE_US
from tests.consumers.crowd import Prompts, Scheduler
from tests.consumers.programs import Indexer
from tests.integration.daemon.listening import streams
from tests.integration.daemon.support import PAGE_SIZE, DaemonProcess, wait_until

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(300)]
PROMPTS = 1_000


def caught_up(indexer: Indexer, number: int, scheduler: Scheduler, mark: int) -> None:
    """Wait until the indexer knows a prompt that was published after all others, and agrees about
    those (who came late is told things twice, and for a moment knows older ones again)."""
    tokens = [60_000 + mark] * PAGE_SIZE
    scheduler.compute(tokens)
    scheduler.at_rest()
    wait_until(lambda: indexer.longest(number, tokens) == (PAGE_SIZE, PAGE_SIZE))
    wait_until(
        lambda: all(
            indexer.longest(number, prompt)[0] == scheduler.look(prompt).gpu
            for prompt in scheduler.prompts[-100:]
        )
    )


def test_the_longest_match_of_each_scheduler_and_tier_is_the_daemons_own(
    python: Path, base: int, telling: DaemonProcess, tmp_path: Path
) -> None:
    prompts = Prompts(seed=1)
    with (
        Indexer(python, base + 15, tmp_path / "indexer.log") as indexer,
        Scheduler(telling.runtime_dir, "a") as a,
    ):
        with Scheduler(telling.runtime_dir, "b") as b:
            crowd = [a, b]
            where = streams(telling, "a", "b")
            indexer.register(1, where["a"])
            for at in range(400):
                if at == 200:
                    indexer.register(2, where["b"])  # late: it has missed everything
                crowd[prompts.random.randrange(2)].compute(prompts.next())
            # Who comes is told everything within so long, with a clear before it: were that later
            # than the mark, it would know nothing for a moment of the questions.
            time.sleep((JOIN_PAUSE_US + JOIN_AGAIN_US) / 1e6)
            for number, scheduler in enumerate(crowd, 1):
                caught_up(indexer, number, scheduler, number)
            questions = [prompts.next() for _ in range(PROMPTS)]
            hits = beyond = compared = 0
            for tokens in questions:
                for number, scheduler in enumerate(crowd, 1):
                    held = scheduler.look(tokens)
                    gpu, cpu = indexer.longest(number, tokens)
                    assert gpu == held.gpu
                    hits += gpu > 0
                    if not held.peer_pages:
                        # What another pool has is nothing that a router could send here for.
                        compared += 1
                        assert cpu == held.with_host
                        beyond += cpu > gpu
            assert hits > PROMPTS / 4
            assert beyond > 0
            assert compared > PROMPTS / 4
            assert a.stats()["host_pages_evicted"] > 100
        # With the other one's pool gone, all that is beyond the own one is at the host.
        caught_up(indexer, 1, a, 3)
        longer = 0
        wait_until(lambda: indexer.longest(2, b.prompts[-1]) == (0, 0))
        for tokens in questions:
            held = a.look(tokens)
            assert indexer.longest(1, tokens) == (held.gpu, held.with_host)
            assert indexer.longest(2, tokens) == (0, 0)
            longer += held.with_host > held.gpu
        assert longer > 0


def test_an_indexer_that_cannot_ask_for_a_replay_knows_everything_all_the_same(
    python: Path, base: int, telling: DaemonProcess, tmp_path: Path
) -> None:
    with (
        Scheduler(telling.runtime_dir, "a") as a,
        Indexer(python, base + 15, tmp_path / "indexer.log") as indexer,
    ):
        a.compute(list(range(8 * PAGE_SIZE)))
        a.at_rest()
        indexer.register(1, streams(telling, "a")["a"], replay=False)
        whole = (8 * PAGE_SIZE, 8 * PAGE_SIZE)
        wait_until(lambda: indexer.longest(1, list(range(8 * PAGE_SIZE))) == whole)


def test_an_indexer_follows_a_daemon_that_is_restarted(
    python: Path, base: int, tmp_path: Path
) -> None:
    flags = ["--kv-events", f"tcp://127.0.0.1:{base}"]
    tokens, other = list(range(4 * PAGE_SIZE)), list(range(500, 500 + 2 * PAGE_SIZE))
    with Indexer(python, base + 15, tmp_path / "indexer.log") as indexer:
        with (
            DaemonProcess(tmp_path / "rt", *flags) as daemon,
            Scheduler(daemon.runtime_dir, "a") as a,
        ):
            indexer.register(1, streams(daemon, "a")["a"])
            a.compute(tokens)
            wait_until(lambda: indexer.longest(1, tokens)[0] == len(tokens))
            daemon.kill()
        with (
            DaemonProcess(tmp_path / "rt", *flags) as daemon,
            Scheduler(daemon.runtime_dir, "a") as a,
        ):
            a.compute(other)
            wait_until(lambda: indexer.longest(1, other)[0] == len(other))
            assert indexer.longest(1, tokens) == (0, 0)


def test_salts_and_adapters_are_kept_apart_and_extra_keys_are_counted(
    python: Path, base: int, telling: DaemonProcess, tmp_path: Path
) -> None:
    tokens = list(range(4 * PAGE_SIZE))
    none, whole = (0, 0), (len(tokens), len(tokens))
    with (
        Scheduler(telling.runtime_dir, "a") as a,
        Indexer(python, base + 15, tmp_path / "indexer.log") as indexer,
    ):
        indexer.register(1, streams(telling, "a")["a"])

        def known() -> list[tuple[int, int]]:
            names: tuple[dict[str, str], ...] = ({}, {"cache_salt": "s"}, {"lora_name": "l"})
            return [indexer.longest(1, tokens, **name) for name in names]

        a.compute(tokens, NamespaceKey(cache_salt="s"))
        wait_until(lambda: known() == [none, whole, none])
        a.compute(tokens, NamespaceKey(adapter=Adapter("l", 1)))
        wait_until(lambda: known() == [none, whole, whole])
        for key in (NamespaceKey(extra_key="tenant"), NamespaceKey()):
            a.compute(tokens, key)
            a.at_rest()
        wait_until(lambda: known() == [whole, whole, whole])
        assert isinstance(a.ask(Flush("host")), Done)
        for left in ([whole, none, whole], [whole, none, none], [whole, none, none]):
            # In the order of their age: in the end one of the two with equal hashes is left.
            a.evict(len(tokens) // PAGE_SIZE)
            wait_until(partial(agree, known, left))
        a.evict(len(tokens) // PAGE_SIZE)
        wait_until(partial(agree, known, [none, none, none]))


def agree(known: Callable[[], list[tuple[int, int]]], expected: list[tuple[int, int]]) -> bool:
    """Whether what is known is as expected."""
    return known() == expected
