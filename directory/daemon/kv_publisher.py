"""The publisher's process: records in from the daemon, events out to whoever listens.

Owns the sockets, the streams and their addresses; what is told is the teller's. One thread around
one poller, and a thread of HTTP a stream. It dies with the daemon, which never waits for it.

Every stream has an XPUB socket, so that a subscription is seen: then everything follows on the live
stream, for who comes late knows nothing. It begins with a clear (who comes again may know what is
no more) unless others listen, too: a router must not be blind for a moment whenever a viewer comes.
An empty batch now and then lets those who missed something notice the gap and ask for a replay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog
import zmq

from directory.core import limits
from directory.daemon.kv_web import Web
from directory.kvevents.addresses import Address, Options, server_info
from directory.kvevents.records import AnyRecord, decode
from directory.kvevents.stream import Stream
from directory.kvevents.teller import Teller
from directory.kvevents.union import UNION
from directory.kvevents.wire import Event, asked_from

EMPTY_AFTER_US: Final = 5_000_000
"""Silence after which an empty batch is sent."""
JOIN_PAUSE_US: Final = 100_000
"""Subscribers that come within so much of the first are told everything together."""
JOIN_AGAIN_US: Final = 1_000_000
"""Everything is told to late subscribers of a stream no more often than this."""
MESSAGES_AT_ONCE: Final = 16
TURN_MS_MAX: Final = 1_000
"""So long a turn waits at most: times of day may be set back."""
REQUEST_BYTES_MAX: Final = 1_024
QUEUED_MAX: Final = 100_000
"""Batches that a slow subscriber may be behind before it loses some (SGLang's own default)."""

log = structlog.get_logger("kv_events")


class Outlet:
    """The sockets of one stream; raises `OSError` or `zmq.ZMQError` where they cannot be had."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        instance: str,
        address: Address,
        stream: Stream,
        web: Callable[[], Web],
    ) -> None:
        self.instance = instance
        self.address = address
        self.stream = stream
        self.told_us = 0
        self.joined_us = 0
        """When somebody subscribed who has not been told everything yet, or 0."""
        self.listening = 0
        """Subscriptions now, and (`others`) before those who have not been told everything."""
        self.others = 0
        self.events = context.socket(zmq.XPUB)
        self.replay = context.socket(zmq.ROUTER)
        self.web: Web | None = None
        try:
            self.events.setsockopt(zmq.XPUB_VERBOSER, 1)
            self.events.setsockopt(zmq.SNDHWM, QUEUED_MAX)
            # A replay is sent at once, and what is beyond the mark would be dropped in silence.
            self.replay.setsockopt(zmq.SNDHWM, 2 * limits.KV_EVENTS_REPLAY_BATCHES_MAX)
            for socket, where in ((self.events, address.events), (self.replay, address.replay)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, int(address.host.startswith("[")))
                socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
                socket.bind(where)
            self.web = web()
        except BaseException:
            self.close()
            raise

    def due_us(self) -> int:
        """When something has to be done though nobody says anything."""
        if self.joined_us:
            return max(self.joined_us + JOIN_PAUSE_US, self.told_us + JOIN_AGAIN_US)
        return self.stream.sent_us + EMPTY_AFTER_US + 1

    def count(self, joined: bool) -> None:
        """Somebody subscribed, or left."""
        if joined and not self.joined_us:
            self.joined_us = _now_us()
            self.others = self.listening
        self.listening = max(0, self.listening + (1 if joined else -1))

    def send(self, events: list[Event]) -> None:
        """Publish one batch."""
        self.events.send_multipart(self.stream.publish(events))

    def close(self) -> None:
        """Close everything. Repeatable."""
        self.events.close(linger=0)
        self.replay.close(linger=0)
        if self.web is not None:
            self.web.close()
            self.web = None


class Publisher:
    """One publisher. `base`: the address of the first scheduler's stream."""

    def __init__(self, options: Options) -> None:
        self.base = options.base
        self._options = options
        self._teller = Teller(union=options.union is not None)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._feed = self._context.socket(zmq.PULL)
        self._feed.setsockopt(zmq.RCVHWM, limits.KV_EVENTS_MESSAGES_QUEUED)
        self._feed.connect(options.feed)
        self._poller.register(self._feed, zmq.POLLIN)
        self._outlets: dict[str, Outlet] = {}
        self._slots: list[str] = []
        """Instances by slot; the address of one that is gone is its own until it is needed."""
        self._refused: set[str] = set()

    def run(self) -> None:
        """Publish for ever. Nobody is woken for nothing: cores are shared with who asks."""
        while True:
            self.turn(self.wait_ms())

    def wait_ms(self) -> int:
        """How long nothing has to be done though nobody says anything."""
        due_us = min((outlet.due_us() for outlet in self._outlets.values()), default=None)
        if due_us is None:
            return TURN_MS_MAX
        return min(TURN_MS_MAX, max(0, -(-(due_us - _now_us()) // 1000)))

    def turn(self, timeout_ms: int) -> None:
        """Wait for something, at most so long, and serve it."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._feed in ready:
            self._take()
        for outlet in list(self._outlets.values()):
            if outlet.events in ready:
                self._hear(outlet)
            if outlet.replay in ready:
                self._replay(outlet)
            self._on_time(outlet)

    @property
    def known(self) -> set[str]:
        """Instances that are remembered."""
        return set(self._teller.instances)

    def close(self) -> None:
        """Close everything."""
        for outlet in self._outlets.values():
            outlet.close()
        self._feed.close(linger=0)
        self._context.term()

    # The daemon's side.

    def _take(self) -> None:
        records: list[AnyRecord] = []
        for _ in range(MESSAGES_AT_ONCE):
            try:
                records += decode(self._feed.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        told = self._teller.take(records)
        self._open(set(told))
        for instance, batches in told.items():
            outlet = self._outlets.get(instance)
            if outlet is None:
                continue
            for batch in batches:
                outlet.send(batch)
                if batch[0] is None:
                    outlet.told_us = _now_us()

    def _open(self, told: set[str]) -> None:
        """Give everyone who has something to say an address, and note it down."""
        known = set(self._outlets)
        for instance in told - known - {UNION}:
            pool = self._teller.instances.get(instance)
            if pool is not None:
                self._give_slot(instance, self._teller.ledger.open[pool].page_size)
            elif instance not in self._slots:
                self._drop(instance)  # it never had an address, and is gone
        page_size = self._teller.union_page_size
        if UNION not in known and page_size and self._options.union:
            self._listen(UNION, self._options.union, page_size)
        if self._outlets.keys() != known:
            self._write_listing()

    def _give_slot(self, instance: str, page_size: int) -> None:
        if instance in self._slots:
            slot = self._slots.index(instance)
        elif len(self._slots) < limits.KV_EVENTS_SCHEDULERS_MAX:
            slot = len(self._slots)
            self._slots.append(instance)
        else:
            gone = [name for name in self._slots if self._teller.instances.get(name) is None]
            if not gone:
                self._refuse(instance, "every address is taken by a scheduler that is alive")
                return
            slot = self._slots.index(gone[0])
            self._drop(gone[0])
            self._slots[slot] = instance
        self._listen(instance, self.base.at(slot), page_size)

    def _drop(self, instance: str) -> None:
        outlet = self._outlets.pop(instance, None)
        if outlet is not None:
            self._poller.unregister(outlet.events)
            self._poller.unregister(outlet.replay)
            outlet.close()
        self._refused.discard(instance)
        self._teller.drop(instance)

    def _listen(self, instance: str, address: Address, page_size: int) -> None:
        options = self._options
        if not address.possible:
            self._refuse(instance, "there are no more ports")
            return
        stream = Stream(options.form, _now_us)
        info = server_info(address, page_size, instance, options)
        try:
            outlet = Outlet(
                self._context,
                instance,
                address,
                stream,
                lambda: Web(address.bind_host, address.http_port, info, options.detokenizer),
            )
        except (OSError, zmq.ZMQError) as error:
            self._refuse(instance, f"{address.events} and the two ports after it: {error}")
            return
        self._outlets[instance] = outlet
        self._refused.discard(instance)
        self._poller.register(outlet.events, zmq.POLLIN)
        self._poller.register(outlet.replay, zmq.POLLIN)
        log.info(
            "kv events",
            instance=instance or "(all)",
            events=address.events,
            replay=address.replay,
            http=address.http,
        )

    def _refuse(self, instance: str, reason: str) -> None:
        if instance not in self._refused:
            self._refused.add(instance)
            log.error("no kv events", instance=instance or "(all)", reason=reason)

    def _write_listing(self) -> None:
        """A file for whoever configures consumers: where each scheduler's stream is."""
        if self._options.listing is None:
            return
        listing = {
            name: {
                "events": outlet.address.events,
                "replay": outlet.address.replay,
                "http": outlet.address.http,
            }
            for name, outlet in self._outlets.items()
        }
        place = Path(self._options.listing)
        beside = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(listing)) + b"\n")
            beside.replace(place)
        except OSError as error:
            log.warning("the list of streams cannot be written", reason=str(error))

    # The consumers' side.

    def _hear(self, outlet: Outlet) -> None:
        """Somebody subscribed (or left)."""
        for _ in range(MESSAGES_AT_ONCE):
            try:
                message = outlet.events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            outlet.count(message[:1] == b"\x01")

    def _replay(self, outlet: Outlet) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            try:
                identity, *frames = outlet.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            first = asked_from(frames)
            if first is None:
                continue
            everything = lambda: self._teller.everything(outlet.instance)  # noqa: E731
            for reply in outlet.stream.replay(first, everything):
                try:
                    outlet.replay.send_multipart([identity, *reply], zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    log.info("replay cut short", instance=outlet.instance, reason=str(error))
                    break

    def _on_time(self, outlet: Outlet) -> None:
        now = _now_us()
        if now < outlet.due_us():
            return
        if outlet.joined_us:
            outlet.joined_us = 0
            if self._teller.ledger.whole:
                outlet.told_us = now
                everything = self._teller.everything(outlet.instance)
                outlet.send(everything[1:] if outlet.others else everything)
        else:
            outlet.send([])


def _now_us() -> int:
    return time.time_ns() // 1000
