"""Real engines under the tests' control: started, asked, killed, and gone afterwards.

Owns the processes and their sockets. An engine is a process session of its own with everything
that SGLang starts; ending it ends all of them. Every wait has a deadline, and what an engine wrote
stands in the error of a wait that failed. Runs in the project's environment, without SGLang.
"""

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.sglang import wire
from tests.sglang.environments import HOME, ROOT, STUBS, python_of

IMPORT_S = 300.0
"""Importing SGLang takes 15 s of processor time, and more while nothing is compiled yet."""
START_S = 300.0
ANSWER_S = 120.0
END_S = 20.0

ARGUMENTS: Mapping[str, object] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "context_length": 1000,
    "dtype": "float32",
    "log_level": "info",
    "skip_server_warmup": True,
    "random_seed": 0,
    # An idle scheduler spins otherwise, and starves the daemon where cores are few.
    "sleep_on_idle": True,
}

TROUBLE = ("Traceback (most recent call last)", "memory leak", "Scheduler hit an exception")
"""None of these may stand in the log of an engine that was not made to fail."""


class EngineError(AssertionError):
    """An engine did not do as told; the message ends with its log."""


MODELS = ("llama", "deepseek_v2")
"""SGLang imports its 200 model files at every start (10 s of processor time) unless told not to."""


def environ_of(version: str, **more: str) -> dict[str, str]:
    """The variables of a process in SGLang's environment: nothing of treecored's leaks in."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TREECORED_", "SGLANG_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join((str(STUBS), str(ROOT))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(version)),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def _other_models(version: str) -> list[str]:
    (folder,) = (HOME / version).glob("lib/*/site-packages/sglang/srt/models")
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in MODELS)


class Nursery:
    """One process a version that has SGLang imported and forks engines."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.log_path = folder / f"nursery-{version}.log"
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [python_of(version), "-m", "tests.sglang.nursery", str(theirs.fileno())],
                cwd=ROOT, env=environ_of(version), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._up = False

    def engine(self, name: str, folder: Path, **given: object) -> "Engine":
        """Start an engine; see `Engine` for what may be given. It may not serve yet."""
        start, ours, theirs = _prepared(name, folder, given)
        with theirs:
            self._wait_up()
            wire.send(self._sock, start, (theirs.fileno(),))
            started = wire.started(self._receive())
        return Engine(name, self.version, ours, started.pid, folder)

    def _wait_up(self) -> None:
        if not self._up:
            self._receive()  # `Up`
            self._up = True

    def _receive(self) -> bytes:
        self._sock.settimeout(IMPORT_S)
        try:
            packet = self._sock.recv(wire.BYTES_MAX)
        except TimeoutError:
            packet = b""
        if not packet:
            raise EngineError(f"the nursery of {self.version} is gone:\n{_tail(self.log_path)}")
        return packet

    def close(self) -> None:
        """End it. Engines that still run end with it."""
        self._sock.close()
        self.process.kill()
        self.process.wait(END_S)


def spawned(version: str, name: str, folder: Path, **given: object) -> "Engine":
    """An engine started as a user's program does it, every process importing for itself."""
    return spawned_by((str(python_of(version)),), environ_of(version), version, name, folder, given)


