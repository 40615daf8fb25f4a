"""Tables of the documents that are rendered from code, between a pair of marker comments.

Owns the rendering; the prose around the markers is written by hand. A test renders every table
and compares, so a document never says something else than the code. It never imports a module
that needs a device.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from directory.core import limits
from directory.core.actions import Totals
from directory.core.errors import TreecoredError, error_classes
from directory.core.namespace import Adapter, NamespaceKey
from directory.core.states import TABLES
from directory.daemon import metrics
from directory.protocol.admin import (
    CauseReport,
    EvictedReport,
    HistogramReport,
    HotPrefix,
    LogReport,
    NodeReport,
    PoolReport,
    ServedReport,
    SpaceReport,
    Stretch,
    TierReport,
)
from directory.protocol.messages import (
    ClientBody,
    DaemonBody,
    Envelope,
    ReplyEnvelope,
    SessionReply,
    SessionRequest,
)
from docs.failure_rows import failure_table

FOLDER = Path(__file__).resolve().parent


def rendered(text: str, name: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return a document's text with every generated part made anew.

    Raises `ValueError` when a marker names no table, or a part is not closed.
    """
    done: list[str] = []
    rest = text
    while True:
        before, begin, rest = rest.partition("<!-- begin generated: ")
        done.append(before)
        if not begin:
            return "".join(done)
        what, _, rest = rest.partition(" -->")
        _, end, rest = rest.partition(f"<!-- end generated: {what} -->")
        if what not in tables or not end:
            raise ValueError(f"{name}: no table {what!r}, or its part is not closed")
        done.append(f"{begin}{what} -->\n\n{tables[what]()}\n{end}")


def documents() -> list[Path]:
    """Every document that may hold generated parts."""
    return sorted(FOLDER.glob("*.md"))


def state_table(name: str) -> str:
    """One life cycle: a row a state, a column an event."""
    table = TABLES[name]
    states = list(type(next(iter(table))[0]))
    events = list(type(next(iter(table))[1]))
    rows = [["state", *(str(event) for event in events)]]
    for state in states:
        cells = [table.get((state, event)) for event in events]
        rows.append([f"**{state}**", *(_cell(cell) for cell in cells)])
    return _markdown(rows)


def message_table(union: Any, direction: str) -> str:
    """The messages of a union: tag, direction, fields in wire order, meaning."""
    rows = [["tag", "direction", "fields", "meaning"]]
    rows += [
        [f"`{kind.__struct_config__.tag}`", direction, fields(kind), _summary(kind)]
        for kind in get_args(union)
    ]
    return _markdown(rows)


def envelope_table() -> str:
    """The two envelopes."""
    rows = [["envelope", "direction", "fields in order", "meaning"]]
    for kind, direction in ((Envelope, "client to daemon"), (ReplyEnvelope, "daemon to client")):
        rows.append([f"`{kind.__name__}`", direction, fields(kind), _summary(kind)])
    return _markdown(rows)


def structure_table() -> str:
    """Structures that stand inside of messages."""
    rows = [["structure", "fields in order", "meaning"]]
    rows += [
        [f"`{kind.__name__}`", fields(kind), _summary(kind)]
        for kind in (
            *(NamespaceKey, Adapter, Totals, PoolReport, ServedReport, TierReport, EvictedReport),
            *(HistogramReport, LogReport, HotPrefix, CauseReport, SpaceReport, NodeReport, Stretch),
        )
    ]
    return _markdown(rows)


def error_table() -> str:
    """Every code with its group and what it means."""
    rows = [["code", "group", "meaning"]]
    for code, cls in sorted(error_classes().items(), key=lambda item: _lineage(item[1])):
        (group,) = (base for base in cls.__bases__ if issubclass(base, TreecoredError))
        name = "(a group)" if group is TreecoredError else f"`{group.code}`"
        rows.append([f"`{code}`", name, _summary(cls)])
    return _markdown(rows)


def limit_table() -> str:
    """Every limit with its value."""
    rows = [["limit", "value"]]
    for name, value in vars(limits).items():
        if name.isupper() and name not in ("KIB", "MIB"):
            rows.append([f"`{name}`", f"{value:,}"])
    return _markdown(rows)


def metric_table() -> str:
    """Every metric with its labels."""
    rows = [["metric", "type", "labels", "counts"]]
    for kind, suffix, names in (
        ("counter", "_total", metrics.COUNTERS),
        ("histogram", "", metrics.HISTOGRAMS),
    ):
        for name in names:
            labels = ", ".join(f"`{label}`" for label in name.labels)
            rows.append([f"`{metrics.PREFIX}{name.name}{suffix}`", kind, labels, name.meaning])
    return _markdown(rows)


def fields(kind: type) -> str:
    """The fields of a message in wire order, with types; defaults are marked."""
    hints = get_type_hints(kind)
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    optional = len(kind.__struct_defaults__)  # type: ignore[attr-defined]
    required = len(names) - optional
    shown = [
        f"`{name}`{'' if at < required else '?'} {type_name(hints[name])}"
        for at, name in enumerate(names)
    ]
    return ", ".join(shown) or "none"


def type_name(hint: Any) -> str:
    """A type as a reader of the protocol thinks of it."""
    origin = get_origin(hint)
    if origin is Literal:
        return " / ".join(f'"{choice}"' for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        choices = get_args(hint)
        if type(None) in choices:
            return type_name(choices[0]) + " or nil"
        return "one of the bodies below"
    if origin is tuple:
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            return f"list of {type_name(inner[0])}"
        return "(" + ", ".join(type_name(part) for part in inner) + ")"
    if origin is dict:
        key, value = get_args(hint)
        return f"map of {type_name(key)} to {type_name(value)}"
    return str(hint.__name__)


def _cell(state: StrEnum | None) -> str:
    return "" if state is None else str(state)


def _lineage(cls: type) -> str:
    return "/".join(base.__name__ for base in reversed(cls.__mro__))


def _summary(kind: type) -> str:
    """The first paragraph of a docstring, on one line."""
    paragraph = (kind.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "residency": lambda: state_table("residency"),
    "transfer": lambda: state_table("transfer"),
    "lease": lambda: state_table("lease"),
    "pool": lambda: state_table("pool"),
    "envelopes": envelope_table,
    "client messages": lambda: message_table(ClientBody, "client to daemon"),
    "daemon messages": lambda: message_table(DaemonBody, "daemon to client"),
    "session requests": lambda: message_table(SessionRequest, "client to daemon"),
    "session replies": lambda: message_table(SessionReply, "daemon to client"),
    "structures": structure_table,
    "errors": error_table,
    "limits": limit_table,
    "metrics": metric_table,
    "failure rows": failure_table,
}
