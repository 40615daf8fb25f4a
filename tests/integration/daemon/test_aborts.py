"""A request that ends at any step leaves no lease and no pin behind, whoever has forgotten it."""

import pytest

from directory.core.actions import Matched, Refused, Restored
from directory.core.events import Live, Restore, Unlock
from tests.integration.daemon.support import PAGE_SIZE, DaemonProcess, RawClient, packed, wait_until

STEPS = ("matched", "load submitted", "load landed", "published")
PAGES = 4
PATH = range(100, 100 + PAGE_SIZE * PAGES)
TARGETS = range(20, 20 + PAGES)


def go_to(step: str, client: RawClient) -> tuple[int, int]:
    """Take a request as far as a step; returns its receipt and the number of its load."""
    found = client.match(PATH)
    assert isinstance(found, Matched)
    assert found.restorable_pages == PAGES
    if step == "matched":
        return found.receipt, 0
    seq = client.send(Restore("r", 0, found.receipt, 0, packed(TARGETS), _fence(client, step)))
    if step == "load submitted":
        wait_until(lambda: client.stats()["copies_in_flight"])
        return found.receipt, seq
    answer = client.answer_to(seq)
    assert isinstance(answer, Restored)
    assert answer.landed
    if step == "published":
        client.insert(PATH, TARGETS)
    return found.receipt, seq


def _fence(client: RawClient, step: str) -> tuple[int, int]:
    """A load that is to stay under way waits for the test."""
    forward, current = client.pool_memory.now()
    return (forward + (step == "load submitted"), current)


def let_load_go_on(client: RawClient) -> None:
    """Let the fence of a load pass."""
    client.pool_memory.timelines.write(0, client.pool_memory.timelines.read(0) + 1)


def at_rest(client: RawClient) -> bool:
    """Nothing is leased, pinned or under way; every invariant holds (`stats` asks)."""
    figures = client.stats()
    names = ("leases", "host_pages_leased", "copies_in_flight")
    return not any(figures[name] for name in names)


@pytest.mark.parametrize("how", ["released", "forgotten", "owner gone"])
@pytest.mark.parametrize("step", STEPS)
def test_a_request_that_ends_at_any_step_leaves_nothing_locked_f72(
    daemon: DaemonProcess, step: str, how: str
) -> None:
    with (
        RawClient(daemon.runtime_dir, "a") as a,
        RawClient(daemon.runtime_dir, "witness") as witness,
    ):
        for page in range(PAGES):
            a.pool_memory.write(page, b"page")
        a.insert(PATH, range(PAGES))
        wait_until(lambda: a.stats()["host_pages"] == PAGES)
        client = RawClient(daemon.runtime_dir, "b")
        receipt, load = go_to(step, client)
        assert witness.stats()["leases"] == 1
        if how == "owner gone":
            client.close()
        elif how == "released":
            client.report(Unlock(receipt))
            again = client.ask(Unlock(receipt))
            assert isinstance(again, Refused), "once, and twice is harmless"
            assert again.code == "stale_receipt"
        else:
            client.report(Live(()))
        assert witness.stats()["leases"] == 0 or how == "owner gone"
        if how != "owner gone":
            if step == "load submitted":
                assert witness.stats()["copies_in_flight"] == 1, "its pages are the mover's still"
                let_load_go_on(client)
                assert isinstance(client.answer_to(load), Restored)
            wait_until(lambda: at_rest(client))
            client.close()
        wait_until(lambda: witness.stats()["pools"] == 2)
        wait_until(lambda: at_rest(witness))
        found = witness.match(PATH)
        assert isinstance(found, Matched)
        assert found.restorable_pages == PAGES, "and what was published is there"
