"""The worker process: one reference scheduler, driven over a channel by a demo, replay or test.

`python -m scheduler_shim.worker --fd N`: N is one end of an FdChannel that speaks
worker_messages.py. Owns the process, its pool and its client. It sleeps in one poll on the driver
and the daemon, and ends when its driver does: it must never outlive the channel.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from directory.core.actions import Counters
from directory.core.errors import ProtocolError, TreecoredError
from directory.core.events import Stats
from directory.core.namespace import NamespaceKey
from scheduler_shim.blocks import prompt_tokens
from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import DaemonDial
from scheduler_shim.link import monotonic_us
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.worker_messages import (
    DAEMON_LOST,
    AskSummary,
    Configure,
    Configured,
    Cut,
    Finished,
    FromWorker,
    Prompt,
    Quit,
    Summary,
    ToWorker,
)
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds

CHECK_DEADLINE_MS: Final = 30_000
"""A walk over the whole tree takes the daemon longer than an ordinary call."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class Worker:
    """The loop around one scheduler."""

    def __init__(self, driver: FdChannel) -> None:
        self._driver = driver
        self._scheduler: ReferenceScheduler | None = None
        self._pool: SharedPool | None = None
        self._configure: Configure | None = None
        self._quitting = False
        self._unsaid: list[Finished] = []

    def run(self) -> int:
        """Serve until the driver says Quit or is gone; returns the exit status."""
        try:
            while not (self._quitting and self._idle):
                self._receive()
                moved = self._tick()
                if self._driver.want_write:
                    self._driver.flush()
                if not moved and not (self._quitting and self._idle):
                    self._sleep()
            if self._driver.want_write:
                self._driver.wait_sent(1.0)
        except ChannelClosed:
            return 0
        finally:
            self._close()
        return 0

    # One turn of the loop.

    def _receive(self) -> None:
        for payload, fds in self._driver.receive():
            close_fds(fds)
            message = _decoder.decode(payload)
            if isinstance(message, Configure):
                self._driver_says_configure(message)
            elif isinstance(message, Prompt):
                self._driver_says_prompt(message)
            elif isinstance(message, AskSummary):
                self._say(self._summary(check=message.check))
            elif isinstance(message, Cut):
                self._cut()
            else:
                assert isinstance(message, Quit)
                self._quitting = True

    def _tick(self) -> bool:
        if self._scheduler is None:
            return False
        self._unsaid += self._scheduler.tick()
        if self._unsaid and not self._unsettled:
            for finished in self._unsaid:
                self._say(finished)
            self._unsaid.clear()
        return self._scheduler.moved

    def _sleep(self) -> None:
        """Wait for the driver or the daemon; there is nothing else to do."""
        client = self._scheduler.client if self._scheduler is not None else None
        wake_us = self._scheduler.wake_us if self._scheduler is not None else None
        if self._driver.want_write:
            # Rare: the driver does not read. Both directions are looked at now and then.
            select.select([self._driver], [self._driver], [], 0.05)
        elif client is not None and not client.lost:
            client.wait(None, (self._driver.fileno(),))
        else:
            due_s = None if wake_us is None else max(0, wake_us - monotonic_us()) / 1e6
            select.select([self._driver], [], [], due_s)

    @property
    def _idle(self) -> bool:
        return self._scheduler is None or (self._scheduler.idle and not self._unsaid)

    @property
    def _unsettled(self) -> bool:
        """Whether a finished request has to wait until its reports are acknowledged."""
        if self._configure is None or not self._configure.settle or self._scheduler is None:
            return False
        client = self._scheduler.client
        return client is not None and not client.lost and client.open_count > 0

    # What the driver says.

    def _driver_says_configure(self, configure: Configure) -> None:
        if self._scheduler is not None:
            self._say(Configured(False, detail="this worker is configured already"))
            return
        self._configure = configure
        try:
            kind = RenamedPool if configure.named else SharedPool
            pool = kind(
                page_size=configure.page_size,
                page_count=configure.page_count,
                bytes_per_token=configure.bytes_per_token,
                layers=configure.layers,
                staging_bytes=configure.staging_bytes,
            )
        except TreecoredError as error:
            self._say(Configured(False, detail=str(error)))
            return
        self._pool = pool
        client: DaemonClient | None = None
        detail = ""
        try:
            client = DaemonClient.connect(
                Path(configure.runtime_dir),
                pool,
                instance=configure.instance,
                mode=configure.mode,
            )
        except TreecoredError as error:
            detail = f"degraded: {error}"
        salt = f"private-{configure.instance}" if configure.private else None
        self._scheduler = ReferenceScheduler(
            pool,
            client,
            instance=configure.instance,
            thin=configure.mode == "thin",
            key=NamespaceKey(cache_salt=salt),
            concurrency=max(1, configure.concurrency),
            dial=DaemonDial(Path(configure.runtime_dir), pool, instance=configure.instance),
            seed=os.getpid(),
        )
        # What is there now stays until the end; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if client is None:
            self._say(Configured(False, detail=detail))
        else:
            self._say(Configured(True, client.registration.pool, client.registration.generation))

    def _driver_says_prompt(self, prompt: Prompt) -> None:
        if self._scheduler is None or self._configure is None:
            self._say(_failed(prompt.number, "a prompt before this worker was configured"))
            return
        tokens = prompt.tokens
        try:
            if prompt.blocks:
                tokens = prompt_tokens(
                    prompt.blocks, prompt.block_tokens, prompt.length, self._configure.token_seed
                )
        except TreecoredError as error:
            self._say(_failed(prompt.number, str(error)))
            return
        self._scheduler.submit(prompt.number, tokens, prompt.output)

    def _cut(self) -> None:
        client = self._scheduler.client if self._scheduler is not None else None
        if client is not None:
            client.lose("its session was cut")

    def _summary(self, *, check: bool) -> Summary:
        scheduler, configure = self._scheduler, self._configure
        if scheduler is None or configure is None:
            return Summary("", "", (), {}, {}, ("this worker was not configured",))
        violations = scheduler.check() if check else list(scheduler.problems)
        counters = dict(scheduler.counters)
        if self._pool is not None:
            counters["stage_requests"] = self._pool.stage_requests
        rtt: tuple[float, ...] = ()
        daemon: dict[str, int] = {}
        client = scheduler.client
        if client is not None:
            try:
                reply = client.call(Stats(check), CHECK_DEADLINE_MS)
            except TreecoredError as error:
                violations.append(f"the daemon refused Stats: {error}")
            else:
                if isinstance(reply, Counters):
                    daemon = reply.counters
                    violations += [f"daemon: {found}" for found in reply.violations]
                else:
                    violations.append(f"no answer to Stats: {client.lost or 'too late'}")
            rtt = tuple(client.rtt_us.values)
            counters.update({f"client_{name}": n for name, n in client.counters.items()})
        if scheduler.last_loss:
            violations.append(f"{DAEMON_LOST}{scheduler.last_loss}")
        return Summary(configure.instance, scheduler.mode, rtt, counters, daemon, tuple(violations))

    def _say(self, message: FromWorker) -> None:
        self._driver.send(_encoder.encode(message))

    def _close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._pool is not None:
            self._pool.close()
        self._driver.close()


def _failed(number: int, error: str) -> Finished:
    return Finished(number, 0, 0, 0, 0, 0, 0, 0.0, error)


def main(arguments: list[str] | None = None) -> int:
    """Run a worker on an inherited descriptor."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_shim.worker")
    parser.add_argument("--fd", type=int, required=True, help="connected AF_UNIX stream socket")
    options = parser.parse_args(arguments)
    try:
        sock = socket.socket(fileno=options.fd)
    except OSError as error:
        parser.error(f"descriptor {options.fd} is not a socket: {error}")
    sock.set_inheritable(False)
    try:
        return Worker(FdChannel(sock)).run()
    except (ProtocolError, msgspec.DecodeError) as error:
        sys.stderr.write(f"worker: the driver sent what is not a message: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
