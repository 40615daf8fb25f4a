"""Logging: where lines go, and what a log that cannot be written costs."""

import os
import sys
from collections.abc import Iterator

import pytest
import structlog

from directory.daemon.log import set_up_logging


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_log_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken = open(writer, "w", buffering=1)  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stderr", broken)
    set_up_logging("info", "json")
    for number in range(3):
        structlog.get_logger("daemon").error("something happened", number=number)
    with pytest.raises(OSError, match="Broken pipe"):
        broken.write("so the stream is broken indeed\n")
    with pytest.raises(OSError, match="Broken pipe"):
        broken.close()


def test_lines_go_to_standard_error_and_never_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging("warning", "json")
    structlog.get_logger("daemon").info("too little")
    structlog.get_logger("daemon").warning("enough")
    said = capsys.readouterr()
    assert said.out == ""
    assert '"event": "enough"' in said.err
    assert "too little" not in said.err