def spawned_by(
    python: Sequence[str],
    environ: Mapping[str, str],
    version: str,
    name: str,
    folder: Path,
    given: dict[str, object],
) -> "Engine":
    """The same with another interpreter (a command's beginning) and other variables."""
    start, ours, theirs = _prepared(name, folder, given)
    with theirs, Path(start.log).open("ab") as log:
        process = subprocess.Popen(
            [*python, "-m", "tests.sglang.driver", str(theirs.fileno())], cwd=ROOT,
            env={**environ, **start.environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    wire.send(ours, start)
    return Engine(name, version, ours, process.pid, folder, process)


def _prepared(
    name: str, folder: Path, given: dict[str, object]
) -> tuple[wire.Start, socket.socket, socket.socket]:
    environ = given.pop("environ", {})
    assert isinstance(environ, dict)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = str(folder / f"{name}.log")
    return wire.Start(environ, {**ARGUMENTS, **given}, log), ours, theirs


class Engine:
    """One engine. Requests are submitted and collected; nothing is sent that a test does not send.

    Keyword arguments of its makers are those of SGLang's engine over `ARGUMENTS`, and `environ`
    for variables.
    """

    def __init__(
        self,
        name: str,
        version: str,
        sock: socket.socket,
        pid: int,
        folder: Path,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.name = name
        self.version = version
        self.pid = pid
        self.folder = folder
        self.log_path = folder / f"{name}.log"
        self.schedulers: tuple[int, ...] = ()
        self._sock = sock
        self._process = process
        self._pidfd = os.pidfd_open(pid)
        self._answers: dict[str, wire.Report] = {}
        self._asked = 0

    # Life.

    def wait_up(self) -> Self:
        """Wait until it serves."""
        up = self._wait("", START_S)
        if not isinstance(up, wire.Up):
            raise self.trouble(f"did not start: {up}")
        self.schedulers = up.pids
        return self

    def stop(self) -> None:
        """End it in an orderly way; what is left after that is killed."""
        try:
            wire.send(self._sock, wire.Stop())
            select.select([self._pidfd], [], [], END_S)
        except OSError:
            pass  # it is gone already
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes at once. Repeatable."""
        for pid in session_of(self.pid):
            _signal(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(END_S)
        elif not select.select([self._pidfd], [], [], END_S)[0]:
            raise self.trouble("does not end")
        give_up = time.monotonic() + END_S
        while left := session_of(self.pid):
            if time.monotonic() > give_up:
                raise self.trouble(f"left {left} behind")
            select.select([], [], [], 0.01)
        self._sock.close()

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return not select.select([self._pidfd], [], [], 0)[0]

    # Requests.

    def submit(
        self,
        tokens: list[int],
        new: int = 8,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        stream: bool = False,
    ) -> str:
        """Send a request; the id is for `collect` and `abort`. `stream`: the answer says when each
        token came."""
        name = self._name()
        self._send(wire.Generate(name, tokens, new, extra_key, cache_salt, lora, stream))
        return name

    def collect(self, name: str, deadline_s: float = ANSWER_S) -> wire.Output:
        """Wait for a request's end."""
        answer = self._wait(name, deadline_s)
        if not isinstance(answer, wire.Output):
            raise self.trouble(f"request {name}: {answer}")
        return answer

    def collect_any(self, names: Iterable[str], deadline_s: float = ANSWER_S) -> wire.Report:
        """Wait for whichever of these ends first, and return its end, a failure included."""
        wanted = set(names)
        give_up = time.monotonic() + deadline_s
        while not (ended := wanted & self._answers.keys()):
            self._receive(give_up, f"none of {len(wanted)} requests ended")
        return self._answers.pop(ended.pop())

    def fileno(self) -> int:
        """Readable when an answer has come."""
        return self._sock.fileno()

    def take_ended(self, names: Iterable[str]) -> dict[str, wire.Report]:
        """Those of these requests that have ended by now; waits for none."""
        while select.select([self._sock], [], [], 0)[0]:
            self._receive(time.monotonic() + 1, "nothing to be received")
        return {name: self._answers.pop(name) for name in list(names) if name in self._answers}

    def generate(self, tokens: list[int], new: int = 8, **more: Any) -> wire.Output:
        """Submit and collect."""
        return self.collect(self.submit(tokens, new, **more))

    def abort(self, name: str) -> None:
        """Give a request up. It still has to be collected."""
        self._send(wire.Abort(name))

    def flush(self) -> bool:
        """Empty the cache; whether SGLang did."""
        return self._done(wire.Flush(self._name())).success

    def update_weights(self, folder: Path) -> wire.Done:
        """Load other weights."""
        return self._done(wire.UpdateWeights(self._name(), str(folder)))

    def load_adapter(self, name: str, folder: Path) -> wire.Done:
        """Load a LoRA adapter."""
        return self._done(wire.LoadAdapter(self._name(), name, str(folder)))

    # What it says.

    def log(self) -> str:
        """Everything that its processes wrote."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def check_log(self) -> None:
        """Raise if the log tells of trouble."""
        log = self.log()
        for word in TROUBLE:
            if word in log:
                at = log.index(word)
                raise EngineError(f"{self.name}: {word!r}:\n{log[max(0, at - 500) : at + 4000]}")

    def stats(self) -> dict[str, int]:
        """The shim's counters as last written; empty before the first writing."""
        try:
            found = json.loads((self.folder / f"{self.name}.stats").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        assert isinstance(found, dict)
        return found

    def trouble(self, what: str) -> EngineError:
        """An error with the shim's counters and the end of the log."""
        return EngineError(
            f"{self.name} ({self.version}): {what}\n{self.stats()}\n{_tail(self.log_path)}"
        )

    def __repr__(self) -> str:
        return f"Engine({self.name}, {self.version}, pid {self.pid})"

    # Wire.

    def _name(self) -> str:
        self._asked += 1
        return f"{self.name}-{self._asked}"

    def _send(self, command: wire.Command) -> None:
        try:
            wire.send(self._sock, command)
        except OSError as error:
            raise self.trouble(f"is gone: {error}") from None

    def _done(self, command: wire.Flush | wire.UpdateWeights | wire.LoadAdapter) -> wire.Done:
        self._send(command)
        answer = self._wait(command.id, ANSWER_S)
        if not isinstance(answer, wire.Done):
            raise self.trouble(f"{command}: {answer}")
        return answer

    def _wait(self, name: str, deadline_s: float) -> wire.Report:
        give_up = time.monotonic() + deadline_s
        while name not in self._answers:
            self._receive(give_up, f"no answer to {name or 'its start'}")
        return self._answers.pop(name)

    def _receive(self, give_up: float, what: str) -> None:
        self._sock.settimeout(max(0.001, give_up - time.monotonic()))
        try:
            packet = self._sock.recv(wire.BYTES_MAX)
        except TimeoutError:
            raise self.trouble(what) from None
        except OSError as error:
            raise self.trouble(f"is gone: {error}") from None
        if not packet:
            raise self.trouble(f"has ended; {what}")
        report = wire.report(packet)
        self._answers["" if isinstance(report, wire.Up) else report.id] = report


def session_of(pid: int) -> list[int]:
    """Every process, ended ones left out, of the process session that `pid` leads or led."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has just ended
            state, _, _, session = stat.rsplit(")", 1)[1].split()[:4]
            if int(session) == pid and state not in "ZX":
                found.append(int(entry))
    return found


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        pass


def _tail(path: Path, lines: int = 60) -> str:
    """The end of a log; SGLang's lines of all its arguments are cut."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(line[:400] for line in text.splitlines()[-lines:])
