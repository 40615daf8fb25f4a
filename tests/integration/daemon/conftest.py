"""A running daemon for the tests that need nothing special of it, and a folder in memory."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.daemon.tier_folder import SHARED_MEMORY, file_system
from tests.integration.daemon.support import DaemonProcess


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own; it is gone afterwards."""
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


@pytest.fixture
def host_dir() -> Iterator[Path]:
    """A folder in memory, removed with all that is in it."""
    if file_system(SHARED_MEMORY) != "tmpfs":
        pytest.skip("there is no shared memory to keep a host tier in")
    path = SHARED_MEMORY / f"treecored-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    if path.is_dir():
        for name in os.listdir(path):
            (path / name).unlink()
        path.rmdir()
