"""`treecored explain --tokens FILE`: how far a prompt would match in the running daemon, and why.

Owns the reading of token files and the words on the terminal. The daemon answers out of its live
tree; nothing there is touched by the question.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from directory.analytics.attribution import MEANING, Cause
from directory.core.namespace import NamespaceKey
from directory.protocol.admin import ExplainReport, Stretch

NUMBER: Final = re.compile(rb"\d+")
TOKEN_MAX: Final = (1 << 32) - 1
FOUND: Final = {"own": "the own pool", "host": "the host tier", "peer": "another pool"}


class BadTokens(Exception):
    """The file has no tokens; one sentence."""


def read_tokens(path: Path) -> bytes:
    """Token ids of a file (a JSON list, or numbers between anything else), packed.

    Raises `BadTokens` and `OSError`.
    """
    text = path.read_bytes()
    found = [int(number) for number in NUMBER.findall(text)]
    if not found:
        raise BadTokens(f"{path} has no token ids: numbers, as a JSON list or one after the other")
    if max(found) > TOKEN_MAX:
        raise BadTokens(f"{path}: {max(found)} is no token id")
    return array("I", found).tobytes()


def namespace_of(salt: str | None, extra_key: str | None, weight_epoch: int) -> NamespaceKey:
    """The namespace that the options name."""
    return NamespaceKey(weight_epoch=weight_epoch, cache_salt=salt, extra_key=extra_key)


def show(report: ExplainReport, console: Console) -> None:
    """The prompt, stretch by stretch."""
    console.print(
        f"[bold]{report.matched_tokens:,} of {report.tokens:,} tokens[/] would match now, "
        f"pages of {report.page_tokens} tokens, namespace {report.namespace}"
    )
    for stretch in report.stretches:
        console.print(f"  {escape(sentence(stretch))}", soft_wrap=True)


def sentence(stretch: Stretch) -> str:
    """One stretch in words."""
    where = f"tokens {stretch.first_token:,} to {stretch.first_token + stretch.tokens - 1:,}"
    if stretch.verdict in FOUND:
        return f"{where}: in {FOUND[stretch.verdict]}{stretch.detail and f': {stretch.detail}'}"
    cause = Cause(stretch.verdict)
    return f"{where}: {cause.value.replace('_', ' ')}: {stretch.detail or MEANING[cause]}"
