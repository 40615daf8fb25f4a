"""The timed groups: ratios and their bounds, cores, the timeline, costs and factors."""

from __future__ import annotations

import os
import random
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang_gpu import (
    busy_wait,
    cache_cost,
    loaded,
    plot,
    quiet,
    rows,
    timeline,
    turns,
)
from benchmarks.sglang_gpu.cores import Division, Seat, divided, measured, partner_of, physical
from benchmarks.sglang_gpu.places import ROOT
from benchmarks.sglang_gpu.ratios import paired, ratio_of
from benchmarks.sglang_gpu.show import show
from scheduler_shim.sglang.settings import Settings
from tests.sglang import wire
from transfer.ipc.marks import Marks


def test_a_ratio_of_paired_columns_has_a_bound_that_their_common_noise_does_not_widen() -> None:
    draw = random.Random(3)
    common = [draw.uniform(40, 80) for _ in range(40)]
    ours = [1.05 * c for c in common]
    tight = ratio_of(ours, common)
    assert tight.value == pytest.approx(1.05)
    assert tight.upper == pytest.approx(1.05)
    assert tight.within(1.051)
    assert not tight.within(1.04)
    shuffled = draw.sample(common, len(common))
    loose = ratio_of(ours, shuffled)
    assert loose.upper > tight.upper
    assert loose == ratio_of(ours, shuffled), "the same samples have the same bound"


def test_columns_that_are_no_pairs_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of([], [])


def test_only_columns_that_were_measured_are_judged_by_the_goal_of_their_length() -> None:
    column = {"own": [40.0] * 30, "peer": [45.0] * 30}
    short, long = rows.judged(column, long=False), rows.judged(column, long=True)
    assert list(short) == ["peer / own"]
    assert (short["peer / own"]["ok"], long["peer / own"]["ok"]) == (False, True)
    assert short["peer / own"]["pairs"] == 30


def test_every_round_is_a_pair() -> None:
    column = {"own": [40.0, 80.0] * 30, "peer": [44.0, 90.0] * 30}
    found = rows.judged(column, long=False)["peer / own"]
    assert (found["ratio"], found["pairs"]) == (1.112, 60)
    assert found["upper"] == pytest.approx(1.115, abs=0.001)


def test_moments_that_both_of_a_pair_have_had_do_not_widen_the_bound_of_their_ratio() -> None:
    draw = random.Random(5)
    moments = [draw.choice((40.0, 80.0)) for _ in range(40)]
    theirs = [moment * draw.uniform(0.99, 1.01) for moment in moments]
    ours = [1.05 * moment * draw.uniform(0.99, 1.01) for moment in moments]
    found = paired(ours, theirs)
    assert found.value == pytest.approx(1.05, abs=0.005)
    assert found.upper < 1.056
    assert ratio_of(ours, theirs).upper > found.upper
    assert paired(ours, theirs[::-1]).upper > 1.1, "nothing cancels in what is no pair"
    with pytest.raises(ValueError, match="no pairs"):
        paired([1.0], [])


def test_the_other_half_of_a_core_is_the_cpu_that_slows_it_twice() -> None:
    def rate(cpu: int, other: int) -> float:
        return {7: 0.6}.get(other, 1.0)

    assert partner_of(3, [0, 1, 2, 7], rate) == 7
    assert partner_of(3, [0, 1, 2], rate) is None
    assert partner_of(3, [], rate) is None
    once = iter([1.0, 0.5, 1.0, 1.0])
    assert partner_of(3, [0, 1, 2], lambda *_: next(once)) is None, "it was a moment of its own"


def test_a_real_cpu_has_a_rate_beside_a_busy_one() -> None:
    before = os.sched_getaffinity(0)
    cpus = sorted(before)
    rate, end = measured()
    try:
        assert rate(cpus[0], cpus[-1]) > 0
    finally:
        end()
    assert os.sched_getaffinity(0) == before


def test_the_seat_is_one_cpu_whose_other_half_nobody_has_and_no_two_shares_meet() -> None:
    cores = [(2 * n, 2 * n + 1) for n in range(16)]
    division = divided(cores, partner=20)
    assert division is not None
    shares = list(vars(division).values())
    assert division.seat == {2}
    assert all(len(share) >= 4 for share in shares[1:])
    assert sum(map(len, shares)) == len(set().union(*shares)) == 30
    assert not {3, 20} & set().union(*shares)
    assert {0, 1} <= division.rest, "the first core has the interrupts"
    assert divided(cores[:5]) is None


def test_halves_of_a_core_go_together_and_neighbours_do_where_halves_are_hidden(
    tmp_path: Path,
) -> None:
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    assert physical(range(8), tmp_path) == [(0, 1, 4), (2, 3, 6), (5,), (7,)]
    assert physical(range(5), tmp_path / "absent") == [(0, 1), (2, 3), (4,)]


