"""Reading the project's own source: which files there are, and what each imports.

Owns the list of product folders. Reads files only; it never imports what it reads, so the rules
can be checked for modules whose dependencies are not installed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("directory", "transfer", "scheduler_shim")
SUPPORT = ("tests", "benchmarks")

# What may stand in the repository besides files that git keeps.
_SKIPPED = {
    ".git",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".consumers",
    ".sglang",
    ".venv",
    "__pycache__",
    "build",
    "dist",
    "htmlcov",
    "shared",
}
_TEXT_SUFFIXES = {".cfg", ".in", ".ini", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml"}
_TEXT_NAMES = {".gitignore", "CHANGELOG", "LICENSE", "Makefile", "run"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: its dotted name and the line that imports it."""

    name: str
    line: int


def python_files(folders: tuple[str, ...] = PRODUCT) -> list[Path]:
    """Every Python file below the folders, in a fixed order."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


def text_files() -> list[Path]:
    """Every text file of the repository, tests and documents included, in a fixed order."""
    return sorted(_walk(ROOT))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _SKIPPED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file() and (path.suffix in _TEXT_SUFFIXES or path.name in _TEXT_NAMES):
            yield path


def label(path: Path) -> str:
    """The path as a reader types it: relative to the repository."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """The dotted name under which the file is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def parse(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(tree: ast.AST, module: str, is_package: bool) -> list[Import]:
    """Every import anywhere in the tree, function bodies and type-checking blocks included.

    `from a.b import c` counts as `a.b.c`, because `c` may be a module; whoever checks a rule
    treats a name below an allowed or forbidden module like the module itself. A call of
    `importlib.import_module` or `__import__` with a literal name counts too.
    """
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            found.extend(
                Import(base if alias.name == "*" else f"{base}.{alias.name}", node.lineno)
                for alias in node.names
            )
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.append(Import(name.value, node.lineno))
    return found


@cache
def file_imports(path: Path) -> list[Import]:
    """Every import of a file of the repository, which is read once: every rule asks again."""
    return imports_of(parse(path), module_name(path), path.name == "__init__.py")


def within(name: str, module: str) -> bool:
    """Whether the dotted name is the module or lies below it."""
    return name == module or name.startswith(module + ".")


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    parts = parts[: len(parts) - up]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_dynamic_import(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"__import__", "import_module"}
    return isinstance(function, ast.Attribute) and function.attr == "import_module"
