"""Addresses are given, kept, taken away and refused; what a publisher does without its daemon."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from directory.core import limits
from directory.daemon.kv_publisher import (
    EMPTY_AFTER_US,
    JOIN_AGAIN_US,
    TURN_MS_MAX,
    Publisher,
)
from directory.kvevents.addresses import Address, Options
from directory.kvevents.records import AnyRecord, Begin, Closed, Opened, Whole, encode
from tests.ports import free_ports

PORTS = 12
DEADLINE_S = 10.0


class Rig:
    """A publisher that a test turns by hand, and the daemon's end of its feed."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.base = free_ports(PORTS)
        self.listing_path = folder / "kv_events.json"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.feed = self.context.socket(zmq.PUSH)
        self.feed.bind(f"ipc://{folder}/feed")
        self.publisher = Publisher(
            Options(
                feed=f"ipc://{folder}/feed",
                parent=0,
                base=Address(host, self.base),
                union=Address(host, self.base + 9),
                listing=str(self.listing_path),
            )
        )
        self.tell(Begin(), Whole())

    def tell(self, *records: AnyRecord) -> None:
        """Hand records on, and have them published."""
        self.feed.send(encode(list(records)))
        self.publisher.turn(10_000)

    @property
    def listing(self) -> dict[str, dict[str, str]]:
        listing: dict[str, dict[str, str]] = json.loads(self.listing_path.read_text())
        return listing

    def port(self, instance: str) -> int:
        """The port of an instance's events."""
        return int(self.listing[instance]["events"].rpartition(":")[2])

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        rig = Rig(Path(folder))
        yield rig
        rig.close()


def opened(pool: int, instance: str) -> Opened:
    return Opened(pool, instance, 1, 16)


def test_each_instance_gets_the_next_three_ports(rig: Rig) -> None:
    rig.tell(opened(1, "a"))
    rig.tell(opened(2, "b"))
    assert (rig.port("a"), rig.port("b")) == (rig.base, rig.base + 3)
    assert rig.port("") == rig.base + 9


def test_who_comes_back_has_its_address_again(rig: Rig) -> None:
    rig.tell(opened(1, "a"), opened(2, "b"))
    before = rig.listing
    rig.tell(Closed(1))
    rig.tell(opened(3, "a"))
    assert rig.listing == before


def test_the_address_of_who_is_gone_goes_to_another_only_when_there_is_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_EVENTS_SCHEDULERS_MAX", 2)
    rig.tell(opened(1, "a"))
    rig.tell(opened(2, "b"))
    rig.tell(opened(3, "c"))
    assert rig.listing.keys() == {"", "a", "b"}
    rig.tell(Closed(2))
    rig.tell(opened(4, "d"))
    assert rig.listing.keys() == {"", "a", "d"}
    assert rig.port("d") == rig.base + 3


def test_who_never_had_an_address_is_forgotten_when_it_goes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_EVENTS_SCHEDULERS_MAX", 1)
    rig.tell(opened(1, "a"))
    rig.tell(opened(2, "b"))
    rig.tell(Closed(2))
    assert rig.publisher.known == {"a"}


def test_ports_that_do_not_exist_are_refused(rig: Rig) -> None:
    rig.publisher.base = Address("127.0.0.1", 65_531)
    rig.tell(opened(1, "a"))
    rig.tell(opened(2, "b"))
    assert rig.listing.keys() == {"", "a"}


def test_it_listens_on_the_other_loopback_too() -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        rig = Rig(Path(folder), "[::1]")
        try:
            rig.tell(opened(1, "a"))
            if not rig.listing_path.exists():
                pytest.skip("there is no IPv6 here")
            assert rig.listing["a"]["http"] == f"http://[::1]:{rig.base + 2}"
        finally:
            rig.close()


def test_it_waits_until_something_has_to_be_done_and_no_longer(rig: Rig) -> None:
    publisher = rig.publisher
    assert publisher.wait_ms() == TURN_MS_MAX
    rig.tell(opened(1, "a"))
    (outlet,) = (outlet for outlet in publisher._outlets.values() if outlet.instance == "a")
    assert publisher.wait_ms() == TURN_MS_MAX
    # Silence is broken in time...
    silent_us = EMPTY_AFTER_US - 300_000
    for each in publisher._outlets.values():
        each.stream.sent_us = time.time_ns() // 1000 - silent_us
    assert 200 < publisher.wait_ms() <= 301
    before = outlet.stream.next_sequence
    give_up = time.monotonic() + DEADLINE_S
    while outlet.stream.next_sequence == before and time.monotonic() < give_up:
        publisher.turn(publisher.wait_ms())
    assert time.time_ns() // 1000 - outlet.stream.sent_us < 200_000
    assert outlet.stream.next_sequence == before + 1
    # ...and who subscribes waits for others who do, no longer.
    outlet.count(joined=True)
    assert 0 < publisher.wait_ms() <= JOIN_AGAIN_US // 1000 + 1
    while outlet.joined_us and time.monotonic() < give_up:
        publisher.turn(publisher.wait_ms())
    assert outlet.told_us
    assert outlet.stream.next_sequence == before + 2
    outlet.count(joined=True)  # they were told a moment ago
    assert (JOIN_AGAIN_US - 300_000) // 1000 < publisher.wait_ms() <= JOIN_AGAIN_US // 1000
