"""What a run of chaos came to: the table of faults, the figures, and the verdict.

Owns the wording and what counts as a failure. It must never compute what no process reported.
"""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from directory.cli.chaos_faults import KINDS
from directory.cli.chaos_run import Counted, KindCount
from directory.cli.tables import size
from directory.cli.tally import HitTokens
from scheduler_shim.worker_messages import DAEMON_LOST


class FaultReport(msgspec.Struct, frozen=True):
    """One kind. Seconds from a fault's begin until all was whole again, its own time included."""

    kind: str
    injected: int
    median_s: float | None
    longest_s: float | None


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints. `requests_asked_again`: their scheduler was killed over them."""

    seconds: float
    seed: int
    schedulers: int
    faults: list[FaultReport]
    faults_injected: int
    requests: int
    requests_asked_again: int
    requests_failed: int
    prompt_tokens: int
    hit_tokens: HitTokens
    pages_verified: int
    pages_wrong: int
    invariant_walks: int
    violations: list[str]
    daemon_boots: int
    scheduler_boots: int
    movers: int
    shared_memory_objects: tuple[int, int]
    shared_memory_bytes: tuple[int, int]
    descriptors_before: dict[str, int]
    descriptors_after: dict[str, int]
    returns: int
    spans_republished: int
    host_pages_recovered: int
    host_pages_quarantined: int
    problems: list[str]


def report_on(counted: Counted, seed: int) -> Report:
    """Gather the figures and judge them."""
    tally = counted.tally
    before, after = counted.held
    violations = list(counted.violations)
    for summary in counted.summaries:
        violations += [
            f"{summary.instance}: {line}"
            for line in summary.violations
            if not line.startswith(DAEMON_LOST)
        ]
    return Report(
        seconds=round(counted.seconds, 1),
        seed=seed,
        schedulers=len(counted.summaries),
        faults=[_fault(each) for each in counted.faults],
        faults_injected=sum(len(each.seconds) for each in counted.faults),
        requests=tally.requests,
        requests_asked_again=counted.asked_again,
        requests_failed=tally.failed,
        prompt_tokens=tally.prompt_tokens,
        hit_tokens=tally.hit_tokens,
        pages_verified=tally.verified,
        pages_wrong=tally.wrong,
        invariant_walks=counted.reports,
        violations=violations,
        daemon_boots=counted.daemon_boots,
        scheduler_boots=counted.scheduler_boots,
        movers=counted.movers,
        shared_memory_objects=(before.objects, after.objects),
        shared_memory_bytes=(before.nbytes, after.nbytes),
        descriptors_before=before.descriptors,
        descriptors_after=after.descriptors,
        returns=_sum(counted, "returned"),
        spans_republished=_sum(counted, "spans_republished"),
        host_pages_recovered=counted.summaries[-1].daemon.get("host_pages_recovered", 0),
        host_pages_quarantined=counted.quarantined,
        problems=_problems(counted, violations),
    )


def show(report: Report, console: Console) -> None:
    """Print the table of faults, the figures and the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    for heading in ("times", "median s", "longest s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what was done")
    for fault in report.faults:
        table.add_row(
            fault.kind,
            str(fault.injected),
            "-" if fault.median_s is None else f"{fault.median_s:.1f}",
            "-" if fault.longest_s is None else f"{fault.longest_s:.1f}",
            KINDS[fault.kind].does,
        )
    console.print(table)
    console.print("(seconds until all was whole again, the fault's own time included)\n")
    objects, nbytes = report.shared_memory_objects, report.shared_memory_bytes
    for name, text in (
        ("requests", f"{report.requests:,}, {report.requests_failed} failed"),
        ("asked again", f"{report.requests_asked_again:,} (their scheduler was killed)"),
        ("pages verified", f"{report.pages_verified:,}, {report.pages_wrong} wrong"),
        ("invariants", f"walked {report.invariant_walks} times, {len(report.violations)} broken"),
        ("daemons", f"{report.daemon_boots}, with {report.movers} movers"),
        ("schedulers", f"{report.scheduler_boots} processes under {report.schedulers} names"),
        ("shm before", f"{objects[0]} objects, {size(nbytes[0])}"),
        ("shm after", f"{objects[1]} objects, {size(nbytes[1])}"),
        ("fds before", f"{sum(report.descriptors_before.values())}"),
        ("fds after", f"{sum(report.descriptors_after.values())}"),
    ):
        console.print(f"{name:15} {text}", highlight=False)
    for problem in report.problems:
        console.print(f"[red]{problem}[/red]")
    if not report.problems:
        console.print(
            f"\n{report.faults_injected} faults in {report.seconds:.0f} s, and nobody noticed "
            "more than a cache miss.",
            style="bold green",
        )


def _fault(of: KindCount) -> FaultReport:
    seconds = of.seconds
    return FaultReport(
        of.kind,
        len(seconds),
        round(statistics.median(seconds), 3) if seconds else None,
        round(max(seconds), 3) if seconds else None,
    )


def _sum(counted: Counted, name: str) -> int:
    return sum(summary.counters.get(name, 0) for summary in counted.summaries)


def _problems(counted: Counted, violations: list[str]) -> list[str]:
    tally, found = counted.tally, []
    before, after = counted.held
    if tally.wrong:
        found.append(f"{tally.wrong} pages held wrong bytes")
    unread = tally.hit_pages - tally.verified - tally.wrong
    if unread > 0:
        found.append(f"{unread} of {tally.hit_pages} pages hit were not read back and compared")
    if tally.requests != counted.asked:
        found.append(f"{tally.requests} of {counted.asked} requests finished")
    if tally.failed:
        found.append(f"{tally.failed} requests failed ({'; '.join(tally.errors)})")
    if violations:
        found.append(f"{len(violations)} invariants did not hold: {violations[0]}")
    if (before.objects, before.nbytes) != (after.objects, after.nbytes):
        found.append(
            f"shared memory changed from {before.objects} objects of {before.nbytes} bytes to "
            f"{after.objects} of {after.nbytes}"
        )
    for role, count in before.descriptors.items():
        if after.descriptors[role] != count:
            was, now = Counter(before.kinds.get(role)), Counter(after.kinds.get(role))
            found.append(
                f"{role} had {count} descriptors and has {after.descriptors[role]} "
                f"(more: {sorted((now - was).elements())}, less: {sorted((was - now).elements())})"
            )
    if counted.left_alive:
        found.append(f"movers outlived their daemon: {counted.left_alive}")
    missing = [each.kind for each in counted.faults if not each.seconds]
    if missing:
        found.append(f"no fault of these kinds came about: {', '.join(missing)}")
    return found
