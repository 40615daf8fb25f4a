"""The client: deadlines, late answers, lost frames, epochs and the end of a daemon."""

import pytest

from directory.core.actions import Counters, Matched, Refused, Restored
from directory.core.errors import BadMessage, StaleNode, StaleReceipt
from directory.core.events import Insert, Lock, Match, PoolClosed, Restore, Stats, Unlock
from directory.core.tokens import pack_pages
from directory.protocol.codec import decode_envelope
from directory.protocol.messages import Acked, Attach, Attached
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import SharedPool
from scheduler_shim.session import DaemonAbsent, Registration
from scheduler_shim.speaking import ATTACHES_MAX
from tests.unit.scheduler_shim.pair import KEY, QUICK, Pair, question
from tests.unit.scheduler_shim.support import (
    BYTES_PER_TOKEN,
    EPOCH,
    PAGE_SIZE,
    FakeDaemon,
    FakeLink,
    tokens,
)


def test_a_call_returns_the_answer_and_samples_its_round_trip(pair: Pair) -> None:
    pair.publish()
    reply = pair.client.call(question())
    assert isinstance(reply, Matched)
    assert (reply.peer_pages, reply.receipt > 0) == (3, True)
    assert pair.client.rtt_us.seen == 1
    assert pair.client.open_count == 0


def test_a_call_without_an_answer_ends_at_its_deadline_f76(pair: Pair) -> None:
    pair.daemon.drop_reply = lambda _: True
    before = pair.daemon.clock_us
    assert pair.client.call(question(), 500) is None
    assert pair.daemon.clock_us - before == 500_000
    assert pair.client.lost == ""


def test_the_lease_of_a_late_answer_is_released_f76(pair: Pair) -> None:
    pair.publish()
    pair.daemon.drop_reply = lambda body: isinstance(body, Matched)
    assert pair.client.call(question()) is None
    assert len(pair.daemon.directory.leases) == 1
    pair.daemon.drop_reply = lambda _: False
    pair.later(10)
    for _ in range(3):
        assert pair.client.poll() == []
        pair.client.wait(1_000)
    assert len(pair.daemon.directory.leases) == 0
    assert pair.client.counters["answers_late"] == 1
    assert pair.client.open_count == 0


def test_a_question_that_is_abandoned_releases_what_it_is_given(pair: Pair) -> None:
    pair.publish()
    before = pair.client.ask(question())
    pair.client.abandon(before)
    pair.daemon.run()
    answered = pair.client.ask(question())
    pair.client.wait(1_000)
    pair.client.call(Stats())  # takes the answer in on its way
    pair.client.abandon(answered)
    pair.client.wait(1_000)
    assert pair.client.poll() == []
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 0


def test_a_lost_request_is_sent_again_and_has_its_effect_once_f76(pair: Pair) -> None:
    pair.publish()
    lost = iter([True, True])
    pair.daemon.drop_request = lambda _: next(lost, False)
    reply = pair.client.call(question())
    assert isinstance(reply, Matched)
    assert pair.client.counters["messages_resent"] == 2
    assert sum(isinstance(body, Match) for body in pair.daemon.heard) == 1
    assert len(pair.daemon.directory.leases) == 1


def test_a_lost_reply_is_had_again_f76(pair: Pair) -> None:
    pair.publish()
    lost = iter([True])
    pair.daemon.drop_reply = lambda _: next(lost, False)
    assert isinstance(pair.client.call(question()), Matched)
    assert len(pair.daemon.directory.leases) == 1


def test_a_doubled_reply_is_given_out_once_f76(pair: Pair) -> None:
    seq = pair.client.ask(Stats())
    pair.daemon.run()
    pair.link.to_client.extend(list(pair.link.to_client))
    assert [number for number, _ in pair.client.poll()] == [seq]
    assert pair.client.poll() == []
    assert pair.client.refused == []


