"""Contestants in processes of their own, told over a pipe what to measure.

Owns the processes it starts; each ends with its pipe. It never decides what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".sglang"
STOCK = {
    "0.5.16": ("radix",),
    "0.5.23": ("python", "rust"),
}
"""SGLang's versions and their trees; the names are those of `--radix-cache-backend`'s cores."""


REASON_CHARS_MAX: Final = 200


class ContestantEnded(RuntimeError):
    """A contestant has ended instead of answering; the message is the last that it said."""


class Contestant:
    """A program that answers each JSON line with one."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def tell(self, *words: object) -> list[float]:
        """Say a line and wait for the answer; raises `ContestantEnded` where none comes."""
        self.say(*words)
        return self.hear()

    def say(self, *words: object) -> None:
        """Say a line; raises `ContestantEnded` where nobody is left to hear it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
        except BrokenPipeError:
            raise ContestantEnded(self._why()) from None

    def hear(self) -> list[float]:
        """Wait for an answer; raises `ContestantEnded` where none comes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContestantEnded(self._why())
        answer: list[float] | None = json.loads(line)
        return answer or []

    def close(self) -> None:
        """End the pipe and wait for the process. Repeatable."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def _why(self) -> str:
        """The last line that the program has said besides its answers, shortened."""
        self._process.wait(10)
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        return last[:REASON_CHARS_MAX] or f"exit status {self._process.returncode}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def stock_versions() -> list[str]:
    """The versions of SGLang whose environments are built here (`make sglang-envs`)."""
    return [version for version in STOCK if (ENVIRONMENTS / version / "stamp.json").exists()]


def stock(version: str) -> Contestant:
    """SGLang's trees of a version."""
    return Contestant(
        [str(ENVIRONMENTS / version / "bin" / "python"), "-m", "benchmarks.stock"],
        {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "sglang" / "stubs"), str(ROOT)])},
    )
