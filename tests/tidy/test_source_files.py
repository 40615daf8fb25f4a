"""Product files have a docstring and a bearable length and avoid a few dangerous things."""

import ast
import re

import pytest

from tests.tidy.source import PRODUCT, ROOT, SUPPORT, label, parse, python_files, text_files

LINES_MAX = 400

_FORBIDDEN_CALLS = frozenset({"eval", "exec"})
# Folders that exist on one machine only. The character before the slash keeps longer paths such
# as `a/work/b` out, and joining the pieces keeps this file itself out.
_MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:" + "|".join(["work", "root", "home"]) + r")/")


def forbidden_calls(tree: ast.AST) -> list[int]:
    """The lines that call eval or exec, or a method of the builtins module by those names."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if (isinstance(function, ast.Name) and function.id in _FORBIDDEN_CALLS) or (
            isinstance(function, ast.Attribute)
            and function.attr in _FORBIDDEN_CALLS
            and isinstance(function.value, ast.Name)
            and function.value.id == "builtins"
        ):
            lines.append(node.lineno)
    return lines


def test_every_product_file_begins_with_a_docstring() -> None:
    bare = [
        label(path) for path in python_files() if not (ast.get_docstring(parse(path)) or "").strip()
    ]
    assert not bare


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {
        label(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(PRODUCT + SUPPORT)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_no_file_evaluates_text_as_code() -> None:
    found = [
        f"{label(path)}:{line}"
        for path in python_files(PRODUCT + SUPPORT)
        for line in forbidden_calls(parse(path))
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("eval('1')", [1]),
        ("x = 1\nexec('x')", [2]),
        ("import builtins\nbuiltins.eval('1')", [2]),
        ("model.eval()", []),
        ("evaluate()", []),
    ],
)
def test_a_call_of_eval_or_exec_is_found(source: str, lines: list[int]) -> None:
    assert forbidden_calls(ast.parse(source)) == lines


def test_no_line_names_a_path_of_one_machine() -> None:
    found = [
        f"{label(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _MACHINE_PATH.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open('" + "/work" + "/main/x')", True),
        ("cd " + "/root" + "/x", True),
        ("see ../shared/work/notes", False),
        ("/run/user/1000/treecored", False),
    ],
)
def test_a_path_of_one_machine_is_recognised(line: str, found: bool) -> None:
    assert bool(_MACHINE_PATH.search(line)) is found


@pytest.mark.parametrize("package", PRODUCT)
def test_every_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for path in python_files(PRODUCT + SUPPORT)}
    assert sorted(label(f) for f in folders if not (f / "__init__.py").is_file()) == []