def test_a_restore_whose_deadline_passed_is_still_heard_of_when_it_lands(pair: Pair) -> None:
    pair.publish()
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)
    pair.daemon.hold_copies = True
    restore = Restore("q", 0, matched.receipt, 0, pack_pages([4, 5, 6]), (0, 0))
    seq = pair.client.ask(restore, 5_000)
    pair.daemon.run()
    assert pair.client.poll() == []
    pair.later(5)
    assert pair.client.poll() == [(seq, None)]
    assert pair.client.poll() == []
    pair.daemon.hold_copies = False
    pair.daemon.run()
    ((number, reply),) = pair.client.poll()
    assert number == seq
    assert isinstance(reply, Restored)
    assert reply.landed


def test_a_refusal_becomes_the_error_of_its_code(pair: Pair) -> None:
    with pytest.raises(BadMessage):
        pair.client.call(Insert("r", 0, KEY, tokens(1), pack_pages([99]), 1, 0, (0, 0)))
    with pytest.raises(StaleReceipt):
        pair.client.call(Unlock(999))
    thin, _ = pair.daemon.connect(
        SharedPool(page_size=PAGE_SIZE, page_count=8, bytes_per_token=BYTES_PER_TOKEN),
        instance="c",
        mode="thin",
    )
    with pytest.raises(StaleNode):
        thin.call(Lock("r", 0, 12345))
    thin.close()


def test_a_refused_report_is_kept_for_the_scheduler(pair: Pair) -> None:
    pair.client.report(Insert("r", 0, KEY, tokens(1), pack_pages([99]), 1, 0, (0, 0)))
    pair.client.wait(1_000)
    pair.client.poll()
    assert [refusal.code for refusal in pair.client.refused] == ["bad_message"]


def test_so_many_misses_in_a_row_mean_a_lost_daemon(pair: Pair) -> None:
    pair.daemon.drop_request = lambda _: True
    for _ in range(2):
        assert pair.client.call(Stats()) is None
        assert pair.client.lost == ""
    assert pair.client.call(Stats()) is None
    assert "3 messages in a row had no answer" in pair.client.lost
    assert 2 not in pair.daemon.directory.pools


def test_an_answer_in_between_starts_the_count_of_misses_anew(pair: Pair) -> None:
    for _ in range(3):
        pair.daemon.drop_request = lambda _: True
        assert pair.client.call(Stats()) is None
        assert pair.client.call(Stats()) is None
        pair.daemon.drop_request = lambda _: False
        pair.later(60)
        assert isinstance(pair.client.call(Stats()), Counters)
    assert pair.client.lost == ""


def test_questions_that_a_pause_makes_late_together_are_one_miss_f76(pair: Pair) -> None:
    for _ in range(QUICK.misses_max):
        pair.client.ask(Stats())
    pair.later(2)  # the daemon stands still, and so does everything that was asked of it
    assert [reply for _, reply in pair.client.poll()] == [None] * QUICK.misses_max
    assert (pair.client.lost, pair.client.counters["deadlines_missed"]) == ("", 3)
    pair.daemon.run()
    assert isinstance(pair.client.call(Stats()), Counters)


def test_what_waited_already_when_a_miss_was_counted_is_no_further_miss_f76(pair: Pair) -> None:
    pair.daemon.drop_request = lambda _: True
    for _ in range(QUICK.misses_max):
        pair.client.ask(Stats())
        pair.later(0.1)
    for _ in range(QUICK.misses_max):
        pair.later(0.4)
        pair.client.poll()
    assert pair.client.counters["deadlines_missed"] == 3
    assert pair.client.lost == ""
    assert pair.client.call(Stats()) is None
    assert pair.client.lost == ""
    assert pair.client.call(Stats()) is None
    assert "3 messages in a row had no answer" in pair.client.lost


def test_any_frame_of_the_daemon_starts_the_count_of_misses_anew_f76(pair: Pair) -> None:
    pair.daemon.drop_request = lambda _: True
    for _ in range(2 * QUICK.misses_max):
        assert pair.client.call(Stats()) is None
        pair.daemon.say(2, 0, Acked())
    pair.client.poll()
    assert pair.client.lost == ""


