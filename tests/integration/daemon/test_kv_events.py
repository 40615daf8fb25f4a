"""KV events of a running daemon, over the wire."""

import http.server
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.core.events import Evicted, Flush
from tests.integration.daemon.listening import (
    Listener,
    get,
    published,
    publisher_of,
    streams,
)
from tests.integration.daemon.support import PAGE_SIZE, DaemonProcess, RawClient, wait_until
from tests.ports import free_ports
from tests.property.test_kv_events import hash_chain


def hashes(tokens: range) -> list[int]:
    """Hashes of the whole pages of a prompt without a namespace."""
    return hash_chain(tokens, PAGE_SIZE)


@pytest.fixture
def base() -> int:
    return free_ports(12)


@pytest.fixture
def telling(tmp_path: Path, base: int) -> Iterator[DaemonProcess]:
    flags = ("--kv-events", f"tcp://127.0.0.1:{base}", "--host-tier", "1MiB")
    with DaemonProcess(tmp_path / "rt", *flags) as process:
        yield process


def publish(client: RawClient, tokens: range, pages: list[int]) -> None:
    """Compute a prompt's pages and report them."""
    for page in pages:
        client.pool_memory.write(page, b"x")
    client.insert(tokens, pages)


def test_each_scheduler_has_a_stream_that_tells_what_it_has_and_can_load(
    telling: DaemonProcess,
) -> None:
    with RawClient(telling.runtime_dir, "a") as a, RawClient(telling.runtime_dir, "b"):
        where = streams(telling, "a", "b")
        with Listener(where["a"]) as of_a, Listener(where["b"]) as of_b:
            first, second = hashes(range(8))
            publish(a, range(8), [0, 1])
            both = {"GPU", "CPU_PINNED"}
            of_a.until(lambda blocks: blocks == {first: both, second: both})
            of_b.until(lambda blocks: blocks == {first: {"CPU_PINNED"}, second: {"CPU_PINNED"}})
            a.report(Evicted(((1, 0, 2),), ((1, 1),)))
            of_a.until(lambda blocks: blocks == {first: {"CPU_PINNED"}, second: {"CPU_PINNED"}})
            batch = next(
                b
                for _, b in of_a.batches
                if any("medium" in e for e in b[1]) and b[1][0]["type"] == "BlockRemoved"
            )
            assert [event["type"] for event in batch[1]] == ["BlockRemoved", "BlockStored"]
            a.report(Flush("host"))
            of_a.until(lambda blocks: blocks == {})
            of_b.until(lambda blocks: blocks == {})


def test_who_comes_late_is_told_everything_and_who_was_there_is_not_cleared(
    telling: DaemonProcess,
) -> None:
    cleared = {"type": "AllBlocksCleared"}
    # Both places: what is backed up later would come as a batch of its own.
    all_of_it = {block: {"GPU", "CPU_PINNED"} for block in hashes(range(8))}
    with RawClient(telling.runtime_dir, "a") as a:
        publish(a, range(8), [0, 1])
        where = streams(telling, "a")
        # A stream begins with a clear, which is to be over before anybody comes.
        wait_until(lambda: published(where["a"]) == all_of_it)
        with Listener(where["a"]) as early:
            early.until(lambda blocks: early.told and blocks == all_of_it)
            known = len(early.batches)
            with Listener(where["a"]) as late:
                late.until(lambda blocks: blocks == all_of_it)
                early.until(lambda _: early.batches[-1] == late.batches[-1])
                assert cleared not in [e for _, b in early.batches[known:] for e in b[1]]

        def alone_again() -> bool:
            """Whether it was cleared for one that is told everything: as far as the publisher has
            noticed, nobody else is there, and this one may know what is no more."""
            with Listener(where["a"]) as again:
                again.until(lambda blocks: blocks == all_of_it)
                return cleared in [e for _, b in again.batches for e in b[1]]

        wait_until(alone_again)


