"""Admission: what can never be served ends at once with one clear error."""

import pytest

from directory.core import limits
from directory.core.events import Mode
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, tokens


def test_a_prompt_of_more_pages_than_the_wire_carries_ends_with_one_error_and_costs_nothing(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROMPT_PAGES_MAX", 4)
    node = cluster.add("a", mode)
    node.scheduler.submit(1, tokens(1, 2, 3), tokens(4, 5))
    (record,) = node.scheduler.tick()
    assert "5 pages, at most 4" in record.error
    assert daemon.heard == []
    assert node.scheduler.mode == mode
    assert node.scheduler.pages.free == 16
    assert node.serve(2, tokens(1, 2, 3), tokens(4, 5)[:28]).error == ""  # the tail is not stored


def test_a_prompt_of_more_tokens_than_the_wire_carries_ends_with_one_error(
    cluster: Cluster, mode: Mode
) -> None:
    node = cluster.add("a", mode)
    node.scheduler.submit(1, bytes(limits.TOKENS_BYTES_MAX + 4))
    (record,) = node.scheduler.tick()
    assert record.error == "2097153 tokens, at most 2097152"
    assert node.scheduler.mode == mode


@pytest.mark.parametrize(("prompt", "output"), [(b"", b"1234"), (b"123", b""), (b"1234", b"1")])
def test_what_is_no_row_of_tokens_is_refused(
    cluster: Cluster, mode: Mode, prompt: bytes, output: bytes
) -> None:
    assert "at least one token" in cluster.add("a", mode).serve(1, prompt, output).error
