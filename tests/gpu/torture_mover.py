"""What the torture's mover is started with. Owns the choice of its program and its limits."""

from collections.abc import Sequence

from directory.daemon.cores import cores
from directory.daemon.mover_words import options_of
from transfer.mover_handle import MoverHandle

STAGED = ("stage_chunks_min=1", "stage_bytes=131072", "stage_row_bytes=0")
"""Every copy goes through the slab, in slices of two pages."""
BESIDE = ("submit_beside=2",)
"""Such a slice is handed to the thread; one of a single page is the loop's, if nothing that it
would overtake is still to be made."""


def start_mover(
    device: str, without: str, limits: Sequence[str], *, staged: bool, beside: bool
) -> MoverHandle:
    """Start it as a daemon would here, but for these limits."""
    program = "tests.gpu.beside_mover" if beside else "transfer.mover"
    if without == "word-recheck":
        program = "tests.gpu.mutant_mover"
    chosen = (*(STAGED if staged else ()), *(BESIDE if beside else ()))
    said = [word for limit in chosen for word in ("--limit", limit)]
    options = options_of(device, [*said, *limits], cores())
    return MoverHandle.spawn(device, program=program, options=options)
