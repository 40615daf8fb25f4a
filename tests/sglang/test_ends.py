"""Real engines report the requests that they have finished: the access log says what they say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from directory.analytics.reader import LogReader
from directory.analytics.record import Access
from directory.cli.asking import Asking
from directory.protocol.admin import AdminStats, StatsReport
from tests.integration.daemon.support import DaemonProcess, wait_until
from tests.sglang import model
from tests.sglang.engines import Nursery
from tests.sglang.node import Node, floor

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LENGTH, PAGE, NEW = 200, 16, 8
WHOLE = floor(LENGTH, PAGE)
PAGES = LENGTH // PAGE


class LoggingNode(Node):
    """Its daemon writes an access log."""

    def _daemon(self) -> DaemonProcess:
        flags = ("--host-tier", self.host_tier, "--access-log", str(self.folder / "log"))
        return DaemonProcess(self.folder / "rt", *flags)

    def stats(self) -> StatsReport:
        """Its figures."""
        with Asking(self.daemon.runtime_dir, 60.0, "test") as daemon:
            return daemon.ask(AdminStats(), StatsReport)


@pytest.mark.parametrize(
    "version", [pytest.param("0.5.16", marks=pytest.mark.every_cell), "0.5.23"]
)
def test_the_log_has_each_request_of_real_engines_with_the_hits_that_they_reported(
    version: str, nursery: Callable[[str], Nursery], models: Path, tmp_path: Path
) -> None:
    prompt = model.prompt(77, LENGTH)
    with LoggingNode(tmp_path, nursery, models / "one") as node:
        a, b = (node.engine(name, version, page_size=PAGE) for name in ("a", "b"))
        a.wait_up()
        b.wait_up()
        with node.backed_up(PAGES):
            cached = [a.generate(prompt, new=NEW).cached]
        cached.append(a.generate(prompt, new=NEW).cached)
        cached.append(b.generate(prompt, new=NEW).cached)

        def settled() -> bool:
            report = node.stats()
            heard = sum(served.requests for served in report.served)
            return heard == 3 and report.log is not None and not report.log.waiting

        wait_until(settled)
        served = {served.instance: served for served in node.stats().served}
        node.assert_clean()
    accesses = [f for f in LogReader(tmp_path / "log") if isinstance(f, Access)]
    assert [access.hit.total for access in accesses] == cached == [0, WHOLE, WHOLE]
    assert [access.instance for access in accesses] == ["a", "a", "b"]
    assert {(access.tokens, access.output_tokens) for access in accesses} == {(LENGTH, NEW)}
    assert accesses[1].hit.own == WHOLE
    assert accesses[2].hit.own == 0
    assert accesses[0].path[:PAGES] == accesses[2].path[:PAGES]
    assert len({access.request for access in accesses}) == 3
    assert served["a"].hit == (WHOLE, 0, 0, 0)
    assert served["b"].hit[1] + served["b"].hit[2] == WHOLE
