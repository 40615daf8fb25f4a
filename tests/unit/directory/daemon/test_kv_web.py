"""The HTTP side of a stream: answers who asks, sleeps in between, and ends when it is told to."""

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from directory.daemon.kv_web import Web
from tests.ports import free_ports

PAUSE_S = 0.5
DEADLINE_S = 10.0


def sleeps(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("voluntary_ctxt"))
    return int(line.split()[1])


def test_it_answers_again_and_again_and_nobody_wakes_it_in_between() -> None:
    port = free_ports(1)
    web = Web("127.0.0.1", port, {"block_size": 16}, None)
    try:
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=9) as got:
                assert json.loads(got.read()) == {"block_size": 16}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/nothing", timeout=DEADLINE_S)
        with refused.value as answer:
            assert answer.code == 404
        (thread,) = (one for one in threading.enumerate() if one.name == f"http-{port}")
        time.sleep(PAUSE_S)  # the last answer is on its way
        before = sleeps(thread)
        time.sleep(PAUSE_S)
        assert sleeps(thread) == before
    finally:
        web.close()
    assert not thread.is_alive()
    web.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=DEADLINE_S)
    Web("127.0.0.1", port, {}, None).close()
