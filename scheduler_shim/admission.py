"""What a scheduler can never serve: said at once and once, instead of failing somewhere later.

Owns the question, no state. It must refuse whatever the wire cannot carry: the daemon would
refuse the report of it, and one refused report costs the scheduler its daemon.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.errors import TooLarge
from directory.core.pool import check_prompt
from scheduler_shim.request import Request


def refusal(request: Request, usable_pages: int) -> str:
    """Why a request can never end well in a pool of so many pages; empty when it can."""
    tokens = request.tokens
    count = len(tokens) // 4
    if not request.prompt_bytes or request.prompt_bytes % 4 or len(tokens) % 4:
        return "a prompt needs at least one token of 4 bytes"
    if len(tokens) > limits.TOKENS_BYTES_MAX:
        return f"{count} tokens, at most {limits.TOKENS_BYTES_MAX // 4}"
    try:
        check_prompt(request.page_key, tokens)
    except TooLarge as error:
        return str(error)
    if request.all_pages > usable_pages:
        return f"{count} tokens need {request.all_pages} pages of {usable_pages}"
    return ""