def test_what_was_missed_is_replayed_and_what_is_kept_no_longer_comes_as_a_snapshot(
    telling: DaemonProcess,
) -> None:
    with RawClient(telling.runtime_dir, "a") as a:
        where = streams(telling, "a")
        with Listener(where["a"]) as listener:
            publish(a, range(8), [0, 1])
            listener.until(lambda blocks: list(blocks) == hashes(range(8)))
            live = listener.batches
            assert listener.ask(live[0][0])[: len(live)] == live
            ((sequence, batch), *rest) = listener.ask(0)
            assert not rest
            assert sequence >= live[-1][0]
            assert [event["type"] for event in batch[1]][:2] == ["AllBlocksCleared", "BlockStored"]
            assert batch[1][1]["token_ids"] == list(range(8))
            assert listener.ask(1 << 62) == []


def test_a_scheduler_that_dies_leaves_nothing_on_its_stream_and_comes_back_to_it(
    telling: DaemonProcess,
) -> None:
    with RawClient(telling.runtime_dir, "a") as a:
        publish(a, range(8), [0, 1])
        wait_until(lambda: a.stats().get("backup_ok"))
        where = streams(telling, "a")
    with Listener(where["a"]) as listener:
        # It may have come before the publisher knew of the end.
        listener.until(lambda blocks: listener.told and not blocks)
        with RawClient(telling.runtime_dir, "a"):
            # What is left at the host can be loaded by it again.
            listener.until(lambda blocks: set(blocks) == set(hashes(range(8))))
        listener.until(lambda blocks: not blocks)
    assert streams(telling, "a") == where


def test_a_publisher_that_is_killed_is_replaced_and_its_sequence_goes_on(
    telling: DaemonProcess,
) -> None:
    with RawClient(telling.runtime_dir, "a") as a:
        publish(a, range(8), [0, 1])
        with Listener(streams(telling, "a")["a"]) as before:
            before.until(lambda blocks: len(blocks) == 2)
        os.kill(publisher_of(telling), signal.SIGKILL)
        wait_until(lambda: a.stats()["daemon_kv_publishers_started"] == 2)
        with Listener(streams(telling, "a")["a"]) as after:
            after.until(lambda blocks: len(blocks) == 2)
            assert after.batches[0][0] > before.batches[-1][0]


def test_a_stopped_publisher_does_not_keep_a_client_waiting(telling: DaemonProcess) -> None:
    with RawClient(telling.runtime_dir, "a") as a:
        streams(telling, "a")
        publisher = publisher_of(telling)
        os.kill(publisher, signal.SIGSTOP)
        try:
            for at in range(30):
                publish(a, range(100 * at, 100 * at + 8), [2 * at, 2 * at + 1])
            assert "daemon_kv_publishers_lost" not in a.stats()
        finally:
            os.kill(publisher, signal.SIGCONT)
        with Listener(streams(telling, "a")["a"]) as listener:
            listener.until(lambda blocks: len(blocks) == 60)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_daemon_that_ends_takes_its_publisher_along(
    telling: DaemonProcess, stopped: bool
) -> None:
    pid = publisher_of(telling)
    with RawClient(telling.runtime_dir, "a"):
        streams(telling, "a")  # who publishes is tied to its daemon by then
    if stopped:  # it cannot notice anything itself
        os.kill(pid, signal.SIGSTOP)
    telling.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_http_side_says_where_the_stream_is_and_hides_the_rest(
    telling: DaemonProcess, base: int
) -> None:
    with RawClient(telling.runtime_dir, "a"):
        http = streams(telling, "a")["a"]["http"]
        events = get(f"{http}/server_info")["kv_events"]
        assert events == {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": base,
            "replay_endpoint_port_base": base + 1,
            "topic": "",
            "block_size": PAGE_SIZE,
            "dp_size": 1,
        }
        for path, body in (("/", None), ("/detokenize", b'{"tokens":[1]}')):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(f"{http}{path}", body)


