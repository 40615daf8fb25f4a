"""The client's list of live requests: when it is due, whom it names and what falls by it."""

import pytest

from directory.core import limits
from directory.core.actions import Matched
from directory.core.events import Live, Match, Stats, Unlock
from scheduler_shim.questions import live_parts
from tests.unit.scheduler_shim.pair import KEY, Pair, question
from tests.unit.scheduler_shim.support import tokens


def test_a_release_of_a_lease_that_has_fallen_is_no_divergence_f72(pair: Pair) -> None:
    pair.publish()
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)
    pair.client.report_live([])
    pair.client.report(Unlock(matched.receipt))
    pair.daemon.run()
    pair.client.poll()
    assert pair.client.counters["report_refused_stale_receipt"] == 1
    assert (pair.client.refused, pair.client.lost) == ([], "")


def test_live_requests_are_due_once_a_second_while_somebody_is_alive_f72(pair: Pair) -> None:
    assert not pair.client.live_due(idle=False)
    pair.later(1)
    assert pair.client.live_due(idle=False)
    pair.client.report_live([("q", 0)])
    assert not pair.client.live_due(idle=False)
    pair.later(0.99)
    assert not pair.client.live_due(idle=False)
    pair.later(0.01)
    assert pair.client.live_due(idle=False)
    pair.client.lose("given up by the test")
    assert not pair.client.live_due(idle=False)


def test_an_idle_client_lists_nobody_unless_a_lease_is_out_f72(pair: Pair) -> None:
    pair.publish()
    pair.later(100)
    assert not pair.client.live_due(idle=True)
    assert isinstance(pair.client.call(question()), Matched)
    assert pair.client.live_due(idle=True)  # nobody is left to release it
    pair.client.report_live([])
    assert not pair.client.live_due(idle=True)
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 0
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)
    pair.client.report(Unlock(matched.receipt))
    assert not pair.client.live_due(idle=True)


def test_who_has_asked_and_has_no_answer_is_alive_wanted_or_not_f72(pair: Pair) -> None:
    pair.publish()
    pair.client.abandon(pair.client.ask(question()))
    pair.client.ask(Match("other", 2, KEY, tokens(1)))
    pair.client.ask(Stats())
    pair.client.report_live([("here", 1), ("q", 0)])
    pair.daemon.run()
    (live,) = [body for body in pair.daemon.heard if isinstance(body, Live)]
    assert live.requests == (("here", 1), ("q", 0), ("other", 2))
    assert len(pair.daemon.directory.leases) == 2
    pair.client.poll()
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 1  # only the receipt of the late answer went
    assert "leases_unlisted" not in pair.daemon.directory.counters


def test_a_long_list_goes_in_parts_f72(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIVE_REQUESTS_MAX", 2)
    pair.publish()
    assert isinstance(pair.client.call(question()), Matched)
    pair.client.report_live([(name, 0) for name in ("a", "b", "c", "d", "q")])
    pair.daemon.run()
    lives = [body for body in pair.daemon.heard if isinstance(body, Live)]
    assert lives == [
        Live((("a", 0), ("b", 0)), first=True, last=False),
        Live((("c", 0), ("d", 0)), first=False, last=False),
        Live((("q", 0),), first=False, last=True),
    ]
    assert len(pair.daemon.directory.leases) == 1
    pair.client.report_live([(name, 0) for name in ("a", "b", "c", "d")])
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 0


def test_the_list_of_nobody_is_one_part_f72() -> None:
    assert list(live_parts([])) == [Live(())]
