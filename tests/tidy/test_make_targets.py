"""Every target of the Makefile is explained by `make help` and in CONTRIBUTING.md, and no other."""

import re

from tests.tidy.source import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def targets() -> set[str]:
    (line,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    return set(line.split())


def test_make_help_explains_every_target() -> None:
    explained = re.findall(r'^\t@echo "make ([a-z-]+) ', MAKEFILE, re.MULTILINE)
    assert set(explained) == targets() - {"help"}
    assert len(explained) == len(set(explained))


def test_the_table_for_contributors_has_every_target() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `make ([a-z-]+)` \|", text, re.MULTILINE)) == targets() - {"help"}
