"""Metrics: stable names, and a dashboard that asks for nothing that is not there."""

import json
import re
from typing import Any

import pytest

from directory.daemon.metrics import COUNTERS, HISTOGRAMS, PREFIX, samples
from directory.protocol.admin import EvictedReport, ServedReport, StatsReport, TierReport
from tests.tidy.source import ROOT

DASHBOARD = ROOT / "docs/grafana/treecored.json"
LABELS = {f"{PREFIX}{name.name}_total": set(name.labels) for name in COUNTERS} | {
    f"{PREFIX}{name.name}{suffix}": {*name.labels, *(("le",) if suffix == "_bucket" else ())}
    for name in HISTOGRAMS
    for suffix in ("_bucket", "_count", "_sum")
}
USED = re.compile(rf"({PREFIX}\w+)(\{{[^}}]*\}})?")

REPORT = StatsReport(
    at_us=2,
    started_us=1,
    epoch=1,
    version="",
    counters={"refused_too_large": 3, "bytes_restored": 7, "daemon_movers_lost": 2},
    gauges={},
    served=(ServedReport("a", requests=2, prompt_tokens=10, hit=(1, 2, 3, 0)),),
    pools=(),
    host=TierReport(0, 0, 0),
    evicted=(EvictedReport("host", "capacity", 5),),
)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    for expression in expressions():
        used = USED.findall(expression)
        assert used
        for name, selector in used:
            assert name in LABELS, expression
            assert set(re.findall(r"(\w+)[=!]", selector)) <= LABELS[name]
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            wanted = {label.strip() for label in grouped.split(",")}
            assert wanted <= set.union(*(LABELS[name] for name, _ in used))


def test_every_metric_has_its_place_on_the_dashboard() -> None:
    asked = {name for expression in expressions() for name, _ in USED.findall(expression)}
    for name in COUNTERS:
        assert f"{PREFIX}{name.name}_total" in asked
    for name in HISTOGRAMS:
        assert f"{PREFIX}{name.name}_bucket" in asked


def test_panels_of_the_dashboard_lie_beside_one_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_samples_are_the_report_s_sums_with_the_labels_that_are_promised() -> None:
    found = samples(REPORT)
    assert list(found) == [name.name for name in COUNTERS]
    for name in COUNTERS:
        assert all(len(labels) == len(name.labels) for labels in found[name.name])
    assert found["hit_tokens"]["a", "peer"] == 3
    assert found["requests"]["a", "request"] == 2
    assert found["evicted_pages"]["host", "capacity"] == 5
    assert found["refusals"] == {("too_large",): 3}
    assert (found["restored_bytes"][()], found["movers_lost"][()]) == (7, 2)


@pytest.mark.parametrize("name", [*COUNTERS, *HISTOGRAMS])
def test_no_metric_is_a_gauge_by_its_name(name: Any) -> None:
    assert not name.name.endswith(("_ratio", "_current", "_now", "_total"))
