"""Marks: what stands in the file, and that nothing of it can hurt."""

import os
from pathlib import Path

import pytest

from transfer.ipc.marks import SUFFIX, VARIABLE, Marks


def lines_of(folder: Path, pid: int) -> list[list[str]]:
    text = (folder / f"{pid}{SUFFIX}").read_text(encoding="utf-8")
    return [line.split() for line in text.splitlines()]


def test_without_a_folder_nothing_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    marks = Marks()
    marks.begin()
    assert not marks.on
    marks("seen", "r")


def test_marks_stand_in_order_with_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    marks = Marks()
    marks.begin()
    assert marks.on
    marks("copy", 7, "backup")
    marks("copied", 7)
    first, second = lines_of(tmp_path, os.getpid())
    assert (first[1:], second[1:]) == (["copy", "7", "backup"], ["copied", "7"])
    assert 0 < int(first[0]) <= int(second[0])


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    marks = Marks()
    marks.begin_in(str(tmp_path))
    marks("parent")
    child = os.fork()
    if not child:
        marks("child")
        os._exit(0)
    os.waitpid(child, 0)
    assert [line[1:] for line in lines_of(tmp_path, child)] == [["child"]]
    assert [line[1:] for line in lines_of(tmp_path, os.getpid())] == [["parent"]]


def test_a_folder_that_is_not_there_ends_the_marks_and_nothing_else(tmp_path: Path) -> None:
    marks = Marks()
    marks.begin_in(str(tmp_path / "absent"))
    marks("seen")
    assert not marks.on
