"""Leases out: granted by an answer, gone with a release, a list or the registration."""

from directory.core.actions import Done, Locked, Matched, Totals
from directory.core.events import Lock, Match, Stats
from directory.core.namespace import NamespaceKey
from scheduler_shim.leases import LeasesOut

NOTHING = Totals(0, 0)
MATCH = Match("q", 1, NamespaceKey(), b"")


def matched(receipt: int) -> Matched:
    return Matched(0, b"", 0, 0, 0, 0, receipt, NOTHING)


def test_an_answer_with_a_receipt_is_a_lease_of_its_asker() -> None:
    leases = LeasesOut()
    leases.granted(MATCH, matched(0))
    leases.granted(Stats(), Done(NOTHING))
    assert len(leases) == 0
    leases.granted(MATCH, matched(5))
    leases.granted(Lock("r", 0, 9), Locked(6, NOTHING))
    assert repr(leases) == "<LeasesOut {5: ('q', 1), 6: ('r', 0)}>"


def test_a_lease_goes_with_its_release_its_absence_from_a_list_or_all_at_once() -> None:
    leases = LeasesOut()
    for receipt in (1, 2, 3):
        leases.granted(Match("q", receipt, NamespaceKey(), b""), matched(receipt))
    leases.released(1)
    leases.released(1)
    assert len(leases) == 2
    leases.listed([("q", 3), ("r", 2)])
    assert repr(leases) == "<LeasesOut {3: ('q', 3)}>"
    leases.clear()
    assert len(leases) == 0


def test_a_lease_whose_receipt_nobody_knows_counts_until_its_asker_is_listed_no_more() -> None:
    leases = LeasesOut()
    leases.unknown(Stats())
    assert len(leases) == 0
    leases.unknown(MATCH)
    leases.listed([("q", 1)])
    assert repr(leases) == "<LeasesOut {}, unknown [('q', 1)]>"
    assert len(leases) == 1
    leases.listed([("q", 2)])
    assert len(leases) == 0