def test_a_schedulers_main_thread_has_the_seat_and_everything_else_runs_beside() -> None:
    each = sorted(os.sched_getaffinity(0))
    if len(each) < 2:
        pytest.skip("one core cannot be divided")
    seat, beside = frozenset({each[0]}), frozenset({each[1]})
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    command = [sys.executable, "-c", f"{program}; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            one.stdout.readline()
            Seat(None).engine(one.pid, [one.pid])
            assert os.sched_getaffinity(one.pid) == set(each), "it is not divided"
            Seat(Division(seat, beside, beside, beside)).engine(one.pid, [one.pid])
            tasks = {int(task.name) for task in Path(f"/proc/{one.pid}/task").iterdir()}
            seen = {task: os.sched_getaffinity(task) for task in tasks}
        finally:
            one.kill()
    assert len(seen) == 2
    assert seen.pop(one.pid) == seat
    assert list(seen.values()) == [beside]


def test_a_quiet_scheduler_says_who_it_is_and_has_its_collector_leave_alone_what_was_there(
    tmp_path: Path,
) -> None:
    """In a process of its own, with a stand-in for SGLang's module."""
    (tmp_path / "sglang/srt/managers").mkdir(parents=True)
    (tmp_path / "sglang/srt/managers/scheduler.py").write_text(
        "import gc\n"
        "class Scheduler:\n"
        "    def __init__(self, kept): self.kept = kept\n"
        "def run_scheduler_process(kept):\n"
        "    scheduler = Scheduler(kept)\n"
        "    print(scheduler.kept, gc.get_freeze_count() > 0)\n"
    )
    program = "from benchmarks.sglang_gpu import quiet; quiet.run([1, 2])"
    environ = {**os.environ, **quiet.environ(tmp_path / "pid"),
               "PYTHONPATH": f"{tmp_path}:{ROOT}"}  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True
    ) as one:
        said = one.communicate(timeout=60)[0]
    assert said == "[1, 2] True\n"
    assert (tmp_path / "pid").read_text() == str(one.pid)


def test_the_timeline_lays_the_marks_of_all_processes_beside_one_another(tmp_path: Path) -> None:
    def marks(*lines: str, pid: int) -> None:
        (tmp_path / f"{pid}.marks").write_text("".join(f"{line}\n" for line in lines))

    marks("1000000 ask peer 64", "9000000 told x", "20000000 ask host 64", "26000000 told y", pid=1)
    marks("2000000 seen x", "3000000 asked x 5", "21000000 seen y", pid=2)
    marks(
        "100 taken 3 backup", "4000000 taken 7 peer_copy", "4500000 slice 7 10",
        "4600000 slice 3 10", "5000000 slice 7 10", "22000000 landed 8 1", "23000000 landed 8 2",
        pid=3,
    )  # fmt: skip
    told = timeline.told(tmp_path)
    assert told["peer 64"] == {
        "seen": 1.0, "asked": 2.0, "taken": 3.0, "first slice": 3.5, "last slice": 4.0, "told": 8.0,
    }  # fmt: skip
    assert told["host 64"] == {"seen": 1.0, "first layer": 2.0, "last layer": 3.0, "told": 6.0}
    assert timeline.as_text(told).startswith("peer 64: seen 1.00, asked 2.00")


def test_real_marks_can_be_read(tmp_path: Path) -> None:
    marks = Marks()
    marks.begin_in(str(tmp_path))
    marks("ask", "own", 64)
    marks("seen", "r")
    marks("told", "r")
    assert list(timeline.told(tmp_path)["own 64"]) == ["seen", "told"]


class Scheduler:
    """As much of SGLang's as is counted."""

    def __init__(self) -> None:
        self.waiting_queue: list[str] = []
        self.chunked_req = None
        self.running_batch = self
        self.last_batch = None
        self.tree_cache = self

    def is_empty(self) -> bool:
        return True

    def match_prefix(self) -> int:
        return sum(range(20_000)) + self.inc_lock_ref()

    def inc_lock_ref(self) -> int:
        return sum(range(20_000))

    def cache_finished_req(self) -> None:
        """It has ended."""

    def check_hicache_events(self) -> int:
        return sum(range(20_000))


def test_what_a_cache_costs_is_counted_once_and_not_while_nobody_asks_for_anything(
    tmp_path: Path,
) -> None:
    cost = cache_cost.Cost(tmp_path / "cost")
    scheduler: Any = Scheduler()
    cache_cost.watch(cost, scheduler)
    scheduler.check_hicache_events()
    assert cost.ns == 0, "an idle scheduler asks as often as it can"
    scheduler.match_prefix()
    once = cost.ns
    assert once > 0, "this is for a request, which may not be in the queue any more"
    scheduler.waiting_queue.append("r")
    scheduler.check_hicache_events()
    assert cost.ns > once
    scheduler.cache_finished_req()
    cost._save()
    found = cache_cost.read(tmp_path / "cost")
    assert found["requests"] == 1
    assert found["us_a_request"] >= round(once / 1e3, 1)
    assert found["us_a_request_by"].keys() == {
        "match_prefix", "check_hicache_events", "cache_finished_req",
    }, "the lock within the match is the match's"  # fmt: skip
    assert cache_cost.read(tmp_path / "absent") == {}


