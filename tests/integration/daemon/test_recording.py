"""What a running daemon records of real schedulers, and what people are told of it: the access log,
`stats`, `explain`, `report`, `tree` and Prometheus say the same."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Began, Eviction, Named, Room
from directory.cli.asking import Asking
from directory.cli.main import app
from directory.core.events import Mode
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_tokens
from directory.protocol.admin import AdminStats, StatsReport
from directory.protocol.ended import Ended
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.worker_messages import Finished
from tests.integration.daemon.support import DEADLINE_S, DaemonProcess, RawClient, wait_until

PAGE = 16
PATIENT = Deadlines(call_ms=30_000)
"""An unanswered question would be a miss, and the log would rightly say so."""


class Node:
    """A scheduler in this process."""

    def __init__(self, runtime_dir: Path, instance: str, mode: Mode = "mirrored") -> None:
        self.pool = SharedPool(page_size=PAGE, page_count=16, bytes_per_token=64)
        client = DaemonClient.connect(
            runtime_dir, self.pool, instance=instance, mode=mode, deadlines=PATIENT
        )
        self.scheduler = ReferenceScheduler(
            self.pool, client, instance=instance, thin=mode == "thin"
        )

    def serve(self, number: int, *blocks: int, tail: int = 0) -> Finished:
        """Serve a prompt of whole pages, one token repeated in each, and `tail` tokens more."""
        tokens = [block for block in blocks for _ in range(PAGE)] + [0] * tail
        self.scheduler.submit(number, pack_tokens(tokens))
        found: list[Finished] = []

        def ended() -> bool:
            found.extend(self.scheduler.tick())
            if not found and self.scheduler.client is not None and not self.scheduler.moved:
                self.scheduler.client.wait(5_000)
            return bool(found)

        wait_until(ended)
        wait_until(self.settled)
        assert found[0].error == ""
        return found[0]

    def settled(self) -> bool:
        """Whether the daemon has heard of everything; a tick brings it nearer."""
        client = self.scheduler.client
        assert client is not None
        self.scheduler.tick()
        client.wait(5_000)
        return not client.open_count

    def close(self) -> None:
        self.scheduler.close()
        self.pool.close()


def told(runtime_dir: Path, requests: int, *, written: bool = True) -> StatsReport:
    """The daemon's figures once it has heard of so many requests, and has written them down."""

    def look() -> StatsReport | None:
        with Asking(runtime_dir, DEADLINE_S, "test") as daemon:
            report = daemon.ask(AdminStats(10), StatsReport)
        heard = sum(served.requests for served in report.served)
        settled = not written or (report.log is not None and not report.log.waiting)
        return report if heard >= requests and settled else None

    found = wait_until(look)
    assert found is not None
    return found


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: str | Path) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_every_request_is_one_record_with_its_hits_by_source(tmp_path: Path, mode: Mode) -> None:
    runtime_dir, folder = tmp_path / "rt", tmp_path / "log"
    with DaemonProcess(runtime_dir, "--access-log", str(folder)):
        left, right = Node(runtime_dir, "left", mode), Node(runtime_dir, "right", mode)
        left.serve(1, 1, 2, 3, tail=3)
        right.serve(2, 1, 2, 3, 4, tail=1)
        left.serve(3, 1, 2, 3, 5, 6)
        report = told(runtime_dir, 3)
        left.close()
        right.close()
    frames = list(LogReader(folder))
    accesses = [frame for frame in frames if isinstance(frame, Access)]
    hits = {a.request: (a.instance, a.tokens, a.hit.own, a.hit.host + a.hit.peer) for a in accesses}
    assert hits == {
        "left-1": ("left", 51, 0, 0),
        "right-2": ("right", 65, 0, 48),
        "left-3": ("left", 80, 48, 0),
    }
    assert [len(access.path) for access in accesses] == [3, 4, 5]
    assert accesses[1].path[:3] == accesses[0].path == accesses[2].path[:3]
    assert [access.inserted for access in accesses] == [48, 16, 32]
    assert accesses[1].restored == 48
    assert accesses[1].latency_us > 0
    assert accesses[1].restore_us > 0
    assert isinstance(frames[0], Began)
    rooms = [(room.tier, room.instance) for room in frames if isinstance(room, Room)]
    assert rooms[:3] == [("host", ""), ("device", "left"), ("device", "right")]
    assert sum(isinstance(frame, Named) for frame in frames) == 1
    served = {served.instance: served for served in report.served}
    assert served["right"].hit[1] + served["right"].hit[2] == 48
    assert (served["left"].requests, served["left"].prompt_tokens) == (2, 131)
    assert [hot.pages for hot in report.hottest] == [3]