def test_words_come_from_the_detokenizer(tmp_path: Path, base: int) -> None:
    asked: list[bytes] = []

    class Words(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"text":"hello"}')

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Words) as words:
        threading.Thread(target=words.serve_forever, args=(0.05,), daemon=True).start()
        flags = ["--kv-events", f"tcp://127.0.0.1:{base}", "--kv-events-detokenizer"]
        flags.append(f"http://127.0.0.1:{words.server_port}/detokenize")
        with (
            DaemonProcess(tmp_path / "rt", *flags) as daemon,
            RawClient(daemon.runtime_dir, "a"),
        ):
            where = streams(daemon, "a")["a"]["http"]
            assert get(f"{where}/detokenize", b'{"tokens":[1]}') == {"text": "hello"}
        words.shutdown()
    assert asked == [b'{"tokens":[1]}']


def test_the_old_form_is_arrays_and_three_frames(tmp_path: Path, base: int) -> None:
    flags = ["--kv-events", f"tcp://127.0.0.1:{base}", "--kv-events-form", "array"]
    with DaemonProcess(tmp_path / "rt", *flags) as daemon, RawClient(daemon.runtime_dir, "a") as a:
        publish(a, range(8), [0, 1])
        wait_until(lambda: a.stats().get("backup_ok"))
        with Listener(streams(daemon, "a")["a"]) as listener:
            ((_, batch),) = wait_until(
                lambda: [r for r in listener.ask(0, frames=3) if len(r[1][1]) == 3]
            )
            expected = [hashes(range(8)), None, list(range(8)), PAGE_SIZE, None]
            assert batch[1] == [
                ["AllBlocksCleared"],
                ["BlockStored", *expected, "CPU_PINNED"],
                ["BlockStored", *expected, "GPU"],
            ]


def test_the_union_names_who_has_what(tmp_path: Path, base: int) -> None:
    flags = ["--kv-events", f"tcp://127.0.0.1:{base}"]
    flags += ["--kv-events-union", f"tcp://127.0.0.1:{base + 9}"]
    with (
        DaemonProcess(tmp_path / "rt", *flags) as daemon,
        RawClient(daemon.runtime_dir, "a") as a,
        RawClient(daemon.runtime_dir, "b") as b,
        Listener(streams(daemon, "")[""]) as listener,
    ):
        publish(a, range(8), [0, 1])
        publish(b, range(4), [0])
        wait_until(lambda: a.stats().get("backup_ok"))
        latest: dict[int, str] = {}
        first, second = hashes(range(8))
        want = {first: "a:GPU b:GPU host:CPU_PINNED", second: "a:GPU host:CPU_PINNED"}
        while latest != want:
            for event in listener.hear()[1]:
                for block in event.get("block_hashes", ()):
                    latest[block] = event["medium"]


def test_ports_that_are_taken_are_said_and_stop_nothing(tmp_path: Path, base: int) -> None:
    with (
        http.server.HTTPServer(("127.0.0.1", base + 5), http.server.BaseHTTPRequestHandler),
        DaemonProcess(tmp_path / "rt", "--kv-events", f"tcp://127.0.0.1:{base}") as daemon,
        RawClient(daemon.runtime_dir, "a") as a,
    ):
        streams(daemon, "a")
        with RawClient(daemon.runtime_dir, "b") as b:
            publish(b, range(8), [0, 1])
            wait_until(lambda: "no kv events" in daemon.log())
            assert b.stats()["asked_insert"] == 1
            with Listener(streams(daemon, "a")["a"]) as of_a:
                publish(a, range(8), [0, 1])
                of_a.until(lambda blocks: len(blocks) == 2)


def test_ports_of_the_first_stream_that_are_taken_stop_the_start(tmp_path: Path, base: int) -> None:
    with (
        http.server.HTTPServer(("127.0.0.1", base + 2), http.server.BaseHTTPRequestHandler),
        DaemonProcess(
            tmp_path / "rt", "--kv-events", f"tcp://127.0.0.1:{base}", wait=False
        ) as daemon,
    ):
        assert daemon.process.wait(60) == 1
        assert f"kv_events: tcp://127.0.0.1:{base + 2} cannot be had" in daemon.log()
