"""Available memory is the least of what the machine and every control group have left."""

from pathlib import Path

import pytest

from directory.daemon.memory import available_bytes, obtainable_bytes


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


def test_what_can_be_dropped_or_swapped_out_could_be_had(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1000 kB\nSwapTotal: 9 kB\nSwapFree: 2 kB\n",
        "proc/self/cgroup": "0::/box\n",
        "cg/box/memory.max": "10000",
        "cg/box/memory.current": "9000",
        "cg/box/memory.stat": "anon 1\ninactive_file 500\nactive_file 70\nslab_reclaimable 3\n",
    }
    write(tmp_path, files)
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == 1500
    assert obtainable_bytes(tmp_path / "proc", tmp_path / "cg") == 1573 + 2048
    assert obtainable_bytes(tmp_path, tmp_path) is None


def test_the_cache_of_zfs_could_be_had(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1000 kB\n",
        "proc/spl/kstat/zfs/arcstats": "9 1 0x01\n\nname type data\nhits 4 7\nsize 4 5000\n",
    }
    write(tmp_path, files)
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == 1000 * 1024
    assert obtainable_bytes(tmp_path / "proc", tmp_path / "cg") == 1000 * 1024 + 5000


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
