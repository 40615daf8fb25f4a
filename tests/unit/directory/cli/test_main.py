"""The command group: commands are found lazily, and a missing one does not break the others."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from directory.cli import main
from directory.cli.main import app
from directory.daemon.config import Settings


def test_help_lists_serve() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "serve" in result.output


def test_a_command_that_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "later", "directory.cli.later")
    result = CliRunner().invoke(app, ["later"])
    assert result.exit_code == 2
    assert "later" in result.output
    assert CliRunner().invoke(app, ["serve", "--help"]).exit_code == 0


def test_loading_the_group_loads_no_command() -> None:
    program = "import sys, directory.cli.main; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "directory.cli.main" in done.stdout
    assert [n for n in done.stdout.split() if n.startswith(("directory.cli.s", "zmq"))] == []


def test_a_wrong_setting_is_exit_status_2_and_one_sentence() -> None:
    result = CliRunner().invoke(app, ["serve", "--log-format", "xml"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "log_format" in result.stderr


def test_the_flags_of_a_gpu_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def run(settings: Settings, ready_fd: int) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("directory.cli.serve.run", run)
    gpu = "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    flags = ["--device", gpu, "--host-unpinned", "--mover-start-ms-max", "90000"]
    flags += ["--mover-silence-ms-max", "700"]
    assert CliRunner().invoke(app, ["serve", *flags]).exit_code == 0
    assert CliRunner().invoke(app, ["serve", "--host-pinned"]).exit_code == 0
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    first, second, third = seen
    assert (first.device, first.host_unpinned) == (gpu, True)
    assert (first.mover_start_ms_max, first.mover_silence_ms_max) == (90_000, 700)
    assert not second.host_unpinned
    assert third == second


def test_an_ordinal_is_no_device() -> None:
    result = CliRunner().invoke(app, ["serve", "--device", "cuda:0"])
    assert result.exit_code == 2
    assert "UUID of a GPU" in result.stderr
