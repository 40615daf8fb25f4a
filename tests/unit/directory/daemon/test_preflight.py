"""What is refused before anything is started, what is only warned of, and what passes."""

from __future__ import annotations

import errno
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from directory.core.limits import MIB
from directory.daemon import preflight, tier_folder
from directory.daemon.config import load_settings
from directory.daemon.preflight import has_bindings, look
from directory.daemon.runtime import StartError
from directory.daemon.tier_folder import TierFolder, defaults
from tests.ports import free_ports

GPU = "cuda:GPU-12345678-9abc-def0-1234-56789abcdef0"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with the bindings and much memory, and a shared memory of the test's own."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(tier_folder, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(preflight, "has_bindings", lambda: True)
    memory_of(monkeypatch, available=1 << 50, most=1 << 50)


def memory_of(monkeypatch: pytest.MonkeyPatch, *, available: int | None, most: int | None) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: available)
    monkeypatch.setattr(preflight, "obtainable_bytes", lambda: most)


def looked(folder: Path, **flags: object) -> list[str]:
    """Look; the warnings."""
    with structlog.testing.capture_logs() as logs:
        look(load_settings(None, flags), folder)
    return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


@contextmanager
def listening(count: int = 1) -> Iterator[int]:
    """Somebody listens at a port of the loopback, with `count` more free below and above it."""
    port = free_ports(2 * count + 1) + count
    with socket.create_server(("127.0.0.1", port)):
        yield port


def address(port: int, host: str = "127.0.0.1") -> str:
    return f"tcp://{host}:{port}"


def test_defaults_pass_without_a_word(tmp_path: Path) -> None:
    assert looked(tmp_path) == []


def test_a_gpu_without_the_bindings_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_bindings", lambda: False)
    with pytest.raises(StartError, match=r"pip install 'treecored\[cuda\]'"):
        looked(tmp_path, device=f"cpu,{GPU}")
    assert looked(tmp_path, device="cpu") == []


def test_the_bindings_are_looked_for_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not has_bindings()
    (tmp_path / "cuda" / "core").mkdir(parents=True)
    assert not has_bindings()
    (tmp_path / "cuda" / "bindings").mkdir()
    (tmp_path / "cuda" / "bindings" / "__init__.py").write_text("raise RuntimeError")
    assert has_bindings()
    assert not {name for name in set(sys.modules) - loaded if name.startswith("cuda")}


def test_more_segments_than_files_may_be_open_are_refused_with_both_cures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with pytest.raises(StartError, match=r"^segment: .* 1000 are allowed.*larger segment.*ulimit"):
        looked(tmp_path, host_tier="1000MiB", segment="1MiB")
    with pytest.raises(StartError, match="takes 1024 open files"):
        looked(tmp_path, host_tier="320MiB", segment="1MiB")
    assert looked(tmp_path, host_tier="312MiB", segment="1MiB") == []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert looked(tmp_path, host_tier="1000MiB", segment="1MiB") == []


def test_a_tier_larger_than_the_memory_is_warned_of_where_it_fills_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(monkeypatch, available=8 * MIB, most=8 * MIB)
    assert looked(tmp_path, host_tier="8MiB") == []
    (warning,) = looked(tmp_path, host_tier="9MiB")
    assert "larger than the memory that is available" in warning
    assert looked(tmp_path, host_tier="9MiB", device=GPU, host_unpinned=True) == [warning]


def test_a_tier_that_would_be_pinned_and_cannot_be_is_refused_and_one_that_may_be_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(monkeypatch, available=4 * MIB, most=8 * MIB)
    with pytest.raises(StartError, match=r"9 MiB would be pinned.* 8 MiB .*host_unpinned"):
        looked(tmp_path, host_tier="9MiB", device=GPU)
    assert len(looked(tmp_path, host_tier="8MiB", device=GPU)) == 1
    memory_of(monkeypatch, available=None, most=None)
    assert looked(tmp_path, host_tier="9MiB", device=GPU) == []


def test_memory_that_an_earlier_tier_has_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(monkeypatch, available=8 * MIB, most=8 * MIB)
    runtime = tmp_path / "rt"
    folder = TierFolder.take(defaults(runtime)[1], runtime)
    (folder.path / "segment.0").write_bytes(b"x" * MIB)
    folder.release()
    assert looked(runtime, host_tier="9MiB", device=GPU) == []
    assert looked(runtime, host_tier="9MiB", host_dir=str(folder.path)) == []
    with pytest.raises(StartError, match="host_tier"):
        looked(runtime, host_tier="10MiB", device=GPU)
    assert len(looked(runtime, host_tier="9MiB", host_dir=str(tmp_path / "other"))) == 1


@pytest.mark.parametrize("below", [0, 1, 2])
@pytest.mark.parametrize("name", ["kv_events", "kv_events_union"])
def test_each_of_the_three_ports_of_a_stream_must_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, below: int
) -> None:
    monkeypatch.setattr(preflight, "PORTS_DEADLINE_S", 0.0)
    with listening(9) as port:
        flags = {"kv_events": address(port - 9), name: address(port - below)}
        with pytest.raises(StartError, match=rf"^{name}: tcp://127.0.0.1:{port} cannot be had: "):
            looked(tmp_path, **flags)
    assert looked(tmp_path, **flags) == []


def test_streams_that_meet_are_refused(tmp_path: Path) -> None:
    with listening(9) as port:
        pass
    with pytest.raises(StartError, match=r"^kv_events_union: .* meet"):
        looked(tmp_path, kv_events=address(port), kv_events_union=address(port + 2, "*"))


def test_streams_at_addresses_that_have_nothing_in_common_do_not_meet(tmp_path: Path) -> None:
    with listening() as port:
        pass
    one, other = address(port), address(port, "127.0.0.2")
    assert looked(tmp_path, kv_events=one, kv_events_union=other) == []
    for host in ("localhost", "0.0.0.0", "127.0.0.1"):
        with pytest.raises(StartError, match="meet"):
            looked(tmp_path, kv_events=one, kv_events_union=address(port, host))


def test_an_address_that_is_not_this_machines_is_not_called_taken(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot be had.*choose another host") as refused:
        looked(tmp_path, kv_events="tcp://192.0.2.1:5557")
    assert "ports in a row" not in str(refused.value)


def test_a_machine_without_ipv6_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(family: int, kind: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", without)
    with pytest.raises(StartError, match=r"^kv_events: tcp://\[::1\]:5557 .* choose another host"):
        looked(tmp_path, kv_events="tcp://[::1]:5557")


def test_ports_that_a_dead_daemons_publisher_still_has_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PORTS_DEADLINE_S", 60.0)
    port = free_ports(3)
    leaving = socket.create_server(("127.0.0.1", port))
    timer = threading.Timer(0.1, leaving.close)
    timer.start()
    try:
        assert looked(tmp_path, kv_events=address(port)) == []
    finally:
        timer.join()


@pytest.mark.parametrize("host", ["*", "[::1]", "lo", "localhost"])
def test_other_forms_of_an_address_pass(tmp_path: Path, host: str) -> None:
    with listening() as port:
        pass
    assert looked(tmp_path, kv_events=address(port, host)) == []


def test_without_kv_events_no_port_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_try_port", lambda *_: pytest.fail("a port was asked for"))
    assert looked(tmp_path) == []
