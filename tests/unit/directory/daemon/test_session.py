"""The session's state table: only the steps of the protocol exist."""

import itertools

import pytest

from directory.core.errors import InvalidTransition
from directory.daemon.session import SESSION, Session, SessionEvent, SessionState
from transfer.ipc.channel import FdChannel, PeerCredentials


def test_the_life_of_a_session_passes_every_state_in_order() -> None:
    ours, theirs = FdChannel.pair()
    session = Session(1, ours, PeerCredentials(1, 2, 3), -1)
    seen = [session.state]
    for event in SessionEvent:
        session.step(event)
        seen.append(session.state)
    assert seen == list(SessionState)
    assert "pid 1" in repr(session)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SessionState, SessionEvent)))
def test_a_step_that_the_table_lacks_is_a_defect(state: SessionState, event: SessionEvent) -> None:
    ours, theirs = FdChannel.pair()
    session = Session(1, ours, PeerCredentials(1, 2, 3), -1)
    session.state = state
    if (state, event) in SESSION:
        session.step(event)
    else:
        with pytest.raises(InvalidTransition):
            session.step(event)
    ours.close()
    theirs.close()


def test_every_state_but_the_last_can_end() -> None:
    ends = {state for state, event in SESSION if event is SessionEvent.END}
    assert ends == set(SessionState) - {SessionState.ENDED}