def test_an_idle_client_stays_registered_f65(pair: Pair) -> None:
    pair.later(365 * 24 * 3600)
    assert isinstance(pair.client.call(Stats()), Counters)


def test_the_end_of_the_session_is_the_end_of_the_client(pair: Pair) -> None:
    pair.client.ask(question())
    pair.link.alive = False
    assert pair.client.poll() == []
    assert pair.client.lost == "the daemon closed the session"
    assert pair.client.call(Stats()) is None
    assert pair.client.ask(Stats()) == 0
    pair.client.report(Unlock(1))
    assert pair.client.poll() == []


def test_another_epoch_is_the_end_of_the_client(pair: Pair) -> None:
    pair.daemon.say(2, 0, Acked(), epoch=EPOCH + 1)
    pair.client.poll()
    assert "started anew" in pair.client.lost


@pytest.mark.parametrize("code", ["stale_epoch", "unknown_pool", "bad_message"])
def test_a_refused_conversation_is_the_end_of_the_client(pair: Pair, code: str) -> None:
    pair.daemon.say(2, 0, Refused(code, "why"))
    pair.client.poll()
    assert code in pair.client.lost


def test_a_registration_that_is_gone_is_known_at_once_f65(pair: Pair) -> None:
    pair.daemon.tell(PoolClosed(2, pair.daemon.clock_us))
    assert pair.client.call(Stats()) is None
    assert "registration is gone" in pair.client.lost


def test_a_connection_that_was_made_anew_attaches_again(pair: Pair) -> None:
    pair.daemon.say(2, 0, Refused("not_authorised", "attach first"))
    pair.client.poll()
    assert isinstance(decode_envelope(pair.link.to_daemon[-1]).body, Attach)
    assert pair.client.lost == ""
    for _ in range(ATTACHES_MAX):
        assert not pair.client.lost
        pair.later(0.1)
        pair.daemon.say(2, 0, Refused("not_authorised", "attach first"))
        pair.client.poll()
    assert "not_authorised" in pair.client.lost


def test_a_gap_is_filled_by_sending_again(pair: Pair) -> None:
    pair.daemon.say(2, 0, Refused("out_of_order", "resend"))
    pair.client.poll()
    assert (pair.client.lost, pair.client.counters["gaps"]) == ("", 1)


def test_what_cannot_be_decoded_is_counted_and_dropped(pair: Pair) -> None:
    pair.link.to_client.append(b"\xc1junk")
    assert pair.client.poll() == []
    assert pair.client.counters["frames_malformed"] == 1
    assert pair.client.lost == ""


def test_a_daemon_that_does_not_answer_attach_is_absent() -> None:
    daemon = FakeDaemon()
    link = FakeLink(daemon)
    client = DaemonClient(link, Registration(9, 1, EPOCH, b"x", ""), QUICK)
    with pytest.raises(DaemonAbsent, match="did not answer Attach"):
        client.attach()
    assert len(link.to_daemon) == 5  # one each RESEND_AFTER_MS: the first may have been dropped
    daemon.close()


def test_a_wrong_secret_is_not_tried_again() -> None:
    daemon = FakeDaemon()
    link = FakeLink(daemon)
    client = DaemonClient(link, Registration(9, 1, EPOCH, b"x", ""), QUICK)
    from directory.protocol.codec import encode
    from directory.protocol.messages import ReplyEnvelope

    link.to_client.append(encode(ReplyEnvelope(EPOCH, 0, 0, Refused("not_authorised", "no"))))
    with pytest.raises(DaemonAbsent, match="not_authorised"):
        client.attach()
    assert len(link.to_daemon) == 1
    daemon.close()


def test_a_wait_is_short_while_anything_is_open_and_long_when_not(pair: Pair) -> None:
    pair.link.waits.clear()
    pair.client.wait(None)
    pair.client.ask(Stats())
    pair.client.wait(None)
    assert pair.link.waits == [None, 50_000]


