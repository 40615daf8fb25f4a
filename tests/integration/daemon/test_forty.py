"""The forty requests worked out by hand, told to a running daemon: `stats`, `report`, `explain`,
Prometheus and the access log agree with them and with each other, to the token."""

import json
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from directory.analytics.reader import LogReader
from directory.analytics.record import Access
from directory.cli.main import app
from directory.core.namespace import Adapter, NamespaceKey
from directory.protocol.ended import Ended
from tests.analytics.forty import (
    BLOCKS,
    CAUSE_PAGES,
    HIT_PAGES,
    LETTERS,
    LINES,
    LOOKUPS,
    N1,
    N2,
    N3,
    PATHS,
    PROMPT_TOKENS,
    REQUESTS,
    TAIL_TOKENS,
)
from tests.analytics.support import PAGE
from tests.integration.daemon.support import DaemonProcess, RawClient
from tests.integration.daemon.test_metrics import read, url_of
from tests.integration.daemon.test_recording import told

KEYS = {
    N1: NamespaceKey(),
    N2: NamespaceKey(adapter=Adapter("x", 1)),
    N3: NamespaceKey(cache_salt="third"),
}
POOL_ENDS = 25
"""Before this request the pool of s1 ends; what it alone had is gone."""


def ended(number: int, access: Access) -> Ended:
    """What a scheduler would have said of a request; `number` is from 1 up."""
    path = PATHS[number - 1]
    return Ended(
        request=access.request,
        attempt=access.attempt,
        namespace=KEYS[access.namespace],
        kind=access.kind,
        prompt_tokens=access.tokens,
        hit=(access.hit.own, access.hit.host, access.hit.peer, access.hit.store),
        found=access.found,
        inserted=access.inserted,
        lookups=access.lookups,
        tokens=array("I", (ord(letter) for letter in path for _ in range(PAGE))).tobytes(),
        tenant=access.tenant,
    )


class Told(NamedTuple):
    """What each way of asking said."""

    stats: dict[str, Any]
    metrics: dict[str, float]
    report: dict[str, Any]
    explained: dict[str, list[dict[str, Any]]]
    accesses: list[Access]


@pytest.fixture(name="told_of", scope="module")
def told_everything(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("f")
    runtime_dir, log = folder / "rt", folder / "log"
    with ExitStack() as stack:
        daemon = stack.enter_context(
            DaemonProcess(runtime_dir, "--access-log", str(log), "--metrics", "127.0.0.1:0")
        )
        url = url_of(daemon)
        ending = stack.enter_context(ExitStack())
        clients = {
            "s0": stack.enter_context(RawClient(runtime_dir, "s0")),
            "s1": ending.enter_context(RawClient(runtime_dir, "s1")),
        }
        for number, line in enumerate(LINES, start=1):
            if number == POOL_ENDS:
                ending.close()
                clients["s1"] = stack.enter_context(RawClient(runtime_dir, "s1"))
            clients[line.access.instance].report(ended(number, line.access))
        told(runtime_dir, REQUESTS)
        stats = as_json("stats", "--runtime-dir", str(runtime_dir))
        metrics = read(url)
        explained = {
            f"r{number}": found_of(f"r{number}", runtime_dir) for number in range(1, len(LINES) + 1)
        }
    accesses = [frame for frame in LogReader(log) if isinstance(frame, Access)]
    return Told(stats, metrics, as_json("report", str(log)), explained, accesses)


def as_json(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def found_of(request: str, runtime_dir: Path) -> list[dict[str, Any]]:
    """What `explain` says of a request that the running daemon has logged."""
    done = CliRunner().invoke(
        app, ["explain", request, "--runtime-dir", str(runtime_dir), "--json"]
    )
    if done.exit_code == 1:
        return []
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["found"]
    return found


def test_the_log_has_each_of_them_as_it_was_told(told_of: Told) -> None:
    assert [access.request for access in told_of.accesses] == [
        line.access.request for line in LINES
    ]
    for found, line in zip(told_of.accesses, LINES, strict=True):
        wanted = line.access
        assert (found.tokens, found.hit, found.kind) == (wanted.tokens, wanted.hit, wanted.kind)
        assert (found.found, found.inserted, found.lookups) == (
            wanted.found,
            wanted.inserted,
            wanted.lookups,
        )
        assert (found.digests, found.instance) == (wanted.digests, wanted.instance)


def test_stats_and_metrics_and_the_report_have_the_sums_worked_out_by_hand(told_of: Told) -> None:
    stats, report, metrics = told_of.stats["total"], told_of.report, told_of.metrics
    assert stats["requests"] == report["requests"] == REQUESTS
    assert summed(metrics, "requests", 'kind="request"') == REQUESTS
    assert stats["lookups"] == report["beside"]["lookups"] == summed(metrics, "lookups") == LOOKUPS
    assert stats["prompt_tokens"] == report["prompt_tokens"] == PROMPT_TOKENS
    assert summed(metrics, "prompt_tokens") == PROMPT_TOKENS
    assert stats["blocks"] == report["blocks"] == summed(metrics, "blocks") == BLOCKS
    assert summed(metrics, "hit_blocks") == sum(HIT_PAGES.values())
    for at, (source, pages) in enumerate(HIT_PAGES.items()):
        assert stats["hit"][at] == report["hit_tokens"][source] == PAGE * pages
        assert summed(metrics, "hit_tokens", f'source="{source}"') == PAGE * pages
    for name in ("retries", "recomputations", "probes"):
        assert stats[name] == report["beside"][name]
    assert told_of.stats["ratios"]["block_hit_ratio"] == report["block_hit_ratio"]
    assert told_of.stats["ratios"]["token_hit_ratio"] == report["token_hit_ratio"]
    assert told_of.stats["missed_tokens"] == report["missed_tokens"]
    lost = PAGE * CAUSE_PAGES["R"]
    assert stats["not_restorable_tokens"] == summed(metrics, "not_restorable_tokens") == lost


def test_stats_metrics_report_and_explain_give_each_computed_token_the_cause_worked_out_by_hand(
    told_of: Told,
) -> None:
    wanted = {LETTERS[letter].value: PAGE * pages for letter, pages in CAUSE_PAGES.items()}
    wanted["partial_tail"] = TAIL_TOKENS
    assert {line["cause"]: line["tokens"] for line in told_of.report["causes"]} == wanted
    assert told_of.stats["missed"] == wanted
    assert sum(wanted.values()) == told_of.stats["missed_tokens"]
    for line in told_of.report["causes"]:
        label = f'cause="{line["cause"]}"'
        assert summed(told_of.metrics, "missed_tokens", label) == line["tokens"]
        assert summed(told_of.metrics, "missed_requests", label) == line["requests"]
    added = dict.fromkeys(wanted, 0)
    for number, line in enumerate(LINES, start=1):
        found = told_of.explained[f"r{number}"]
        assert len(found) == (line.verdict is not None)
        for each in found:
            for part in each["parts"]:
                added[part["cause"]] += part["tokens"]
    assert added == wanted
    (gone,) = told_of.explained["r25"]
    assert (gone["gone"]["reason"], gone["gone"]["instance"]) == ("pool_gone", "s1")
    (elsewhere,) = told_of.explained["r13"]
    assert elsewhere["differs"] == {"adapter": ["x@1", None]}


def summed(metrics: dict[str, float], name: str, label: str = "") -> float:
    """A counter over all labels, or over those with one value."""
    return sum(
        value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == f"treecored_{name}_total" and label in sample
    )