class Talker:
    """A replica that answers at once, over a pipe that `select` can see."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self.asked: list[list[int]] = []
        self._open: dict[str, wire.Report] = {}

    def fileno(self) -> int:
        return self._out

    def submit(self, tokens: list[int], new: int, *, stream: bool) -> str:
        assert stream
        self.asked.append(list(tokens))
        name = f"{id(self)}-{len(self.asked)}"
        self._open[name] = wire.Output(name, [7] * new, 16, {}, "length", (0.25, 0.5))
        os.write(self._in, b"x")
        return name

    def take_ended(self, names: Any) -> dict[str, wire.Report]:
        if select.select([self._out], [], [], 0)[0]:
            os.read(self._out, 64)
        return {name: self._open.pop(name) for name in list(names) if name in self._open}


def test_conversations_grow_by_the_answer_and_go_to_the_same_replicas_for_every_system() -> None:
    talk = turns.Talk(users=3, turns=4, first=20, more=5, new=2)
    systems = [[Talker(), Talker()] for _ in range(2)]
    drove = [turns.drive(replicas, talk, 5) for replicas in systems]  # type: ignore[arg-type]
    first, second = ([sorted(map(len, one.asked)) for one in replicas] for replicas in systems)
    assert first == second
    assert sorted(n for one in first for n in one) == sorted([20, 27, 34, 41] * 3)
    found = drove[0].as_json(talk)
    assert found["ttft_ms_mean"] == 250.0
    assert (len(drove[0].first_ms), len(drove[0].ttft_ms)) == (3, 9)
    assert found["failed"] == []


def test_factors_are_better_above_one() -> None:
    def one(rate: float, ttft: float) -> dict[str, Any]:
        return {"requests_per_s": rate, "ttft_ms_mean": ttft}

    rounds = {"adaptive": [one(10, 50), one(12, 40)], "none": [one(5, 100), one(6, 120)]}
    assert loaded.factors(rounds, "adaptive") == {"none": {"throughput": 2.0, "ttft": 2.5}}
    assert loaded.factors(rounds, "none") == {"adaptive": {"throughput": 0.5, "ttft": 0.417}}


def test_a_wait_is_judged_by_the_rounds_of_both() -> None:
    without = [{"ttft_ms_mean": ms, "requests_per_s": 10.0} for ms in (50.0, 90.0, 60.0)]
    waiting = [{**one, "ttft_ms_mean": 0.8 * one["ttft_ms_mean"]} for one in without]
    assert busy_wait.factors(without, waiting) == {
        "ttft_ms_mean": {"ratio": 0.8, "upper": 0.8}, "requests_per_s": {"ratio": 1, "upper": 1},
    }  # fmt: skip
    assert busy_wait.WAITS_US[0] == Settings().busy_wait_us, "the default is one of the two"


def test_the_headline_is_drawn_from_the_rows_that_are_there() -> None:
    def row(**ms: float) -> dict[str, Any]:
        return {name.replace("_", " "): {"median_ms": value} for name, value in ms.items()}

    picture = plot.svg({"rows": {
        "32768": row(cold=2683.0, own=101.0), "8192": row(cold=267.0, HiCache_L2=55.0, host=50.0),
    }})  # fmt: skip
    assert picture.index("8,192 tokens") < picture.index("32,768 tokens")
    assert picture.count("<rect") == 5
    assert "2,683 ms" in picture
    assert "peer" not in picture
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', picture)]
    assert max(widths) == widths[3], "the longest bar is the slowest"
    assert min(widths) > 0


def test_a_bar_of_the_headline_ends_where_its_line_stands() -> None:
    picture = plot.svg(
        {"rows": {"8192": {"cold": {"median_ms": 200.0}, "own": {"median_ms": 100.0}}}}
    )
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', picture)]
    lines = [float(at) - plot.LEFT for at in re.findall(r'd="M([\d.]+) ', picture)]
    names = re.findall(r'"middle">([\d,]+) ms', picture)
    assert names == ["100"], "within the bars, but not at their very end"
    assert lines == widths[1:]


def test_the_rows_are_shown_with_their_ratios(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(
        '{"ok": true, "misses": [], "rows": {"8192": {"own": {"median_ms": 40.1, "ms": [40.1]}}},'
        ' "ratios": {"8192": {"peer / own": {"ratio": 1.05, "upper": 1.08, "goal": 1.1,'
        ' "pairs": 30, "ok": true}}}}'
    )
    text = show(tmp_path)
    assert "40.1" in text
    assert "1.08" in text
