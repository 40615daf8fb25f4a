"""Signals that are heeded, whatever this process was started with.

A shell has what it runs in the background ignore SIGINT, `nohup` has it ignore SIGHUP, and every
child inherits that. treecored leaves a signal alone that it was told to ignore.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def heeding(*numbers: signal.Signals) -> Iterator[None]:
    """Have these end this process, and what it starts meanwhile, as they do by default."""
    with ExitStack() as stack:
        for number in numbers:
            before = signal.signal(number, signal.SIG_DFL)
            stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        yield
