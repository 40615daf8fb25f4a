"""A running daemon for the tests that need nothing special of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.daemon.support import DaemonProcess


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own; it is gone afterwards."""
    with DaemonProcess(tmp_path / "rt") as process:
        yield process
