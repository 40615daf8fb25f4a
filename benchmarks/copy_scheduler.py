"""A scheduler process for the copy benchmark: `python -m benchmarks.copy_scheduler --fd N`.

Owns the loop and the answers; what memory and steps are made of lies in copy_gpu.py (torch, as an
engine has them) and copy_host.py (the dry run). It knows nothing of a daemon or a mover.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
from array import array
from typing import Protocol

import msgspec

from benchmarks import copy_messages as m
from directory.core.errors import TreecoredError
from scheduler_shim.staging import Staging
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import TimelineTable, WordTable

WORDS = 64
LANDINGS_MADE = 4


class Substrate(Protocol):
    """What the process is made of: memory, steps and copies within its own device."""

    device: str
    versions: str

    def make(self, request: m.MakeMemory) -> tuple[tuple[MemoryHandle, ...], list[int]]:
        """Allocate and export; the descriptors stay here and are closed with the process."""
        ...

    def tables(self, name: str) -> tuple[TimelineTable, WordTable]:
        """The tables of a memory."""
        ...

    def fill(self, name: str, seed: int) -> None:
        """Write bytes that differ everywhere."""
        ...

    def digest(self, request: m.Digest) -> bytes:
        """SHA-256 of pages."""
        ...

    def make_slab(self, request: m.MakeSlab) -> Staging:
        """Make a slab for a memory, and begin to serve its ring."""
        ...

    def step(self) -> None:
        """Queue one decode-like step; bounded: waits while several are queued."""
        ...

    def step_times_us(self) -> array[float]:
        """Wait for the queued steps; what each took since the last call."""
        ...


class Scheduler:
    """The loop."""

    def __init__(self, channel: FdChannel, substrate: Substrate) -> None:
        self._channel = channel
        self._substrate = substrate
        self._stepping = False
        self._decoder = msgspec.msgpack.Decoder(m.ToScheduler)

    def run(self) -> None:
        """Serve until told to quit, or until the benchmark is gone."""
        self._say(m.Hello(self._substrate.device, self._substrate.versions))
        while True:
            if self._stepping:
                self._substrate.step()
            if not select.select([self._channel], [], [], 0 if self._stepping else None)[0]:
                continue
            try:
                frames = self._channel.receive()
            except ChannelClosed:
                return
            for payload, fds in frames:
                close_fds(fds)
                request = self._decoder.decode(payload)
                if isinstance(request, m.Quit):
                    return
                try:
                    self._handle(request)
                except TreecoredError as error:
                    self._say(m.Failed(str(error)))

    def _handle(self, request: m.ToScheduler) -> None:
        substrate = self._substrate
        match request:
            case m.MakeMemory():
                handles, fds = substrate.make(request)
                timelines, words = substrate.tables(request.name)
                self._say(m.Memory(handles), [*fds, timelines.fd, words.fd])
            case m.StartSteps():
                self._stepping = True
                self._say(m.Done())
            case m.StopSteps():
                self._stepping = False
                self._say(m.Steps(substrate.step_times_us().tobytes()))
            case m.Fill():
                substrate.fill(request.name, request.seed)
                self._say(m.Done())
            case m.Digest():
                self._say(m.Digested(substrate.digest(request)))
            case m.MakeSlab():
                staging = substrate.make_slab(request)
                self._say(m.Memory((staging.handle,)), [*staging.slab_fds, *staging.fds])

    def _say(self, message: m.FromScheduler, fds: list[int] | None = None) -> None:
        self._channel.send(msgspec.msgpack.encode(message), fds or ())
        while self._channel.want_write:
            select.select([], [self._channel], [])
            self._channel.flush()


def main() -> int:
    """Serve on an inherited socket."""
    parser = argparse.ArgumentParser(prog="benchmarks.copy_scheduler")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda", "model"), required=True)
    options = parser.parse_args()
    substrate: Substrate
    if options.device == "cuda":
        from benchmarks.copy_gpu import GpuSubstrate

        substrate = GpuSubstrate()
    elif options.device == "model":
        from benchmarks.copy_model import ModelSubstrate

        substrate = ModelSubstrate()
    else:
        from benchmarks.copy_host import HostSubstrate

        substrate = HostSubstrate()
    Scheduler(FdChannel(socket.socket(fileno=options.fd)), substrate).run()
    # What is mapped elsewhere must not be tidied up here piece by piece: the process just ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
