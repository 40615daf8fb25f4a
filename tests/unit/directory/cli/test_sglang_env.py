"""`treecored sglang-env`: what it prints is what the engine will read."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from directory.cli import sglang_env as module
from directory.cli.main import app
from directory.daemon.runtime import SESSION_NAME
from directory.protocol.variables import PREFIX
from scheduler_shim.sglang.settings import Settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's, and a runtime folder of the test's."""
    for name in (*Settings.model_fields, "config"):
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    for name in (module.PLUGINS_VARIABLE, *module.ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sglang-env", *arguments])


def evaluated(text: str, program: str) -> str:
    """What a Python program prints in a shell that has evaluated the lines."""
    command = f'{text}\nexec {shlex.quote(sys.executable)} -c "$PROGRAM"'
    done = subprocess.run(
        ["sh", "-euc", command],
        capture_output=True, text=True, check=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PROGRAM": program, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    return done.stdout.strip()


SHOW = (
    "from scheduler_shim.sglang.settings import load_settings as s;"
    "print(s().model_dump_json(exclude={'stats_file'}))"
)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--mode", "thin", "--instance", "replica 'one'"),
        ("--model-id", "llama $HOME", "--set", "share_versions=1", "--set", "hold_ms_max=77"),
        ("--set", "TREECORED_SHARE=0.25", "--set", "on_absent=wait"),
    ],
    ids=str,
)
def test_an_engine_that_evaluates_the_lines_has_exactly_these_settings(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    result = run("--runtime-dir", str(tmp_path / "a b"), *arguments)
    assert result.exit_code == 0
    got = json.loads(evaluated(result.stdout, SHOW))
    pairs = dict(
        pair.lower().removeprefix("treecored_").split("=")
        for flag, pair in pairwise(arguments)
        if flag == "--set"
    )
    flags = {
        flag[2:].replace("-", "_"): value
        for flag, value in pairwise(arguments)
        if flag.startswith("--") and flag != "--set"
    }
    wanted = module.checked({"runtime_dir": tmp_path / "a b", **flags, **pairs})
    assert got == json.loads(wanted.model_dump_json(exclude={"stats_file"}))


def test_only_what_differs_from_the_defaults_is_exported() -> None:
    plain = run("--json")
    assert list(json.loads(plain.stdout)["environment"]) == ["TREECORED_RUNTIME_DIR"]
    thin = json.loads(run("--json", "--mode", "thin").stdout)
    assert thin["environment"]["TREECORED_MODE"] == "thin"
    assert thin["flags"] == ["--radix-cache-backend", "treecored"]


def test_the_runtime_folder_is_the_daemons_own(tmp_path: Path) -> None:
    config = tmp_path / "treecored.toml"
    config.write_text(f'runtime_dir = "{tmp_path / "elsewhere"}"\n')
    found = json.loads(run("--json", "--config", str(config)).stdout)
    assert found["environment"]["TREECORED_RUNTIME_DIR"] == str(tmp_path / "elsewhere")
    default = json.loads(run("--json").stdout)
    assert default["environment"]["TREECORED_RUNTIME_DIR"] == str(tmp_path / "treecored")


def test_the_flags_come_as_words_of_one_variable() -> None:
    program = f"import os; print(os.environ['{module.FLAGS_VARIABLE}'])"
    words = evaluated(run("--cpu").stdout, program).split()
    assert words == [*module.FLAGS, *module.CPU_FLAGS]
    assert "export SGLANG_USE_CPU_ENGINE=1" in run("--cpu").stdout


def test_a_list_of_plugins_gets_ours_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "SGLANG_PLUGINS" not in run().stdout, "without a list all are loaded"
    monkeypatch.setenv("SGLANG_PLUGINS", "one, two")
    assert "export SGLANG_PLUGINS=one,two,treecored" in run().stdout
    monkeypatch.setenv("SGLANG_PLUGINS", "treecored")
    assert "SGLANG_PLUGINS" not in run().stdout


def test_an_absent_daemon_and_a_setting_that_hinders_sharing_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "# no daemon is there yet: treecored serve --runtime-dir" in run().stdout
    folder = tmp_path / "treecored"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SESSION_NAME))
        assert "no daemon" not in run().stdout
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "# take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF" in run().stdout
    assert "expandable" not in run("--cpu").stdout


def test_a_version_of_sglang_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.4.9")
    assert "# treecored supports SGLang 0.5.13 to" in run().stdout
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.16")
    assert "supports" not in run().stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--mode", "thick"), "mode 'thick'"),
        (("--set", "share=2"), "share '2'"),
        (("--set", "nonsense=1"), "--set nonsense=1"),
        (("--set", "mode"), "--set mode"),
        (("--config", "/does/not/exist"), "/does/not/exist"),
    ],
    ids=str,
)
def test_what_the_engine_would_refuse_is_exit_status_2_and_one_sentence(
    arguments: tuple[str, ...], named: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_neither_sglang_nor_torch_is_loaded() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from directory.cli.main import app;"
        "assert CliRunner().invoke(app, ['sglang-env']).exit_code == 0;"
        "assert not {'torch', 'sglang', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
