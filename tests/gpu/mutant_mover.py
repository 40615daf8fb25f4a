"""A mover without the re-check of span words: for tests that have to notice its absence.

Words are still looked at before the first byte is submitted; what happens to the pages after that
goes unseen.
"""

import sys

from transfer.copies import Copy, CopyState
from transfer.engine import Engine
from transfer.mover import main

_words_hold = Engine._words_hold


def _looked_at_once(self: Engine, copy: Copy) -> bool:
    return copy.state is not CopyState.READY or _words_hold(self, copy)


if __name__ == "__main__":
    Engine._words_hold = _looked_at_once  # type: ignore[method-assign]
    sys.exit(main())
