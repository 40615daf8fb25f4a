"""Available memory is the least of what the machine and every control group have left."""

from pathlib import Path

import pytest

from directory.cli.memory import available_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\n"})
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == 7 * 1024


def test_nothing_known_is_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize("limit", ["10000", "max"])
def test_a_unified_group_or_one_above_it_limits(tmp_path: Path, limit: str) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1000 kB\n",
        "proc/self/cgroup": "0::/pod/box\n",
        "cg/pod/box/memory.max": f"{limit}\n",
        "cg/pod/box/memory.current": "4000\n",
        "cg/pod/box/memory.stat": "anon 1\ninactive_file 500\n",
        "cg/pod/memory.max": "9000",
        "cg/pod/memory.current": "1000",
    }
    write(tmp_path, files)
    expected = 6500 if limit == "10000" else 8000
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == expected


def test_a_legacy_group_whose_name_is_the_hosts_is_found_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "8:pids:/\n4:cpu,memory:/host/name\n",
        "cg/memory/memory.limit_in_bytes": "3000",
        "cg/memory/memory.usage_in_bytes": "3500",
    }
    write(tmp_path, files)
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == 0


def test_this_machine_has_some_memory() -> None:
    found = available_bytes()
    assert found is None or found > 0
