"""Fixtures of all integration tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: sockets lie in it, the path of a socket has at most 107 bytes, and pytest's own
    folders are named after the test and the worker that runs it."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
