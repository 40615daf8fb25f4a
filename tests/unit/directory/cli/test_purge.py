"""`treecored purge`: it lists first, removes what no daemon uses, and touches nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from directory.cli.main import app
from directory.daemon import leftovers, tier_folder
from directory.daemon.tier_folder import LOCK_NAME, OWNER_NAME, TierFolder, defaults

PAGE = 4096


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for shared memory, and a default runtime folder that is not the machine's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(tier_folder, "SHARED_MEMORY", folder)
    monkeypatch.setenv("TREECORED_RUNTIME_DIR", str(tmp_path / "rt"))
    return folder


def left(runtime: Path, *, nbytes: int = 2 * PAGE) -> Path:
    """The tier that a dead daemon of a runtime folder has left in shared memory."""
    runtime.mkdir(mode=0o700, exist_ok=True)
    path = defaults(runtime)[1]
    folder = TierFolder.take(path, runtime)
    (path / "segment.0").write_bytes(b"x" * nbytes)
    (path / "log.1").write_bytes(b"record")
    (path / "words").write_bytes(b"w")
    (path / "sums").write_bytes(b"s")
    folder.release()
    return path


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Have another process hold a tier; yields its number."""
    program = (
        "import sys; from pathlib import Path; from directory.daemon.tier_folder import TierFolder;"
        "folder = TierFolder.take(Path(sys.argv[1]), Path('/r')); print('held', flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.communicate("", timeout=60)


def purge(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["purge", *arguments])


def listed(*arguments: str) -> dict[str, dict[str, object]]:
    """What it says, by folder."""
    result = purge("--json", *arguments)
    assert result.exit_code == 0, result.output
    return {tier["path"]: tier for tier in json.loads(result.stdout)["tiers"]}


def test_without_yes_it_lists_and_removes_nothing(shared: Path, tmp_path: Path) -> None:
    path = left(tmp_path / "rt")
    result = purge()
    assert result.exit_code == 0
    assert "nothing was removed" in result.output
    assert (path / "segment.0").exists()
    (tier,) = listed().values()
    assert tier["bytes"] == 5 * PAGE
    assert (tier["runtime_dir"], tier["holder"], tier["removed"]) == (
        str(tmp_path / "rt"),
        "",
        False,
    )


def test_with_yes_the_tier_of_its_runtime_folder_and_orphans_are_gone(
    shared: Path, tmp_path: Path
) -> None:
    paths = [left(tmp_path / name) for name in ("rt", "gone")]
    (tmp_path / "gone").rmdir()
    assert purge("--yes").exit_code == 0
    assert not any(path.exists() for path in paths)
    assert "no host tier is kept" in purge("--yes").output


def test_a_runtime_folder_is_the_same_however_its_path_is_written(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for written in ("mine", "./mine", "mine/", f"{tmp_path}/x/../mine"):
        path = left(tmp_path / "mine")
        assert list(listed("--runtime-dir", written)) == [str(path)]
        assert purge("--runtime-dir", written, "--yes").exit_code == 0
        assert not path.exists()
    path = left(tmp_path / "mine")
    monkeypatch.setenv("TREECORED_RUNTIME_DIR", "mine")
    assert purge("--yes").exit_code == 0
    assert not path.exists()


def test_what_is_kept_for_another_runtime_folder_goes_with_all_alone(
    shared: Path, tmp_path: Path
) -> None:
    paths = [left(tmp_path / name) for name in ("rt", "two")]
    assert set(listed()) == set(map(str, paths))
    result = purge("--yes")
    assert result.exit_code == 0, "that is as it should be"
    assert "kept for other runtime folders" in result.output
    assert [path.exists() for path in paths] == [False, True]
    assert "nothing was removed" in purge("--all").output
    assert purge("--yes", "--all").exit_code == 0
    assert not paths[1].exists()


def test_all_and_a_runtime_folder_exclude_one_another(shared: Path, tmp_path: Path) -> None:
    path = left(tmp_path / "rt")
    assert purge("--yes", "--all", "--runtime-dir", str(tmp_path / "rt")).exit_code == 2
    assert path.exists()


def test_a_tier_that_a_daemon_uses_stays(shared: Path, tmp_path: Path) -> None:
    path = left(tmp_path / "rt")
    with held(path) as process:
        result = purge("--yes", "--json")
        assert result.exit_code == 0, "that is as it should be"
        (tier,) = json.loads(result.stdout)["tiers"]
        assert (tier["holder"], tier["removed"]) == (str(process), False)
        assert (path / "segment.0").exists()
    assert purge("--yes").exit_code == 0
    assert not path.exists()


def test_a_tier_that_a_daemon_takes_after_the_list_was_made_stays(
    shared: Path, tmp_path: Path
) -> None:
    path = left(tmp_path / "rt")
    (found,) = leftovers.find([], [], all_=True)
    with held(path):
        assert not leftovers.remove(found)
        assert (path / "segment.0").exists()


def test_files_that_are_not_a_tiers_stay_with_their_folder(shared: Path, tmp_path: Path) -> None:
    path = left(tmp_path / "rt")
    for name in ("notes", "segment", "log.x"):
        (path / name).write_text("precious", encoding="ascii")
    target = tmp_path / "precious"
    target.write_text("precious", encoding="ascii")
    (path / "segment.7").symlink_to(target)
    assert purge("--yes").exit_code == 0
    assert sorted(os.listdir(path)) == ["log.x", "notes", "segment", "segment.7"]
    assert target.read_text(encoding="ascii") == "precious"


def test_folders_that_are_no_tiers_and_links_to_tiers_are_not_listed(
    shared: Path, tmp_path: Path
) -> None:
    path = left(tmp_path / "rt")
    (path.parent / "other").mkdir()
    (path.parent / "file").write_text("x", encoding="ascii")
    (path.parent / "link").symlink_to(path)
    assert list(listed()) == [str(path)]
    assert purge("--yes").exit_code == 0
    assert (path.parent / "other").is_dir()
    assert (path.parent / "file").exists()


def test_another_users_tier_is_not_listed(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path / "rt")
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert leftovers.find([tmp_path / "rt"], [path], all_=True) == []


def test_a_runtime_folder_limits_it_to_that_daemons_tier(shared: Path, tmp_path: Path) -> None:
    mine, other = left(tmp_path / "mine"), left(tmp_path / "other")
    assert list(listed("--runtime-dir", str(tmp_path / "mine"))) == [str(mine)]
    assert purge("--yes", "--runtime-dir", str(tmp_path / "mine")).exit_code == 0
    assert (mine.exists(), other.exists()) == (False, True)


def test_a_folder_of_the_users_choice_is_purged_when_it_is_named(
    shared: Path, tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen"
    left(tmp_path / "rt").rename(chosen)
    assert listed() == {}
    assert list(listed("--host-dir", str(chosen))) == [str(chosen)]
    assert purge("--yes", "--host-dir", str(chosen)).exit_code == 0
    assert not chosen.exists()


def test_a_tier_whose_runtime_folder_is_gone_is_called_so(shared: Path, tmp_path: Path) -> None:
    path = left(tmp_path / "rt")
    (tmp_path / "rt").rmdir()
    assert listed()[str(path)]["orphan"] is True
    assert "orphaned" in purge().output


def test_what_cannot_be_removed_is_exit_status_1(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path / "rt")
    path.chmod(0o755)  # no folder of ours has that
    result = purge("--yes")
    assert result.exit_code == 1
    assert (path / "segment.0").exists()
    assert {LOCK_NAME, OWNER_NAME} <= set(os.listdir(path))


def test_a_wrong_setting_is_exit_status_2(shared: Path) -> None:
    assert purge("--config", "/nowhere/x.toml").exit_code == 2
