"""The tables of the documents say what the code says."""

import re

import pytest

from directory.core.errors import error_classes
from docs.tables import FOLDER, GENERATED, documents, rendered
from tests.tidy.source import ROOT


def test_every_generated_table_is_up_to_date() -> None:
    stale = [
        path.name
        for path in documents()
        if rendered(path.read_text(encoding="utf-8"), path.name, GENERATED)
        != path.read_text(encoding="utf-8")
    ]
    assert not stale, "run `make docs`"


def test_every_table_stands_in_a_document() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in documents())
    missing = [name for name in GENERATED if f"<!-- begin generated: {name} -->" not in text]
    assert not missing


def test_the_protocol_lists_every_error_code_once() -> None:
    text = (FOLDER / "protocol.md").read_text(encoding="utf-8")
    for code in error_classes():
        assert len(re.findall(rf"^\| `{code}` \|", text, re.MULTILINE)) == 1


def test_every_kind_of_violation_is_in_the_table_of_invariants_and_no_other() -> None:
    source = (ROOT / "directory/core/invariants.py").read_text(encoding="utf-8")
    kinds = set(re.findall(r'f"([a-z]+)(?: \{[a-z_]+\})?: ', source))
    text = (FOLDER / "invariants.md").read_text(encoding="utf-8")
    table = text.split("## Rules")[0]
    assert kinds
    assert set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)) == kinds


def test_a_table_that_differs_is_noticed() -> None:
    text = "a <!-- begin generated: x -->old<!-- end generated: x --> b"
    fresh = rendered(text, "x.md", {"x": lambda: "new\n"})
    assert fresh == "a <!-- begin generated: x -->\n\nnew\n\n<!-- end generated: x --> b"
    assert rendered(fresh, "x.md", {"x": lambda: "new\n"}) == fresh


@pytest.mark.parametrize(
    "text",
    ["<!-- begin generated: y --><!-- end generated: y -->", "<!-- begin generated: x -->"],
)
def test_a_marker_without_table_or_end_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.md"):
        rendered(text, "x.md", {"x": lambda: ""})
