"""A restore is told to be lost only when nobody writes into its targets any more."""

import pytest

from directory.core.actions import Matched, Refused, Restored
from directory.core.errors import TransferError
from directory.core.events import Restore
from directory.core.tokens import pack_pages
from tests.unit.scheduler_shim.pair import Pair, question


@pytest.mark.parametrize("how", ["landed", "lost", "gone"])
def test_before_a_lost_restore_is_told_what_a_dead_mover_asked_for_is_over(
    pair: Pair, how: str
) -> None:
    pair.publish()
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)
    settled: list[bool] = []
    pair.client.before_loss = lambda: settled.append(True)
    pair.daemon.fail_copies = lambda _: how == "lost"
    if how == "gone":
        pair.daemon.drop_reply = lambda body: not isinstance(body, Refused)
    restore = Restore("q", 0, matched.receipt, 0, pack_pages([4, 5, 6]), (0, 0))
    seq = pair.client.ask(restore, 5_000)
    if how == "gone":
        pair.daemon.say(2, seq, Refused("answer_gone", "dropped by a limit"))
    pair.daemon.run()
    ((number, reply),) = pair.client.poll()
    assert number == seq
    assert (isinstance(reply, Restored) and reply.landed) == (how == "landed")
    assert settled == ([] if how == "landed" else [True])


def test_a_daemon_is_lost_with_a_restore_of_which_nobody_knows_whether_it_is_over(
    pair: Pair,
) -> None:
    pair.publish()
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)

    def unsettled() -> None:
        raise TransferError("the stager is at 3 of 4 requests")

    pair.client.before_loss = unsettled
    pair.daemon.fail_copies = lambda _: True
    restore = Restore("q", 0, matched.receipt, 0, pack_pages([4, 5, 6]), (0, 0))
    pair.client.ask(restore, 5_000)
    pair.daemon.run()
    assert pair.client.poll() == []
    assert "3 of 4 requests" in pair.client.lost, "so its targets go into quarantine"
