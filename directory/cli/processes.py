"""Child processes of a driver: start them, read their last words, see them end.

Owns how a child is started (its own session, output to a log, no settings of the user's) and the
messages to and from a worker. It must never decide what a child's end means.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec

import directory
from directory.core.errors import TreecoredError
from scheduler_shim.worker_messages import FromWorker, ToWorker
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds

END_DEADLINE_S = 5.0
LOG_LINES_SHOWN = 8
SETTINGS_PREFIX = "TREECORED_"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class DriverError(Exception):
    """The run cannot go on; the message says which process failed and what it last said."""


class Worker:
    """One scheduler process. `in_progress`: numbers of the prompts it has not finished."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], channel: FdChannel, log: Path
    ) -> None:
        self.name = name
        self.process = process
        self.channel = channel
        self.log = log
        self.in_progress: set[int] = set()

    def send(self, message: ToWorker) -> None:
        """Queue a message; it leaves at once or when the worker reads. Raises `DriverError`."""
        try:
            self.channel.send(_encoder.encode(message))
        except TreecoredError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Send what is queued as far as the worker takes it. Raises `DriverError`."""
        try:
            self.channel.flush()
        except TreecoredError as error:
            raise self._failure(error) from error

    def receive(self) -> list[FromWorker]:
        """Messages that have arrived. Raises `DriverError` when the worker is dead or raving."""
        messages: list[FromWorker] = []
        try:
            for payload, fds in self.channel.receive():
                close_fds(fds)  # a worker has none to give
                messages.append(_decoder.decode(payload))
        except (TreecoredError, msgspec.DecodeError) as error:
            raise self._failure(error) from error
        return messages

    def _failure(self, error: Exception) -> DriverError:
        if not isinstance(error, ChannelClosed):
            return DriverError(f"{self.name}: {error}")
        try:
            code = self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return DriverError(f"{self.name} closed its channel{last_words(self.log)}")
        return DriverError(f"{self.name} ended unexpectedly ({ending(code)}){last_words(self.log)}")

    def __repr__(self) -> str:
        return f"<Worker {self.name} pid {self.process.pid}, {len(self.in_progress)} in progress>"


def spawn(command: list[str], *, log: Path, fd: int) -> subprocess.Popen[bytes]:
    """Start a child that inherits one descriptor. Raises `DriverError`.

    It gets a session of its own, so that Ctrl-C reaches the driver alone, which then ends
    everything in order.
    """
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(fd,),
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise DriverError(f"{command[0]} cannot be started: {error.strerror}") from error


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end; kill it when it does not."""
    try:
        process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ending(code: int) -> str:
    """How a process ended, by its return code as subprocess gives it."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def last_words(log: Path) -> str:
    """The end of a log, indented on lines of its own; nothing when there is none."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-LOG_LINES_SHOWN:])


def _environment() -> dict[str, str]:
    """Our environment without the user's settings of another daemon.

    Where the packages are not installed, children import them from the same folder as we do.
    """
    found = {name: text for name, text in os.environ.items() if not _is_setting(name)}
    root = str(Path(directory.__file__).parent.parent)
    if Path(root).name not in ("site-packages", "dist-packages"):
        paths = [path for path in (found.get("PYTHONPATH", ""), root) if path]
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


def _is_setting(name: str) -> bool:
    return name.startswith(SETTINGS_PREFIX)
