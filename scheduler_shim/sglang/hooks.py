"""Hooks: where SGLang's scheduler meets the shim, through SGLang's own HookRegistry.

Owns the list of what is hooked and the guard around each hook. Nothing of SGLang's is changed in a
process whose scheduler has another backend: hooks are installed when the backend is built. Nothing
in a hook may raise into SGLang: a defect of ours is logged and ends the shim's session (`fail`).

There is no hook on aborts, timeouts and retractions: every tick compares the waiting queue with
what it knows, so whatever takes a request out of the queue is seen before the next step.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import pkgutil
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from scheduler_shim.sglang import ends
from scheduler_shim.sglang.shim import Shim
from scheduler_shim.sglang.steps import followed, passed, stays
from transfer.ipc.marks import mark

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Original = Callable[..., Any]

SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"
UPDATER: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
EPOCH_BITS: Final = 62
NEW_TOKENS_CLIP: Final = 4_096
"""So many new tokens SGLang reserves for a request at most."""


class HooksMissing(RuntimeError):
    """This SGLang has no place for a hook that the shim cannot be without."""


def shim_of(holder: Any) -> Shim | None:
    """The shim behind the tree cache of a scheduler or of a prefill adder, if it is ours."""
    shim = getattr(getattr(holder, "tree_cache", None), "shim", None)
    return shim if isinstance(shim, Shim) else None


def guarded(shim: Shim, what: str, work: Callable[[], Result], otherwise: Result) -> Result:
    """Do a piece of the shim's own work; whatever goes wrong in it stays here."""
    try:
        return work()
    except Exception as error:  # SGLang must not die of a defect of ours
        logger.exception("treecored: %s failed; going on without the daemon", what)
        try:
            shim.fail(f"{what}: {type(error).__name__}: {error}")
        except Exception:  # nothing is left to be tried
            logger.exception("treecored: the shim could not be stopped")
        return otherwise


# The scheduler's loop.