def test_a_wait_does_not_sleep_over_an_answer_that_a_call_took_in(pair: Pair) -> None:
    pair.client.ask(Stats())
    pair.client.call(Stats())
    pair.link.waits.clear()
    pair.client.wait(None)
    assert pair.link.waits == []
    assert len(pair.client.poll()) == 1


def test_attached_is_no_answer_to_a_message(pair: Pair) -> None:
    pair.daemon.say(2, 0, Attached())
    assert pair.client.poll() == []


def gone(pair: Pair, seq: int) -> None:
    """The daemon says that the answer of a message is kept no longer."""
    pair.daemon.say(2, seq, Refused("answer_gone", "dropped by a limit"))


def lose_answers(pair: Pair) -> None:
    """Every answer from now on is lost on its way, and all are gone once asked for again."""
    pair.daemon.drop_reply = lambda body: not isinstance(body, Refused)


def test_an_answer_that_is_gone_is_no_answer_and_no_silence_f76(pair: Pair) -> None:
    seq = pair.client.ask(Stats())
    gone(pair, seq)
    assert pair.client.poll() == [(seq, None)]
    assert pair.client.counters == {"answers_gone": 1}
    assert (pair.client.lost, pair.client.open_count) == ("", 1)  # it is not acknowledged yet
    pair.daemon.run()
    assert pair.client.poll() == []
    assert pair.client.open_count == 0


def test_a_call_whose_answer_is_gone_has_none_at_once_f76(pair: Pair) -> None:
    gone(pair, 1)
    before = pair.daemon.clock_us
    assert pair.client.call(Stats()) is None
    assert pair.daemon.clock_us == before
    assert "deadlines_missed" not in pair.client.counters


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_lease_whose_answer_is_gone_falls_by_the_next_list_f72(
    pair: Pair, abandoned: bool
) -> None:
    pair.publish()
    lose_answers(pair)
    seq = pair.client.ask(question())
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 1
    if abandoned:
        pair.client.abandon(seq)
        assert pair.client.abandoned_count == 1
    gone(pair, seq)
    assert pair.client.poll() == ([] if abandoned else [(seq, None)])
    assert pair.client.abandoned_count == 0
    assert pair.client.live_due(idle=True), "a lease may be out, and nobody has its receipt"
    pair.client.report_live([("q", 0)])
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 1, "its request is alive"
    pair.client.report_live([])
    pair.daemon.run()
    assert len(pair.daemon.directory.leases) == 0
    assert not pair.client.live_due(idle=True)


def test_a_restore_whose_answer_is_gone_is_over_and_counts_for_nothing_f76(pair: Pair) -> None:
    pair.publish()
    matched = pair.client.call(question())
    assert isinstance(matched, Matched)
    lose_answers(pair)
    body = Restore("q", 0, matched.receipt, 0, pack_pages([0, 1, 2]), (0, 0))
    seq = pair.client.ask(body, 5_000)
    pair.later(6)
    assert pair.client.poll() == [(seq, None)]
    gone(pair, seq)
    ((again, reply),) = pair.client.poll()
    assert (again, type(reply)) == (seq, Refused), (
        "its targets are quiet now, and it has not landed"
    )


def test_a_report_whose_answer_is_gone_is_no_divergence(pair: Pair) -> None:
    pair.client.report(Unlock(7))
    gone(pair, 1)
    gone(pair, 99)
    assert pair.client.poll() == []
    assert (pair.client.refused, pair.client.lost, pair.client.counters) == ([], "", {})


def test_a_rank_whose_answer_is_gone_gives_the_daemon_up_f107(pair: Pair) -> None:
    pair.link.alive = True
    registration = pair.client.registration
    rank = DaemonClient(pair.link, registration, QUICK, world_size=2)
    seq = rank.ask(Stats())
    gone(pair, seq)
    rank.poll()
    assert "the ranks must have the same" in rank.lost
