"""CUDA IPC events as a sync backend: for where streams cannot write into registered memory.

Owns a ring of events a timeline. The producer records the event of a value and then writes the
value into the shared table ("recorded"); the consumer asks the event, never waits for it. An
event that is gone must never look like one that was reached: the table says whether its owner
still holds the events, and is asked both before they are opened and after every query.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from directory.core.errors import ImportFailed, TransferError
from directory.core.ids import LANDINGS
from transfer.ipc.cuda_driver import HANDLE_BYTES, CudaError, Driver, fill_struct, raw_bytes
from transfer.ipc.sync import (
    EVENT_SYNC,
    TIMELINES,
    CounterTable,
    OutOfTable,
    SyncHandle,
    TimelineTable,
)

RING = 16
"""Events a timeline: an event is recorded again after so many values, so a consumer that is so far
behind learns of a value only when a later one is reached. Late, never early."""
OPEN_INDEX = TIMELINES
"""Counter behind the timelines: 1 while the owner holds its events, 2 once it has let go."""
HOLDS, GONE = 1, 2
assert OPEN_INDEX < LANDINGS, "a mover writes landing counters only"
EVENT_FLAGS = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS


class EventTimelines:
    """The producer's side. The table needs one counter more than there are timelines."""

    def __init__(self, driver: Driver, table: TimelineTable) -> None:
        self._driver = driver
        self._table = table
        with driver.current():
            self._events = [
                [driver.call("cuEventCreate", EVENT_FLAGS) for _ in range(RING)]
                for _ in range(TIMELINES)
            ]
        table.write(OPEN_INDEX, HOLDS)

    @staticmethod
    def table_counters() -> int:
        """Counters that the table needs."""
        return OPEN_INDEX + 1

    def handle(self) -> SyncHandle:
        """What a registration says; the events live until `close`."""
        with self._driver.current():
            handles = tuple(
                raw_bytes(self._driver.call("cuIpcGetEventHandle", event), HANDLE_BYTES)
                for ring in self._events
                for event in ring
            )
        return SyncHandle(EVENT_SYNC, msgspec.msgpack.encode(handles))

    def signal(self, stream: int, index: int, value: int) -> None:
        """Record the event of a value in the stream; returns at once."""
        with self._driver.current():
            self._driver.call("cuEventRecord", self._events[index][value % RING], stream)
        # Only now: whoever reads the value must find the record in the event.
        self._table.write(index, value)

    def close(self) -> None:
        """Let go of the events; every consumer's fences are void from then on. Repeatable."""
        self._table.write(OPEN_INDEX, GONE)
        with self._driver.current():
            for ring in self._events:
                for event in ring:
                    self._driver.call("cuEventDestroy", event)
        self._events.clear()


class EventReader:
    """The consumer's side: implements `Timelines` over a pool's table and events."""

    what = "timeline"

    def __init__(self, driver: Driver, table: CounterTable, rings: Sequence[Sequence[Any]]) -> None:
        self._driver = driver
        self._table = table
        self._rings = rings
        self._passed = [0] * len(rings)
        self._closed = False

    @classmethod
    def open(cls, driver: Driver, table: TimelineTable, handle: SyncHandle) -> "EventReader":
        """Open the events and take the table over. Raises `ImportFailed`; it is closed then."""
        opened: list[Any] = []
        try:
            raw = _decode(handle)
            if len(table) <= OPEN_INDEX or table.read(OPEN_INDEX) != HOLDS:
                raise ImportFailed(
                    "the owner of the events has let go of them; it must hold them as long as "
                    "its pool is registered"
                )
            with driver.current():
                for piece in raw:
                    struct = fill_struct(driver.api.CUipcEventHandle(), piece)
                    opened.append(driver.call("cuIpcOpenEventHandle", struct))
            rings = [opened[at : at + RING] for at in range(0, len(opened), RING)]
            return cls(driver, table, rings)
        except (CudaError, ImportFailed) as error:
            _destroy(driver, opened)
            table.close()
            raise ImportFailed(f"the events of the pool cannot be used: {error}") from error

    def read(self, index: int) -> int:
        """Highest value known to be passed. Raises `TransferError` once the events are gone."""
        if not 0 <= index < len(self._rings):
            raise OutOfTable(f"timeline {index} of {len(self._rings)}")
        recorded = self._table.read(index)
        first = max(self._passed[index] + 1, recorded - RING + 1)
        passed = self._passed[index]
        # The newest first: what it has reached, all before it have.
        for value in range(recorded, first - 1, -1):
            if self._driver.ready(self._rings[index][value % RING]):
                passed = value
                break
        if self._table.read(OPEN_INDEX) != HOLDS:
            raise TransferError("the owner of the pool's events has let go of them")
        self._passed[index] = passed
        return passed

    def close(self) -> None:
        """Close the events and the table. Repeatable."""
        if not self._closed:
            self._closed = True
            _destroy(self._driver, [event for ring in self._rings for event in ring])
            self._table.close()


def _decode(handle: SyncHandle) -> tuple[bytes, ...]:
    try:
        raw = msgspec.msgpack.decode(handle.opaque, type=tuple[bytes, ...])
    except msgspec.DecodeError as error:
        raise ImportFailed(f"the event handles cannot be decoded: {error}") from None
    if len(raw) != TIMELINES * RING or any(len(piece) != HANDLE_BYTES for piece in raw):
        raise ImportFailed(
            f"{TIMELINES * RING} event handles of {HANDLE_BYTES} bytes belong to a pool"
        )
    return raw


def _destroy(driver: Driver, events: Sequence[Any]) -> None:
    with driver.current():
        for event in events:
            driver.call("cuEventDestroy", event)
