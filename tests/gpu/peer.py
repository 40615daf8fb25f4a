"""A scheduler process for GPU tests: `python -m tests.gpu.peer --fd N`. Uses torch, as SGLang does.

Owns pools in torch's memory (or virtual memory of its own) and exports them. It knows nothing of a
daemon: the test hands what it says on to a mover.
"""

import argparse
import gc
import os
import select
import socket
import sys
import time
from typing import Any

import msgspec
import torch

from directory.core.errors import TreecoredError
from directory.core.ids import CURRENT, FORWARD
from tests.gpu import peer_messages as m
from tests.gpu.peer_pool import PeerPool, carve, export_odd
from transfer.ipc.channel import FdChannel, close_fds
from transfer.ipc.cuda_driver import Driver, load_api, visible_devices
from transfer.ipc.cuda_sync import StreamWaiter


class PeerProcess:
    """The loop of the process."""

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        torch.zeros(1, device="cuda:0")
        self._uuid = next(u for u, ordinal in visible_devices(load_api()).items() if ordinal == 0)
        self._driver = Driver.open(self._uuid)
        self._pools: dict[str, PeerPool] = {}
        self._decoder = msgspec.msgpack.Decoder(m.ToPeer)

    def run(self) -> None:
        """Serve until told to quit."""
        self._say(m.Hello(self._uuid, str(torch.__version__)))
        while True:
            select.select([self._channel], [], [])
            for payload, fds in self._channel.receive():
                close_fds(fds)
                request = self._decoder.decode(payload)
                if isinstance(request, m.Quit):
                    return
                try:
                    self._handle(request)
                except TreecoredError as error:
                    self._say(m.Failed(error.code, str(error)))

    def _handle(self, request: Any) -> None:
        match request:
            case m.Create():
                pool = PeerPool.create(self._driver, request)
                self._pools[request.name] = pool
                self._say(pool.describe(), pool.fds)
                pool.close_sent()
            case m.Carve():
                pools = carve(self._driver, request)
                self._pools |= {pool.name: pool for pool in pools}
                self._say(
                    m.Pools(tuple(p.describe() for p in pools)), [fd for p in pools for fd in p.fds]
                )
            case m.Fill():
                self._pools[request.name].fill(request.seed, request.value)
                self._say(m.Done())
            case m.Read():
                self._say(m.Content(self._pools[request.name].read(request.pages)))
            case m.LateWrite():
                self._say(self._pools[request.name].late_write(request))
            case m.Bump():
                self._pools[request.name].words.bump(request.slot)
                self._say(m.Done())
            case m.WaitFor():
                self._say(self._wait_for(request))
            case m.Forward():
                self._say(self._pools[request.name].begin_forward(request))
            case m.Collect():
                self._say(self._pools[request.name].collect_forward(request))
            case m.Drop():
                for name in [request.name] if request.name else list(self._pools):
                    self._pools.pop(name).close()
                _give_memory_back()
                self._say(m.Done())
            case m.DropEvents():
                self._pools[request.name].drop_events()
                gc.collect()
                self._say(m.Done())
            case m.ExportOdd():
                self._say(export_odd(self._driver, request.how))
            case m.MemoryInfo():
                with self._driver.current():
                    self._say(m.Free(*self._driver.memory_info()))

    def _wait_for(self, request: m.WaitFor) -> m.Waited:
        pool = self._pools[request.name]
        with pool.unregistered():
            waiter = StreamWaiter(self._driver, pool.timelines)
            stream = torch.cuda.Stream()
            started = time.monotonic()
            waiter.wait(stream.cuda_stream, request.index, request.value, request.deadline_s)
            self._say(m.Done("waiting"))
            stream.synchronize()
            seconds = time.monotonic() - started
            lost = waiter.lost(request.index, request.value)
            waiter.close()
        return m.Waited(lost, seconds)

    def _say(self, message: m.FromPeer, fds: list[int] | None = None) -> None:
        self._channel.send(msgspec.msgpack.encode(message), fds or [])
        self._channel.wait_sent(30.0)


def _give_memory_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> int:
    """Run on an inherited descriptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    channel = FdChannel(socket.socket(fileno=parser.parse_args().fd))
    PeerProcess(channel).run()
    return 0


assert (FORWARD, CURRENT) == (0, 1), "Position is (forward, current)"

if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