def test_the_log_says_which_pages_were_evicted_from_where_and_explain_repeats_it(
    tmp_path: Path,
) -> None:
    runtime_dir, folder = tmp_path / "rt", tmp_path / "log"
    with DaemonProcess(runtime_dir, "--access-log", str(folder), "--host-tier", "0"):
        node = Node(runtime_dir, "only")
        node.serve(1, *range(1, 11))
        node.serve(2, *range(21, 31))  # the pool has 16 pages: some of the first path go
        node.serve(3, *range(1, 11), tail=1)
        report = told(runtime_dir, 3)
        evicted = {(line.tier, line.reason): line.pages for line in report.evicted}
        counted = report.counters["pool_pages_evicted"]
        said = run("explain", "only-3", "--runtime-dir", runtime_dir)
        node.close()
    assert evicted[("device", "capacity")] == counted > 0
    frames = list(LogReader(folder))
    assert sum(f.pages for f in frames if isinstance(f, Eviction) and f.reason == "capacity") == (
        counted
    )
    assert said.exit_code == 0, said.output
    assert "evicted from the device tier of only" in said.output.replace("\n", " ")
    third = next(f for f in frames if isinstance(f, Access) and f.request == "only-3")
    assert third.hit.total == 16 * PAGE - 10 * PAGE


def test_without_an_access_log_there_are_sums_and_no_tokens_travel(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir):
        node = Node(runtime_dir, "only")
        assert node.scheduler.client is not None
        assert node.scheduler.client.registration.ended == "sums"
        node.serve(1, 1, 2, 3, tail=1)
        node.serve(2, 1, 2, 3, tail=1)
        report = told(runtime_dir, 2, written=False)
        node.close()
    assert report.log is None
    assert report.served[0].hit == (48, 0, 0, 0)
    assert list(runtime_dir.glob("access*")) == []


def test_a_prompt_is_explained_out_of_the_live_tree(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"
    tokens = tmp_path / "tokens.json"

    def explain(*blocks: int, tail: int = 0, instance: str = "", salt: str = "") -> list[object]:
        tokens.write_text(json.dumps([b for b in blocks for _ in range(PAGE)] + [0] * tail))
        options = ["--instance", instance] if instance else []
        options += ["--salt", salt] if salt else []
        found = as_json("explain", "--tokens", tokens, "--runtime-dir", runtime_dir, *options)
        stretches = found["stretches"]
        assert isinstance(stretches, list)
        return [(line["verdict"], line["first_token"], line["tokens"]) for line in stretches]

    with DaemonProcess(runtime_dir, "--access-log", "on"):
        left, right = Node(runtime_dir, "left"), Node(runtime_dir, "right")
        left.serve(1, 1, 2, 3, tail=1)
        told(runtime_dir, 1)
        assert explain(1, 2, 3, tail=1, instance="left") == [
            ("own", 0, 48),
            ("partial_tail", 48, 1),
        ]
        assert explain(1, 2, 3, 4, tail=2, instance="right") == [
            ("peer", 0, 48),
            ("never_seen", 48, 16),
            ("partial_tail", 64, 2),
        ]
        assert explain(1, 2, 7, tail=1, instance="left") == [
            ("own", 0, 32),
            ("diverged", 32, 16),
            ("partial_tail", 48, 1),
        ]
        assert explain(1, 2, 3, 4, tail=1, salt="other") == [
            ("other_namespace", 0, 48),
            ("never_seen", 48, 16),
            ("partial_tail", 64, 1),
        ]
        assert explain(1) == [("partial_tail", 0, 16)]
        left.scheduler.flush()
        left.close()
        right.close()


def test_the_tree_is_drawn_with_who_has_what(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir):
        node = Node(runtime_dir, "only")
        node.serve(1, 1, 2, 3)
        node.serve(2, 1, 2, 4)
        told(runtime_dir, 2, written=False)
        drawn = run("tree", "--runtime-dir", runtime_dir).output
        nowhere = as_json("tree", "--runtime-dir", runtime_dir, "--instance", "nobody")
        upper = as_json("tree", "--runtime-dir", runtime_dir, "--depth", "1")
        node.close()
    lines = drawn.replace("\u00a0", " ").splitlines()
    assert "4 pages of 16 tokens" in " ".join(" ".join(lines[:3]).split())
    assert sum("2 pages " in line and "only" in line for line in lines) == 1
    assert sum("1 page " in line and "only" in line for line in lines) == 2
    assert nowhere["spaces"] == []
    spaces = upper["spaces"]
    assert isinstance(spaces, list)
    assert [len(space["nodes"]) for space in spaces] == [1]


def test_top_is_drawn_live_and_as_a_picture_of_80_columns(tmp_path: Path) -> None:
    runtime_dir, svg = tmp_path / "rt", tmp_path / "top.svg"
    with DaemonProcess(runtime_dir, "--access-log", "on"):
        node = Node(runtime_dir, "only")
        for number in range(3):
            node.serve(number, 1, 2, 3, tail=1)
        told(runtime_dir, 3)
        options = ("--count", "2", "--interval", "0.1")
        done = run("top", *options, "--svg", svg, "--runtime-dir", runtime_dir)
        node.close()
    assert done.exit_code == 0, done.output
    assert "hottest prefixes" in done.output
    picture = svg.read_text().replace("&#160;", " ")
    for words in ("treecored top", "only", "host tier", "restored"):
        assert words in picture


def test_what_nobody_can_believe_is_counted_and_nothing_else(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir), RawClient(runtime_dir, "a") as client:
        key = NamespaceKey()
        client.report(Ended(request="r", attempt=0, namespace=key, kind="request",
                            prompt_tokens=4, hit=(5, 0, 0, 0)))  # fmt: skip
        client.report(Ended(request="r", attempt=0, namespace=key, kind="request",
                            prompt_tokens=-4))  # fmt: skip
        client.report(Ended(request="r", attempt=0, namespace=key, kind="request",
                            prompt_tokens=4, hit=(4, 0, 0, 0)))  # fmt: skip
        report = told(runtime_dir, 1, written=False)
        assert report.counters["daemon_ended_not_believed"] == 2
        assert [served.requests for served in report.served] == [1]
        assert client.stats()["pools"] == 1


def test_record_makes_a_trace_of_what_ended_and_replay_can_read_it(tmp_path: Path) -> None:
    runtime_dir, out = tmp_path / "rt", tmp_path / "out.jsonl"
    with DaemonProcess(runtime_dir, "--access-log", "on"):
        node = Node(runtime_dir, "only")
        node.serve(1, 1, 2, 3, tail=1)
        node.serve(2, 1, 2, 4, tail=1)
        told(runtime_dir, 2)
        done = run("record", out, "--seconds", "0", "--last", "60", "--runtime-dir", runtime_dir)
        node.close()
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["input_length"] for line in lines] == [49, 49]
    assert lines[0]["hash_ids"][:2] == lines[1]["hash_ids"][:2]
    assert lines[0]["hash_ids"][2] != lines[1]["hash_ids"][2]
    simulated = as_json("report", out, "--block-tokens", str(PAGE))
    assert simulated["hit_blocks"] == 2


