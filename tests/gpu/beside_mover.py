"""A mover that says so when a thread of its own makes the driver's calls of loads and of backups.

For tests that would show nothing of the thread if no submission were handed to it.
"""

import sys
from collections import Counter

from transfer.device.cuda_calls import Beside, Queued
from transfer.mover import main

EACH = 100
"""Of both kinds, before it says so."""
SAID = f"the calls of {EACH} loads and backups and more were handed to the thread"

_hand_over = Beside.hand_over
_handed = Counter[bool]()


def _counted(self: Beside, queued: Queued, *, urgent: bool) -> None:
    _handed[urgent] += 1
    if _handed[urgent] == EACH <= _handed[not urgent]:  # the later of the two
        sys.stderr.write(SAID + "\n")
    _hand_over(self, queued, urgent=urgent)


if __name__ == "__main__":
    Beside.hand_over = _counted  # type: ignore[method-assign]
    sys.exit(main())
