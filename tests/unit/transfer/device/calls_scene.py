"""A device with a thread that makes the calls, on a driver whose lists wait for the test."""

import ctypes
import threading
import time
from collections import deque
from typing import Any

from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device.cuda import CudaDevice
from transfer.device.protocol import Completion
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

DEADLINE_S = 10.0
RANGES_MIN = 32
CHUNK, CHUNKS = 8, 256
SIZE = CHUNK * CHUNKS
GPU, HOST = (1, 0), (-1, 0)


class SlowDriver(FakeDriver):
    """Its copies wait at a gate that the test opens; remembers which thread called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waits = threading.Event()
        self.callers: list[tuple[str, int]] = []

    def call(self, function: str, *arguments: Any) -> Any:
        self.callers.append((function, threading.get_ident()))
        if function == "cuMemcpyAsync" and not self.gate.is_set():
            self.waits.set()
            assert self.gate.wait(DEADLINE_S)
        return super().call(function, *arguments)


class MovingDriver(FakeDriver):
    """Moves bytes when it is asked for an event that stands behind them, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.streams: dict[Any, deque[tuple[Any, ...]]] = {}
        self.reached_events: set[Any] = set()
        self.where: dict[Any, Any] = {}

    def call(self, function: str, *arguments: Any) -> Any:
        with self.lock:
            if function == "cuMemcpyAsync":
                target, source, nbytes, stream = arguments
                self.streams.setdefault(stream, deque()).append((target, source, nbytes))
            elif function == "cuEventRecord":
                event, stream = arguments
                self.streams.setdefault(stream, deque()).append((event,))
                self.where[event] = stream
                self.reached_events.discard(event)
            return super().call(function, *arguments)

    def ready(self, event: Any) -> bool:
        with self.lock:
            queue = self.streams.get(self.where.get(event), deque())
            while event not in self.reached_events and queue:
                entry = queue.popleft()
                if len(entry) == 1:
                    self.reached_events.add(entry[0])
                else:
                    ctypes.memmove(*entry)
            return True  # one that was never recorded, or is from before, has been reached


def ranges(count: int) -> RangeBatch:
    """A list from the host of so many ranges."""
    found = [(n * CHUNK, n * CHUNK, CHUNK) for n in range(count)]
    return RangeBatch(HOST, GPU, found, count * CHUNK)


class Scene:
    """A device with a thread beside it, the host's memory and what stands for a GPU's."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.ipc = SharedMemoryIPC()
        self.host: SharedMapping = self.ipc.create("host", SIZE)
        self.memory = ctypes.create_string_buffer(SIZE)
        self.device = CudaDevice(driver)
        self.device.submit_beside(RANGES_MIN)
        physical = Physical(b"", ctypes.addressof(self.memory), SIZE, lambda: None)
        self.device.attach(GPU, CudaMapping(physical, 0, SIZE, "GPU-fake"))
        self.device.attach(HOST, self.host)

    def polled(self, count: int) -> list[Completion]:
        """Until so many are done."""
        done: list[Completion] = []
        until = time.monotonic() + DEADLINE_S
        while len(done) < count and time.monotonic() < until:
            done += self.device.poll()
        return done

    def close(self) -> None:
        self.device.close()
        self.ipc.close(self.host)


def gate_of(scene: Scene) -> SlowDriver:
    assert isinstance(scene.driver, SlowDriver)
    return scene.driver
