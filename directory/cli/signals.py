"""Ending signals as an exception that unwinds the run instead of ending it on the spot.

Owns this process's handlers of SIGINT, SIGTERM and SIGHUP between `catch` and `restore`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers


class Interrupted(KeyboardInterrupt):
    """This process was asked to end. `exit_status` follows the shells' convention."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


class EndingSignals:
    """The handlers that were there before, to be put back."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Handler] = {}

    def catch(self) -> None:
        """Raise `Interrupted` at the next ending signal; only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING_SIGNALS:
            before = signal.getsignal(number)
            if before is not None and before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, _interrupt)

    def ignore(self) -> None:
        """Let nothing disturb the cleaning up."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the former handlers back. Repeatable."""
        while self._before:
            signal.signal(*self._before.popitem())


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)
