"""What the live control process has loaded and runs, and how it survives its own defects."""

import json
import sys
from pathlib import Path

import pytest

from directory.core.actions import Refused
from directory.core.events import Match, Stats
from directory.core.namespace import NamespaceKey
from tests.integration.daemon.support import (
    DEADLINE_S,
    DaemonProcess,
    RawClient,
    SessionClient,
    wait_until,
)
from transfer.ipc.channel import ChannelClosed

# Runs the real command and writes down, at its end, what is loaded and what unsafe thing was done
# outside imports. The serialisers' functions are replaced, because loading plain data raises no
# audit event; compiled code is read by imports only.
RECORDER = """
import json, sys
found = []

def audit(event, args):
    if event not in ("marshal.loads", "marshal.load", "pickle.find_class", "compile", "exec"):
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return
        frame = frame.f_back
    found.append(event)

from directory.cli.main import app
import directory.cli.serve
import pickle
for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
    setattr(pickle, name, lambda *args, _name=name, **kwargs: found.append("pickle." + _name))
sys.addaudithook(audit)
try:
    app(args=sys.argv[2:], standalone_mode=False)
finally:
    with open(sys.argv[1], "w") as file:
        json.dump({"modules": sorted(sys.modules), "found": list(found)}, file)
"""

# A directory with a deliberate defect: one request breaks it.
DEFECTIVE = """
import sys
from directory.core.requests import Requests
whole = Requests._match

def broken(self, pool, seq, body):
    if body.request == "break it":
        raise KeyError("a deliberate defect")
    return whole(self, pool, seq, body)

Requests._match = broken
from directory.cli.main import app
app(args=sys.argv[1:])
"""


def use_fully(daemon: DaemonProcess) -> None:
    """Let the daemon do a little of everything."""
    with RawClient(daemon.runtime_dir, "a") as a, RawClient(daemon.runtime_dir, "b") as b:
        a.pool_memory.write(0, b"x")
        a.insert(range(4), [0])
        b.dealer.send(b"\x80\x04K\x01.")  # a pickle of 1: refused like any other junk
        assert isinstance(b.receive().body, Refused)
        matched = b.match(range(4))
        b.restore(getattr(matched, "receipt", 0), 0, [1])
        b.stats()


def test_the_live_process_loads_no_device_library_and_unpickles_nothing_f138(
    tmp_path: Path,
) -> None:
    result = tmp_path / "found.json"
    program = (sys.executable, "-c", RECORDER, str(result), "serve")
    with DaemonProcess(tmp_path / "rt", program=program) as daemon:
        use_fully(daemon)
        assert daemon.stop() == 0, daemon.log()
    seen = json.loads(result.read_text(encoding="utf-8"))
    assert "directory.daemon.server" in seen["modules"]
    assert "transfer.engine" not in seen["modules"]
    loaded = {name.split(".")[0] for name in seen["modules"]}
    assert loaded & {"torch", "cuda", "cupy", "numpy", "multiprocessing", "scheduler_shim"} == set()
    assert seen["found"] == []


def test_a_defect_of_the_directory_begins_a_new_epoch_and_the_daemon_serves_on(
    tmp_path: Path,
) -> None:
    program = (sys.executable, "-c", DEFECTIVE, "serve")
    with DaemonProcess(tmp_path / "rt", program=program) as daemon:
        with RawClient(daemon.runtime_dir, "a") as a, RawClient(daemon.runtime_dir, "b") as b:
            old_epoch, old_mover = a.epoch, b.stats()["daemon_mover_pid"]
            refused = a.ask(Match("break it", 0, NamespaceKey(), b""))
            assert isinstance(refused, Refused)
            assert refused.code == "internal"
            for client in (a, b):
                with pytest.raises(ChannelClosed):
                    client.session.channel.wait_frame(DEADLINE_S)
            late = b.ask(Stats(), seq=0)
            assert isinstance(late, Refused)
            assert late.code == "stale_epoch"
        with RawClient(daemon.runtime_dir, "a") as again:
            assert again.epoch != old_epoch
            counters = again.stats()
            assert counters["daemon_resets"] == counters["daemon_internal_errors"] == 1
            assert counters["pools"] == 1
            assert counters["daemon_mover_pid"] != old_mover
            again.pool_memory.write(0, b"x")
            again.insert(range(4), [0])
            wait_until(lambda: again.stats().get("pages_backed_up") == 1)
        assert daemon.process.poll() is None
        log = daemon.log()
        assert "a deliberate defect" in log
        assert "Match" in log


# Standard error that signals its own process in the middle of a log line, while the logger's lock
# is held.
SIGNALLED_WHILE_LOGGING = """
import os, signal, sys
whole = sys.stderr

class Stderr:
    def write(self, text):
        if "session opened" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole.write(text)

    def flush(self):
        whole.flush()

    def isatty(self):
        return False

sys.stderr = Stderr()
from directory.cli.main import app
app(args=sys.argv[1:])
"""


def test_a_stop_signal_in_the_middle_of_a_log_line_is_obeyed(tmp_path: Path) -> None:
    program = (sys.executable, "-c", SIGNALLED_WHILE_LOGGING, "serve")
    with (
        DaemonProcess(tmp_path / "rt", program=program) as daemon,
        SessionClient(daemon.runtime_dir) as session,
    ):
        session.hello()
        assert daemon.process.wait(DEADLINE_S) == 0
