"""Marks: when what happened, of one process, for whoever takes a request's time apart.

Owns one file a process in the folder that `MARKS_OF_TREECORED` names, and is off without it. All
processes of a node share the clock, so that marks of scheduler, daemon and mover can be laid side
by side. For people who measure, not for production: a mark costs two microseconds while marks are
on. It must never fail: what cannot be written is not written.

A line is `<nanoseconds, monotonic> <what> <about> ...`, in the order of the marks.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic_ns
from typing import Final

VARIABLE: Final = "MARKS_OF_TREECORED"
SUFFIX: Final = ".marks"


class Marks:
    """One process's file, opened with the first mark."""

    def __init__(self) -> None:
        self.on = False
        """Ask before what a mark says is made, where that costs anything."""
        self._folder = ""
        self._pid = 0
        self._fd = -1

    def begin(self) -> None:
        """Do as the environment says now."""
        self.begin_in(os.environ.get(VARIABLE, ""))

    def begin_in(self, folder: str) -> None:
        """Write into a folder from now on; nothing where there is none ("")."""
        self._folder = folder
        self.on = bool(folder)
        self._pid = 0

    def __call__(self, what: str, *about: object) -> None:
        """Mark this moment."""
        if not self.on:
            return
        line = f"{monotonic_ns()} {' '.join([what, *map(str, about)])}\n"
        if self._pid != os.getpid():  # the first mark, or the first one of a forked process
            self._open()
        try:
            os.write(self._fd, line.encode())
        except OSError:
            self.on = False

    def _open(self) -> None:
        self._pid = os.getpid()
        path = Path(self._folder) / f"{self._pid}{SUFFIX}"
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            self._fd = -1

    def __repr__(self) -> str:
        return f"<Marks {self._folder or 'off'}>"


mark: Final = Marks()
"""This process's."""
mark.begin()
