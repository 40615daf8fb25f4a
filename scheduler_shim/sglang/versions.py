"""The versions of SGLang that the shim knows, and the error for what it cannot serve.

Owns the range: every version in it was read, and has the interfaces and places for hooks that the
shim needs. It imports nothing, so that whoever only wants to refuse can.
"""

from __future__ import annotations

import re
from typing import Final

OLDEST: Final = (0, 5, 13)
NEWEST: Final = (0, 5, 23)


class Unsupported(ValueError):
    """This engine cannot use treecored; the message is one sentence that says why."""


def supported_range() -> str:
    """The range in words."""
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return f"treecored supports SGLang {oldest} to {newest}"


def check_version(text: str) -> None:
    """Raise `Unsupported` outside the range, and for a build that has no number of a release."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if found is None or not OLDEST <= tuple(map(int, found.groups())) <= NEWEST:
        raise Unsupported(f"{supported_range()}, this is {text}")
