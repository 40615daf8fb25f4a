"""`treecored serve` without the destination fence: the comparison of digests has to notice.

    python -m benchmarks.sglang_gpu.unfenced serve ...

Copies into a pool are handed to the mover without the fences of that pool: nobody waits until the
target pages are quiet and their names are written. Never run for anything else.
"""

from __future__ import annotations

import msgspec

from directory.cli.main import app
from directory.core.actions import SubmitCopy
from transfer.mover_handle import MoverHandle

_submit = MoverHandle.submit


def _submit_unfenced(self: MoverHandle, copy: SubmitCopy) -> None:
    targets = {part.target for part in copy.parts}
    fences = tuple(fence for fence in copy.fences if fence.pool not in targets)
    _submit(self, msgspec.structs.replace(copy, fences=fences))


if __name__ == "__main__":
    MoverHandle.submit = _submit_unfenced  # type: ignore[method-assign]
    app()
