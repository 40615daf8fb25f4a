"""The consumers' interpreter, and a daemon that tells them what it knows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.consumers.environment import build
from tests.integration.daemon.support import DaemonProcess
from tests.ports import free_ports

PORTS = 16


@pytest.fixture(scope="session")
def python() -> Path:
    """Built on first use; takes a minute."""
    return build()


@pytest.fixture
def base() -> int:
    """The first of `PORTS` free ports; the daemon uses those from here on."""
    return free_ports(PORTS)


@pytest.fixture
def telling(tmp_path: Path, base: int) -> Iterator[DaemonProcess]:
    """Its host tier is too small for everything."""
    flags = ["--host-tier", "384KiB", "--segment", "128KiB"]
    flags += ["--kv-events", f"tcp://127.0.0.1:{base}"]
    flags += ["--kv-events-union", f"tcp://127.0.0.1:{base + 9}"]
    with DaemonProcess(tmp_path / "rt", *flags) as process:
        yield process