def after_input(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Once a loop, after SGLang has read its input and before it chooses what to run."""
    del args, kwargs
    shim = shim_of(scheduler)
    if shim is not None:
        guarded(shim, "a tick", partial(tick, shim, scheduler), None)


def tick(shim: Shim, scheduler: Any) -> None:
    """The shim's turn, unless nothing is to be done in it."""
    waiting = scheduler.waiting_queue
    # With somebody in the queue and nothing running there is more to be done: see below.
    may_rest = not waiting or not scheduler.running_batch.is_empty()
    if may_rest and shim.rests(waiting, lambda: is_busy(scheduler)):
        return
    if shim.ended:
        ends.results(shim)
    if scheduler.running_batch.is_empty():
        # Targets of a restore may have refused the head of the queue its room. Older dialects
        # clear this only when a running request leaves, and there is none. (Newer ones do this.)
        scheduler.running_batch.batch_is_full = False
    if shim.loads.offers is not None:
        shim.loads.offers.chunked = lambda: chunked_tokens(scheduler)
        shim.loads.offers.decoding = lambda: decodes(scheduler)
        shim.loads.offers.passed = lambda: passed(scheduler)
        shim.loads.offers.followed = lambda rid: followed(shim, scheduler.waiting_queue, rid)
    shim.tick(
        waiting,
        busy=is_busy(scheduler),
        reserved=lambda: reserved_tokens(scheduler),
    )


def is_busy(scheduler: Any) -> bool:
    """Whether the next step has something to compute besides what waits in the queue."""
    last = scheduler.last_batch
    return (
        scheduler.chunked_req is not None
        or not scheduler.running_batch.is_empty()
        or (last is not None and not last.is_empty())
    )


def decodes(scheduler: Any) -> bool:
    """Whether a request that has its first token, or is about to, waits for the next one. One in
    the midst of its chunks does not; nor does one that has ended, though it may still be listed."""
    return any(
        req is not scheduler.chunked_req and not req.finished()
        for batch in (scheduler.running_batch, scheduler.last_batch)
        if batch is not None
        for req in batch.reqs
    )


def reserved_tokens(scheduler: Any) -> int:
    """Tokens that requests in progress have yet to take. SGLang counts on them when it admits, but
    for the later chunks of a prompt: it ends the engine if those do not find room."""
    tracker = getattr(scheduler, "new_token_ratio_tracker", None)
    ratio = float(getattr(tracker, "current", 1.0))
    tokens = 0.0
    batches = [scheduler.running_batch, scheduler.last_batch]
    running = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
    for req in running.values():
        tokens += ratio * _tokens_to_come(req) + scheduler.page_size
    return math.ceil(tokens) + chunked_tokens(scheduler)


def chunked_tokens(scheduler: Any) -> int:
    """Tokens that the prompt that is computed in chunks has yet to take."""
    chunked = scheduler.chunked_req
    return _tokens_wanted(chunked) + int(scheduler.page_size) if chunked is not None else 0


def crowded(shim: Shim, adder: Any, req: Any) -> bool:
    """Whether a load for this request would take what the later chunks of another prompt need.

    SGLang's own sums leave those out, and it may refuse the request once the load is under way.
    So it is looked at again when those chunks are through, and nobody behind it before that.
    """
    offers = shim.loads.offers
    if offers is None or not offers.offered(req.rid):
        return False
    chunked = offers.chunked()
    if not chunked:
        return False
    spare = int(adder.rem_total_tokens) - chunked - _tokens_wanted(req) - int(adder.page_size)
    if spare < 0:
        shim.count("loads_put_off")
    return spare < 0


def _tokens_wanted(req: Any) -> int:
    """What a request takes beyond its prefix on the device, to its last token."""
    # The newer dialect keeps the length of the prefix, the older one its indices.
    done = getattr(req, "prefix_len", None)
    done = len(req.prefix_indices) if done is None else int(done)
    return len(req.origin_input_ids) + len(req.output_ids) - done + _tokens_to_come(req)


def _tokens_to_come(req: Any) -> int:
    wanted = int(req.sampling_params.max_new_tokens) - len(req.output_ids)
    return min(max(wanted, 0), NEW_TOKENS_CLIP)


def around_add_one_req(original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request that is held back stays in the queue, and those behind it have their turn."""
    shim = shim_of(adder)
    if shim is None:
        return original(adder, req, *args, **kwargs)
    if guarded(shim, "holding back", lambda: stays(shim, adder, req), False):
        return importlib.import_module("sglang.srt.managers.schedule_policy").AddReqResult.CONTINUE
    if guarded(shim, "making room", lambda: crowded(shim, adder, req), False):
        return importlib.import_module("sglang.srt.managers.schedule_policy").AddReqResult.OTHER
    result = original(adder, req, *args, **kwargs)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        guarded(shim, "an admission", lambda: admitted(shim, req), None)
    else:
        guarded(shim, "a refusal", lambda: shim.loads.refuse(req.rid), None)
    return result


def around_preempt(original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing that runs makes room for a request that would not be admitted."""
    shim = shim_of(adder)
    if shim is not None and guarded(shim, "holding back", lambda: stays(shim, adder, req), False):
        return False
    return original(adder, req, *args, **kwargs)


def admitted(shim: Shim, req: Any) -> None:
    """Have SGLang's own metrics say where the prefix came from: what was restored while the
    request waited is a hit of the host's, though it lies on the device by now."""
    restored, peers = shim.restored_tokens(req.rid)
    loading = 0
    if restored:
        restored += shim.loads.launch(req)
    else:  # what is being loaded SGLang knows itself
        loading = shim.loads.launch(req)
    shim.gone(req.rid)
    mark("admitted", req.rid)
    ends.admitted(shim, req, restored + loading, peers)
    told = getattr(req, "_cache_breakdown_computed", None)
    if not restored or told is not False or req.retracted_stain:
        return
    # The newer dialect keeps the length of the prefix, the older one its indices.
    prefix = getattr(req, "prefix_len", None)
    prefix = len(req.prefix_indices) if prefix is None else int(prefix)
    req.cached_tokens_host = min(restored, prefix)
    req.cached_tokens_device = prefix - req.cached_tokens_host
    req._cache_breakdown_computed = True


def around_results(
    original: Original, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """Before a batch's outputs are used it is known which of its loads are lost."""
    shim = shim_of(scheduler)
    if shim is None:
        return original(scheduler, batch, result, *args, **kwargs)
    if shim.loads.enabled or mark.on:
        computed(shim, batch, result)
    shim.tree.gathers = True
    outcome = original(scheduler, batch, result, *args, **kwargs)
    guarded(shim, "the end of results", partial(results_used, shim), None)
    return outcome


def computed(shim: Shim, batch: Any, result: Any) -> None:
    """A batch's outputs are about to be used: whoever computed over a lost load ends."""
    copied = getattr(result, "copy_done", None)
    synchronize = copied.synchronize if copied is not None else _nothing
    if mark.on:
        mark("launched", *(req.rid for req in batch.reqs))
    if shim.loads.enabled:
        work = partial(shim.loads.results, batch.reqs, synchronize)
        guarded(shim, "the end of loads", work, None)
    if mark.on:
        synchronize()
        mark("computed", *(req.rid for req in batch.reqs))


def _nothing() -> None:
    """Instead of a wait where there is nothing to wait for."""


def results_used(shim: Shim) -> None:
    """A batch's outputs are used: tell the daemon what was published, all of it at once."""
    if shim.ended:
        ends.results(shim)
    shim.tree.gathers = False
    if shim.client is not None:
        shim.client.send_held()


# Flush, weights, memory, end.


def around_flush(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang resets the cache (which waits for movers) and then calls every page free: those that
    a mover may still write into are taken out again."""
    flushed = original(scheduler, *args, **kwargs)
    shim = shim_of(scheduler)
    if shim is not None and flushed:
        guarded(shim, "a flush", shim.after_clear, None)
    return flushed


def around_weights(original: Original, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Whatever was computed before is not found afterwards, also if the update failed half-way."""
    shim = shim_of(_scheduler_of(updater))
    if shim is not None:
        epoch = weight_epoch(shim, args[0] if args else None)
        guarded(shim, "a weight update", lambda: shim.change_weights(epoch), None)
    return original(updater, *args, **kwargs)


def weight_epoch(shim: Shim, recv_req: Any) -> int:
    """The number of the coming weights: nobody else's, or that of their version's name where the
    settings say that equal names are equal weights."""
    version = getattr(recv_req, "weight_version", None)
    if shim.settings.trust_weight_version and version:
        digest = hashlib.blake2b(str(version).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - EPOCH_BITS) or 1
    return secrets.randbits(EPOCH_BITS) or 1


def around_release_memory(original: Original, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Nobody may have the pool mapped when its memory goes."""
    shim = shim_of(_scheduler_of(updater))
    if shim is not None:
        guarded(shim, "a release", lambda: shim.suspend("the pool's memory is released"), None)
    return original(updater, *args, **kwargs)


def around_resume_memory(original: Original, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """The pool may be registered again."""
    result = original(updater, *args, **kwargs)
    shim = shim_of(_scheduler_of(updater))
    if shim is not None:
        guarded(shim, "a resumption", shim.resume, None)
    return result


def around_exit(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The registration ends with the loop. (Of a process that is killed the kernel tells.)"""
    shim = shim_of(scheduler)
    if shim is not None:
        guarded(shim, "the end", shim.close, None)
    return original(scheduler, *args, **kwargs)


def _scheduler_of(updater: Any) -> Any:
    """Whose updater it is; every dialect gives it the scheduler's own method to flush with."""
    scheduler = getattr(updater, "scheduler", None)
    return scheduler or getattr(updater.flush_cache, "__self__", None)


# Installation.

AROUND: Final[dict[str, Callable[..., Any]]] = {
    f"{ADDER}.add_one_req": around_add_one_req,
    f"{ADDER}.preempt_to_schedule": around_preempt,
    f"{SCHEDULER}.flush_cache": around_flush,
    f"{SCHEDULER}.process_batch_result": around_results,
    f"{UPDATER}.update_weights_from_disk": around_weights,
    f"{UPDATER}.update_weights_from_distributed": around_weights,
    f"{UPDATER}.update_weights_from_tensor": around_weights,
    f"{UPDATER}.update_weights_from_ipc": around_weights,
    f"{UPDATER}.release_memory_occupation": around_release_memory,
    f"{UPDATER}.resume_memory_occupation": around_resume_memory,
}
AROUND_IF_THERE: Final[dict[str, Callable[..., Any]]] = {
    # From 0.5.22 on: weights that come by themselves between the two.
    f"{UPDATER}.begin_weight_update": around_weights,
    f"{UPDATER}.end_weight_update": around_weights,
    # Not in 0.5.13.
    f"{SCHEDULER}.release_host_resources": around_exit,
}
AFTER: Final[dict[str, Callable[..., Any]]] = {f"{SCHEDULER}.process_input_requests": after_input}


def install() -> None:
    """Hook SGLang's scheduler in this process. Repeatable.

    Raises `HooksMissing` where SGLang has no such place, or did not take a hook: the scheduler
    must not start half hooked.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    there = {name: hook for name, hook in AROUND_IF_THERE.items() if _resolve(name) is not None}
    missing = [name for name in [*AROUND, *AFTER] if _resolve(name) is None]
    if missing:
        raise HooksMissing(f"this SGLang has no {', '.join(missing)}, which treecored hooks")
    source = registry.HookSource("treecored", "treecored")
    kinds = registry.HookType
    wanted = [(name, hook, kinds.AROUND) for name, hook in {**AROUND, **there}.items()]
    wanted += [(name, hook, kinds.AFTER) for name, hook in AFTER.items()]
    for name, hook, kind in wanted:
        if not getattr(_resolve(name), "_treecored", False):
            registry.HookRegistry.register(name, hook, kind, source=source)
    registry.HookRegistry.apply_hooks()
    for name, _, _ in wanted:
        hooked = _resolve(name)
        if getattr(hooked, "__wrapped__", None) is None:
            raise HooksMissing(f"SGLang did not take treecored's hook on {name}; see its log above")
        hooked._treecored = True


def _resolve(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