def test_a_log_without_a_request_is_nothing_recorded_and_nothing_to_explain(
    tmp_path: Path,
) -> None:
    runtime_dir, out = tmp_path / "rt", tmp_path / "out.jsonl"
    with DaemonProcess(runtime_dir, "--access-log", "on"):
        recorded = run("record", out, "--seconds", "0", "--runtime-dir", runtime_dir)
        explained = run("explain", "--runtime-dir", runtime_dir)
    assert (recorded.exit_code, explained.exit_code) == (1, 2)
    assert "nothing was recorded" in recorded.output
    assert "has no request yet" in explained.output


@pytest.mark.parametrize("name", ["nowhere/out.jsonl", "nowhere/out.csv", "folder/out.parquet"])
def test_what_cannot_be_written_is_said_before_the_recording(tmp_path: Path, name: str) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir, "--access-log", "on"):
        began = time.monotonic()
        done = run("record", tmp_path / name, "--seconds", "90", "--runtime-dir", runtime_dir)
        assert time.monotonic() - began < 45
    assert done.exit_code == 2, done.output


def test_a_picture_that_cannot_be_written_is_said_before_the_first_look(tmp_path: Path) -> None:
    svg = tmp_path / "nowhere" / "top.svg"
    done = run("top", "--count", "1", "--svg", svg, "--runtime-dir", tmp_path / "rt")
    assert done.exit_code == 2
    assert str(svg) in done.output
    assert "no daemon listens" not in done.output


@pytest.mark.parametrize("command", ["stats", "top", "tree", "record", "explain"])
def test_without_a_daemon_each_command_says_so_and_leaves_with_2(
    tmp_path: Path, command: str
) -> None:
    arguments = {"record": ["x.jsonl"], "top": ["--count", "1"]}.get(command, [])
    done = run(command, *arguments, "--runtime-dir", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "no daemon listens at" in done.output
    assert f"`treecored serve --runtime-dir {tmp_path / 'nowhere'}`" in done.output


def test_a_folder_that_cannot_be_written_to_stops_the_start(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    daemon = DaemonProcess(tmp_path / "rt", "--access-log", str(blocked / "log"), wait=False)
    with daemon:
        assert daemon.process.wait(DEADLINE_S) == 1
    assert "access_log:" in daemon.log()
