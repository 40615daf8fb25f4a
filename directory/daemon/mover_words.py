"""What is said to a mover, and how what it says is put into words.

Owns no state. Each function stands for one thing that supervision says or logs.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from directory.core.actions import SubmitCopy
from directory.core.events import PagesDamaged
from directory.core.ids import PoolId
from directory.core.tokens import unpack_pages
from directory.daemon.registration import Registration
from transfer.engine_limits import BESIDE_RANGES
from transfer.messages import Rejected
from transfer.mover_handle import MoverHandle
from transfer.mover_set import MoverSet

SLOTS_LOGGED_MAX: Final = 16
GPU: Final = "cuda:"
SPINS: Final = "idle_spin_us="
CORES_MIN: Final = 4
"""One for each who looks, daemon and mover, and others for those whom they serve: on two cores a
restore took twice as long where they looked, with schedulers that wanted the cores."""
BESIDE: Final = ("--limit", f"submit_beside={BESIDE_RANGES}")

AnyMover = MoverHandle | MoverSet
"""One mover, or one a GPU."""

log = structlog.get_logger("mover")


def say_import(mover: AnyMover, pool: PoolId, told: Registration) -> None:
    """Have a pool imported."""
    said = told.message
    mover.import_pool(
        pool, told.layout, told.handles, told.fds, told.sync, said.page_table, said.staging
    )


def say_copy(copy: SubmitCopy, mover: AnyMover) -> None:
    """Hand a copy over."""
    mover.submit(copy)


def rejected(reply: Rejected) -> str:
    """Why a mover is of no more use."""
    return f"it rejected a request: {reply.code}: {reply.detail}"


def log_damaged(reply: PagesDamaged) -> None:
    """Say which host pages are lost."""
    slots = unpack_pages(reply.slots).tolist()
    log.error(
        "host pages differ from their checksums; their slots are used no more",
        pages=len(slots),
        found_by=reply.found_by,
        slots=[f"{slot >> 16}:{slot & 0xFFFF}" for slot in slots[:SLOTS_LOGGED_MAX]],
    )


def may_look(device: str, options: Sequence[str], cores: int) -> bool:
    """Whether this process and movers of these devices may look for what is expected instead of
    sleeping: those of GPUs, where there are cores enough, and others where they are told to spin.
    Movers that are told not to (0) look for nothing, whatever they are of.
    """
    told = [option.removeprefix(SPINS) for option in options if option.startswith(SPINS)]
    if told:
        # The last one counts, and what is no number stops the mover's start.
        return told[-1].isdecimal() and int(told[-1]) > 0
    return device.startswith(GPU) and cores >= CORES_MIN


def options_of(device: str, options: Sequence[str], cores: int) -> tuple[str, ...]:
    """What movers of these devices are started with. Those of GPUs have a thread make the driver's
    calls of long lists where there are cores for it: two a GPU, and two for the daemon and those
    whom it serves. What the options say themselves comes behind that, and counts.
    """
    enough = cores >= CORES_MIN + 2 * device.count(",")
    return (*(BESIDE if device.startswith(GPU) and enough else ()), *options)
