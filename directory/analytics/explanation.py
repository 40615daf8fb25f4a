"""Explanations: one request's verdict, and the requests that lost most, in plain structures.

Owns the choice of requests and the words of a verdict. Judging is attribution.py's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import msgspec

from directory.analytics.attribution import Cause, Gone, Part, Verdict
from directory.analytics.record import Access, Hit
from directory.analytics.source import Source
from directory.analytics.study import Study

AVOIDABLE: Final = {Cause.EVICTED, Cause.NOT_RESTORABLE, Cause.OTHER_NAMESPACE}
MATCHES_MAX: Final = 100

CAUSE_WORDS: Final = {
    Cause.NOT_RESTORABLE: "promised by the match, not restored",
    Cause.EVICTED: "evicted",
    Cause.OTHER_NAMESPACE: "known in another namespace only",
    Cause.DIVERGED: "diverging page: an earlier prompt goes on differently here",
    Cause.NEVER_SEEN: "never seen",
    Cause.PARTIAL_TAIL: "partial tail: less than a page, or the last token",
}


class Explanation(msgspec.Struct, frozen=True):
    """One request: what it hit, and why not more. at_s: since the first request."""

    number: int
    request: str
    attempt: int
    instance: str
    namespace: str
    at_s: float
    tokens: int
    hit: Hit
    hit_tokens: int
    parts: tuple[Part, ...]
    gone: Gone | None
    other_namespace: str
    differs: dict[str, tuple[str | None, str | None]]
    latency_us: int
    restore_us: int
    lookups: int

    @property
    def avoidable_tokens(self) -> int:
        """Tokens that were computed although they had been computed before."""
        return sum(part.tokens for part in self.parts if part.cause in AVOIDABLE)


class Explanations(msgspec.Struct, frozen=True):
    """Those asked for, and the seconds to take off a record's time."""

    found: list[Explanation]
    first_us: int


def explain_request(source: Source, wanted: str, *, capacity: int | None = None) -> Explanations:
    """Explain every attempt with the request id `wanted`, or request number N for "#N" (from 1)."""
    number = int(wanted[1:]) if wanted.startswith("#") and wanted[1:].isdecimal() else None

    def matches(found: Explanation) -> bool:
        return found.number == number if number is not None else found.request == wanted

    return _collect(source, capacity, matches)


def explain_worst(source: Source, count: int, *, capacity: int | None = None) -> Explanations:
    """Explain the requests that computed most tokens that had been computed before."""
    worst: list[tuple[int, int, Explanation]] = []

    def keep(found: Explanation) -> bool:
        if found.avoidable_tokens:
            heapq.heappush(worst, (found.avoidable_tokens, -found.number, found))
            if len(worst) > count:
                heapq.heappop(worst)
        return False

    first_us = _collect(source, capacity, keep).first_us
    return Explanations([found for _, _, found in sorted(worst, reverse=True)], first_us)


def _collect(
    source: Source, capacity: int | None, matches: Callable[[Explanation], bool]
) -> Explanations:
    found: list[Explanation] = []
    number = first_us = 0

    def on_request(access: Access, verdict: Verdict) -> None:
        nonlocal number, first_us
        number += 1
        if number == 1:
            first_us = access.at_us
        explanation = _explanation(number, first_us, access, verdict)
        if matches(explanation) and len(found) < MATCHES_MAX:
            found.append(explanation)

    Study.of(source, capacity=capacity, on_request=on_request)
    return Explanations(found, first_us)


def _explanation(number: int, first_us: int, access: Access, verdict: Verdict) -> Explanation:
    return Explanation(
        number=number,
        request=access.request,
        attempt=access.attempt,
        instance=access.instance,
        namespace=access.namespace.hex(),
        at_s=(access.at_us - first_us) / 1e6,
        tokens=access.tokens,
        hit=access.hit,
        hit_tokens=verdict.hit_tokens,
        parts=verdict.parts,
        gone=verdict.gone,
        other_namespace=verdict.other_namespace,
        differs=verdict.differs,
        latency_us=access.latency_us,
        restore_us=access.restore_us,
        lookups=access.lookups,
    )


def sentences(found: Explanation, first_us: int) -> list[str]:
    """The verdict line by line: hits first, then each part of the prompt with its cause."""
    hit = found.hit
    sources = (("own pool", hit.own), ("host tier", hit.host), ("other pool", hit.peer),
               ("store", hit.store))  # fmt: skip
    named = ", ".join(f"{name} {tokens:,}" for name, tokens in sources if tokens)
    lines = [f"hit {found.hit_tokens:,} of {found.tokens:,} tokens{f' ({named})' if named else ''}"]
    for part in found.parts:
        line = (
            f"tokens {part.first_token:,} to {part.first_token + part.tokens - 1:,}: "
            f"{CAUSE_WORDS[part.cause]}"
        )
        if part.cause is Cause.EVICTED and found.gone is not None:
            line += _gone_words(found.gone, first_us)
        if part.cause is Cause.OTHER_NAMESPACE:
            line += f" ({found.other_namespace})"
            for field, (here, there) in found.differs.items():
                line += f"; {field}: {_value(here)} here, {_value(there)} there"
        lines.append(line)
    return lines


def _gone_words(gone: Gone, first_us: int) -> str:
    used = f"last used at {(gone.seen_us - first_us) / 1e6:.3f} s"
    if gone.instance:
        used += f" by {gone.instance}"
    if gone.at_us is None:
        return f"; {used}, when it went is not recorded"
    where = f" of {gone.instance}" if gone.tier == "device" and gone.instance else ""
    why = ", ".join(word for word in (gone.reason.replace("_", " "), gone.policy) if word)
    return (
        f" from the {gone.tier} tier{where} at {(gone.at_us - first_us) / 1e6:.3f} s"
        f"{f' ({why})' if why else ''}; {used}"
    )


def _value(value: str | None) -> str:
    return "absent" if value is None else repr(value)
