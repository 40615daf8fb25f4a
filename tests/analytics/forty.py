"""Forty requests whose hits, causes and sums were worked out by hand; they meet every cause and
every source that a record can express.

Pages of 4 tokens are named by letters, a path is a word. `verdict` says what must be found: a
letter a cause and pages (E evicted, R not restorable, O other namespace, D diverged, N never
seen), T tail tokens; None for what is no query.
"""

from typing import Any, NamedTuple

from directory.analytics.attribution import Cause
from directory.analytics.record import Access, Eviction, Frame, Named, Room
from tests.analytics.support import PAGE, access, path_of

N1, N2, N3 = (bytes([number]) * 8 for number in (1, 2, 3))
LETTERS = {
    "R": Cause.NOT_RESTORABLE,
    "E": Cause.EVICTED,
    "O": Cause.OTHER_NAMESPACE,
    "D": Cause.DIVERGED,
    "N": Cause.NEVER_SEEN,
    "T": Cause.PARTIAL_TAIL,
}


class Line(NamedTuple):
    """A request and its verdict."""

    access: Access
    verdict: str | None


def frames() -> list[Frame]:
    """Everything in the order of the log: requests, and between them what befell their pages."""
    between: dict[int, list[Frame]] = {
        1: [
            Named(namespace=N1, fields={"model": "m", "extra_key": ""}),
            Named(namespace=N2, fields={"model": "m", "adapter": "x@1"}),
            Room(at_us=0, tier="host", pages=12, page_tokens=PAGE, page_bytes=1024),
            Room(
                at_us=0, tier="device", pages=8, page_tokens=PAGE, page_bytes=1024, instance="s0"
            ),
        ],
        11: [
            gone(9_200_000, "device", "QR", 2, instance="s0"),
            gone(9_700_000, "host", "QR", 2),
        ],
        25: [
            Room(
                at_us=23_500_000, tier="device", pages=0, page_tokens=PAGE, page_bytes=1024,
                instance="s1",
            )
        ],
        32: [gone(30_500_000, "host", "QRSTW", 1)],
    }  # fmt: skip
    found: list[Frame] = []
    for number, line in enumerate(LINES, start=1):
        found += between.get(number, [])
        found.append(line.access)
    return found


def gone(at_us: int, tier: str, letters: str, pages: int, instance: str = "") -> Eviction:
    """`pages` pages from the last one of `letters` on were given up."""
    return Eviction(
        at_us=at_us,
        tier=tier,  # type: ignore[arg-type]
        digest=path_of(letters)[-1],
        pages=pages,
        namespace=N1,
        instance=instance,
        policy="lru",
    )


_WANTED: list[tuple[str, int, dict[str, Any], str | None]] = [
    # New, then own pool, another pool; longer than anything known.
    ("ABC", 2, {}, "N3 T2"),
    ("ABC", 2, {"hit": "ooo"}, "T2"),
    ("ABC", 2, {"hit": "ppp", "instance": "s1"}, "T2"),
    ("ABCD", 1, {"hit": "ooo", "instance": "s1"}, "N1 T1"),
    # A whole number of pages: the last token is computed, and with it the last page.
    ("ABX", 0, {"hit": "oo"}, "T4"),
    ("ABXY", 3, {"hit": "ooo"}, "N1 T3"),
    ("ABZ", 1, {"hit": "oo"}, "D1 T1"),
    ("QRS", 1, {}, "N3 T1"),
    ("QRS", 1, {"hit": "hhh", "instance": "s1"}, "T1"),
    # 10: the copy of D from s1 was lost.
    ("ABCD", 1, {"hit": "ooo", "found": 4}, "R1 T1"),
    ("QRS", 1, {"hit": "o"}, "E2 T1"),
    ("QRS", 1, {"hit": "ooo"}, "T1"),
    ("ABC", 2, {"namespace": N2}, "O3 T2"),
    ("ABC", 2, {"namespace": N2, "hit": "ooo"}, "T2"),
    ("ABXK", 1, {"namespace": N2, "hit": "oo"}, "O1 N1 T1"),
    # 16 to 19: a probe, a retry that published nothing, the request (looked up ten times), and
    # its recomputation after it was preempted: one query in all.
    ("H", 1, {"kind": "probe"}, None),
    ("V", 1, {"kind": "retry", "inserted": 0}, None),
    ("V", 1, {"lookups": 10}, "N1 T1"),
    ("V", 1, {"kind": "recompute", "hit": "o"}, None),
    ("V", 1, {"hit": "s", "instance": "s1"}, "T1"),
    # 21: shorter than a page, a single token, exactly a page.
    ("", 3, {}, "T3"),
    ("", 1, {}, "T1"),
    ("V", 0, {}, "T4"),
    # 24, 25: known to s1 alone, whose pool ends.
    ("MNO", 1, {"instance": "s1"}, "N3 T1"),
    ("MNO", 1, {}, "E3 T1"),
    ("MNO", 1, {"hit": "ooo"}, "T1"),
    ("MNOP", 1, {"hit": "ooo"}, "N1 T1"),
    # 28: gone, and no record says when.
    ("MNOP", 1, {"hit": "oo"}, "E2 T1"),
    ("QRSTU", 2, {"hit": "hhh", "instance": "s1"}, "N2 T2"),
    ("QRSTU", 2, {"hit": "ooopp"}, "T2"),
    ("QRSTW", 2, {"hit": "oooo"}, "D1 T2"),
    ("QRSTWZ", 1, {"hit": "hhhh", "instance": "s1"}, "E1 N1 T1"),
    ("QRSTWZ", 1, {"hit": "oohhps", "instance": "s1"}, "T1"),
    ("ABC", 1, {"namespace": N3, "tenant": "third"}, "O3 T1"),
    ("ABC", 1, {"namespace": N3, "tenant": "third", "hit": "ooo"}, "T1"),
    ("ABCDE", 1, {"namespace": N3, "tenant": "third", "hit": "ooo"}, "O1 N1 T1"),
    # 37: three causes one after the other.
    ("ABCDEF", 1, {"namespace": N3, "tenant": "third", "hit": "o", "found": 2}, "R1 E3 N1 T1"),
    ("ABCDEF", 1, {"namespace": N3, "hit": "oooooo", "kind": "recompute"}, None),
    ("ABC", 2, {"hit": "hhh", "instance": "s1"}, "T2"),
    ("GGG", 0, {"instance": "s1"}, "N2 T4"),
]

LINES = [
    Line(
        access(
            letters,
            tail,
            **{
                "at_us": 1_000_000 * (number - 1),
                "request": f"r{number}",
                "namespace": N1,
                **extra,
            },
        ),
        verdict,
    )
    for number, (letters, tail, extra, verdict) in enumerate(_WANTED, start=1)
]

PATHS = [letters for letters, *_ in _WANTED]
"""The pages of each prompt, by their letters."""

# Sums over the 36 that count, added up by hand.
REQUESTS = 36
LOOKUPS = 49
PROMPT_TOKENS = 522
BLOCKS = 152
HIT_PAGES = {"own": 49, "host": 15, "peer": 6, "store": 2}
CAUSE_PAGES = {"R": 2, "E": 11, "O": 8, "D": 2, "N": 21}
TAIL_TOKENS = 58
