"""A daemon of one's own that may be killed, stopped and started again: for chaos and benchmarks.

Owns the process of each boot, its log and its readiness. The folder of a host tier that is kept
between boots is removed by `close`, never another one. It must never decide when a boot ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from directory.cli.processes import DriverError, ending, last_words, reap, spawn
from directory.daemon.tier_folder import SHARED_MEMORY

START_DEADLINE_S: Final = 60.0


class ServedDaemon:
    """`treecored serve` in a runtime folder. `flags`: more of its flags, the same at every boot.

    `keep`: the host tier outlives a boot, in a folder of shared memory that `close` removes.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        host_bytes: int,
        segment_bytes: int,
        keep: bool = True,
        log_level: str = "warning",
    ) -> None:
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.boots = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._started_s = 0.0
        self._ready = False
        self.host_dir: Path | None = None
        self._flags = [
            "--runtime-dir", str(self.runtime_dir),
            "--host-tier", str(host_bytes),
            "--segment", str(segment_bytes),
            "--log-level", log_level,
        ]  # fmt: skip
        if keep:
            name = f"run-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.host_dir = SHARED_MEMORY / f"treecored-{os.getuid()}" / name
            self._flags += ["--host-keep", "--host-dir", str(self.host_dir)]
        else:
            self._flags.append("--no-host-keep")
        self._flags += flags

    # A boot.

    def begin(self) -> None:
        """Start the next boot without waiting for it. Raises `DriverError`."""
        assert self._process is None, "the boot before has not ended"
        self.boots += 1
        ready_in, ready_out = os.pipe()
        module = [sys.executable, "-P", "-m", "directory.cli.tied", str(os.getpid()), "serve"]
        command = [*module, *self._flags, "--ready-fd", str(ready_out)]
        self._started_s = time.monotonic()
        try:
            self._process = spawn(command, log=self.log, fd=ready_out)
        except BaseException:
            os.close(ready_in)
            raise
        finally:
            os.close(ready_out)
        self._ready_fd, self._ready = ready_in, False

    def ready(self, wait_s: float = 0.0) -> bool:
        """Whether the boot serves; waits for it so long. Raises `DriverError` if it has ended."""
        if self._ready:
            return True
        readable, _, _ = select.select([self._ready_fd], [], [], max(0.0, wait_s))
        if readable:
            if os.read(self._ready_fd, 1) != b"\n":
                raise DriverError(f"the daemon did not start{last_words(self.log)}")
            self._ready = True
            self._close_ready_fd()
        elif time.monotonic() - self._started_s > START_DEADLINE_S:
            raise DriverError(
                f"the daemon was not ready within {START_DEADLINE_S:.0f} s{last_words(self.log)}"
            )
        return self._ready

    def start(self) -> None:
        """Start the next boot and wait until it serves. Raises `DriverError`."""
        self.begin()
        while not self.ready(START_DEADLINE_S):
            pass

    def signal(self, number: signal.Signals) -> None:
        """Send the daemon a signal."""
        assert self._process is not None, "there is no daemon"
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the boot in order and see it dead."""
        assert self._process is not None, "there is no daemon"
        self._process.terminate()
        reap(self._process)
        self._process = None
        self._close_ready_fd()

    def kill(self) -> None:
        """End the boot without its help and see it dead. Repeatable."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._close_ready_fd()

    def fail_if_ended(self) -> None:
        """Raise `DriverError` when the boot has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            how = ending(self._process.returncode)
            raise DriverError(f"the daemon ended unexpectedly ({how}){last_words(self.log)}")

    # Facts.

    @property
    def pid(self) -> int:
        """Process id of the present boot; 0 between two."""
        return 0 if self._process is None else self._process.pid

    @property
    def log(self) -> Path:
        """What the present boot, or the last one, has logged."""
        return self.folder / f"daemon-{self.boots}.log"

    # The end.

    def close(self) -> None:
        """End the daemon in order and remove what it kept. Repeatable."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            reap(process)
        self._close_ready_fd()
        if self.host_dir is not None:
            shutil.rmtree(self.host_dir, ignore_errors=True)

    def _close_ready_fd(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServedDaemon boot {self.boots}, pid {self.pid}>"
