"""A step between two passes: who stays in the queue so that what decodes has its next token first.

Owns the looks at SGLang's batch and queue that tell whether a pass comes now anyway; whose turn it
was already is known to the offers (`waits_a_step`). It looks, and changes nothing of SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, islice
from typing import Any

from scheduler_shim.sglang.shim import Shim


def passed(scheduler: Any) -> bool:
    """Whether the batch that was launched last computes prompts."""
    last = scheduler.last_batch
    return last is not None and bool(last.forward_mode.is_extend())


def followed(shim: Shim, waiting: Sequence[Any], rid: str) -> bool:
    """Whether somebody behind a request, in the head of the queue, is computed as soon as there is
    room: neither held back nor about to let a step go first. (Who is in front was asked before.)"""
    offers = shim.loads.offers
    behind = dropwhile(lambda req: req.rid != rid, waiting[: shim.settings.window])
    return offers is not None and any(
        not shim.held(req.rid) and (offers.stepped(req.rid) or not shim.restored_tokens(req.rid)[0])
        for req in islice(behind, 1, None)
    )


def stays(shim: Shim, adder: Any, req: Any) -> bool:
    """Whether a request stays in the queue for now: it is held back, or lets what decodes have a
    step first. Where a pass comes anyway, for somebody else in the queue, it is in it."""
    if shim.held(req.rid):
        return True
    offers = shim.loads.offers
    if offers is None or adder.can_run_list:
        return False
    return offers.waits_a_step(req.rid, restored=shim.restored_tokens(req.rid)[0] > 0)
