"""What a scheduler says of a request that has left it: the source of the access log.

Owns the message and what a sound one is. Only the scheduler knows what its own pool had, how often
a request was looked up and what of a prompt was computed; the daemon keeps the sums. The message
changes nothing that anybody is answered: it never reaches the directory.
"""

from __future__ import annotations

from typing import Literal

from directory.core import limits
from directory.core.events import Body
from directory.core.namespace import NamespaceKey

EndedKind = Literal["request", "retry", "recompute", "probe"]
Wanted = Literal["", "sums", "paths"]
"""What a daemon wants to hear of ended requests: nothing, sums, or sums and tokens."""

COUNT_MAX = 1 << 40
"""No number of a sound message is larger: tokens of a prompt, microseconds of a fortnight."""


class Ended(Body, frozen=True, tag="ended", kw_only=True):
    """Report a request that has left the scheduler, once an admission; nobody is answered.

    Only where `Registered.ended` asks for it. All lengths are tokens; `hit` (own pool, host tier,
    other pool, store) was not computed. `found`: what the last look-up promised. `restored`: copied
    into the own pool. `inserted`: published beyond the hit. `lookups`: since it came or was ended
    last. `age_us`: since its first look-up; `latency_us`: from that question to its answer;
    `restore_us`: from the restore's question to the landing. `tokens`: packed, of the path that it
    left in the tree (with "paths" only).
    """

    request: str
    attempt: int
    namespace: NamespaceKey
    kind: EndedKind
    prompt_tokens: int
    output_tokens: int = 0
    hit: tuple[int, int, int, int] = (0, 0, 0, 0)
    found: int = 0
    restored: int = 0
    inserted: int = 0
    lookups: int = 1
    age_us: int = 0
    latency_us: int = 0
    restore_us: int = 0
    tokens: bytes = b""
    tenant: str = ""


def unsound(ended: Ended) -> str:
    """Why nothing of a report is believed; empty when it can be. It is a claim, not a fact: a sum
    over claims must at least stay within 0 and 1."""
    numbers = (
        *ended.hit,
        *(ended.attempt, ended.prompt_tokens, ended.output_tokens, ended.found, ended.restored),
        *(ended.inserted, ended.lookups, ended.age_us, ended.latency_us, ended.restore_us),
    )
    if min(numbers) < 0 or max(numbers) > COUNT_MAX:
        return "a number of it is negative or beyond reason"
    if sum(ended.hit) > ended.prompt_tokens:
        return "more tokens were hit than the prompt has"
    if max(len(ended.request), len(ended.tenant)) > limits.REQUEST_CHARS_MAX:
        return f"a name has more than {limits.REQUEST_CHARS_MAX} characters"
    if len(ended.tokens) > limits.TOKENS_BYTES_MAX:
        return f"it has {len(ended.tokens)} bytes of tokens"
    return ""
