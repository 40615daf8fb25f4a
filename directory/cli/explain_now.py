"""`treecored explain --tokens FILE`: how far a prompt would match in the running daemon, and why.

Owns the reading of token files and the words on the terminal. The daemon answers out of its live
tree; nothing there is touched by the question.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape

from directory.analytics.attribution import MEANING, Cause
from directory.core.namespace import NamespaceKey
from directory.protocol.admin import ExplainReport, Stretch

WORD: Final = re.compile(r"-?[0-9]{1,10}")
SHOWN_CHARS_MAX: Final = 60
TOKEN_MAX: Final = (1 << 32) - 1
FOUND: Final = {"own": "the own pool", "host": "the host tier", "peer": "another pool"}


class BadTokens(Exception):
    """The file has something else than tokens; one sentence."""


def read_tokens(path: Path) -> bytes:
    """Token ids of a file, packed: a JSON list of numbers, or numbers with blanks between them.

    Raises `BadTokens` and `OSError`.
    """
    text = path.read_bytes()
    try:
        items: list[object] = msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        items = [_number(word) for word in text.decode(errors="replace").split()]
    if not items:
        raise BadTokens(f"{path} has no token ids: numbers, as a JSON list or one after the other")
    found = array("I")
    for item in items:
        # True is a number to Python alone.
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= TOKEN_MAX:
            raise BadTokens(f"{path}: {_shortened(item)} is no token id")
        found.append(item)
    return found.tobytes()


def _number(word: str) -> int | str:
    return int(word) if WORD.fullmatch(word) else word


def _shortened(item: object) -> str:
    text = repr(item)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


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
