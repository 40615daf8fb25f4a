"""What docs/operations.md has an operator write is understood."""

import re
from pathlib import Path

import click
import pytest

from directory.cli.main import app
from directory.daemon.config import load_settings
from scheduler_shim.sglang.settings import Settings as EngineSettings
from tests.tidy.source import ROOT

TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("docs/operations.md", "docs/sglang.md", "README.md")
}
OPERATIONS = TEXTS["docs/operations.md"]


def test_the_example_of_a_settings_file_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TREECORED_RUNTIME_DIR", raising=False)
    (example,) = re.findall(r"^```toml\n(.*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL)
    path = tmp_path / "treecored.toml"
    path.write_text(example, encoding="utf-8")
    settings = load_settings(path)
    assert settings.runtime_dir == Path("/run/treecored")
    assert settings.device.startswith("cuda:")


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_and_flag_of_ours_exists(name: str) -> None:
    assert isinstance(app, click.Group)
    text = TEXTS[name].replace("\\\n", " ")
    used = re.findall(r"(?<![\w`.\[/-])`?treecored ([a-z]+(?:-env)?)((?: [^`\n#|&]*)?)", text)
    assert used
    for command, rest in used:
        if command not in app.commands:
            continue  # prose
        known = {flag for each in app.commands[command].params for flag in each.opts}
        known |= {flag for each in app.commands[command].params for flag in each.secondary_opts}
        # The extra quotes hold what a shell puts in.
        flags = re.findall(r"(?<=\s)--[a-z-]+", re.sub(r"\$\(.*?\)", "", rest))
        assert set(flags) <= known, command


def test_every_variable_that_is_named_exists() -> None:
    names = {f"TREECORED_{each}".upper() for each in EngineSettings.model_fields}
    names |= {"TREECORED_CONFIG"}
    assert set(re.findall(r"TREECORED_[A-Z_]+[A-Z]", OPERATIONS)) <= names


def test_every_page_that_is_named_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[a-z-]+)?\)", OPERATIONS):
        assert (ROOT / "docs" / target).exists(), target
