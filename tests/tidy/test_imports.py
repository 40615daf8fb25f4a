"""Every file keeps to the import rules, inside functions too, and the rules can be broken."""

import ast

import pytest

from tests.tidy.rules import RULES, Rule
from tests.tidy.source import (
    PRODUCT,
    ROOT,
    SUPPORT,
    Import,
    file_imports,
    imports_of,
    label,
    module_name,
    parse,
    python_files,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title.replace(" ", "-"))
def test_no_file_breaks_the_import_rule(rule: Rule) -> None:
    breaches = [
        f"{label(path)}:{found.line} imports {found.name}"
        for path in python_files(PRODUCT + SUPPORT)
        for found in rule.breaches(module_name(path), file_imports(path))
    ]
    assert not breaches, f"{rule.title}:\n" + "\n".join(breaches)


@pytest.mark.parametrize(
    ("module", "source", "title"),
    [
        ("directory.core.tree", "import time", "directory.core is pure"),
        ("directory.core.tree", "from os import path", "directory.core is pure"),
        ("directory.core.tree", "def f():\n    import random", "directory.core is pure"),
        ("directory.core.tree", "from directory.protocol import codec", "directory.core is pure"),
        ("directory.core.tree", "from ..protocol import codec", "directory.core is pure"),
        ("directory.core.tree", "__import__('zmq')", "directory.core is pure"),
        ("directory.protocol.codec", "import zmq", "directory.protocol knows"),
        ("transfer.plan", "from directory.core import tree", "transfer knows"),
        ("transfer.plan", "from directory.core.node import Node", "transfer knows"),
        ("transfer.plan", "import scheduler_shim.client", "transfer knows"),
        ("scheduler_shim.client", "from transfer.engine import Engine", "scheduler_shim knows"),
        ("scheduler_shim.client", "import directory.daemon.main", "scheduler_shim knows"),
        ("directory.daemon.main", "import torch.cuda", "the control process"),
        ("transfer.engine", "from cuda.bindings import driver", "cuda only"),
        ("scheduler_shim.client", "import sglang.srt", "sglang only"),
        ("transfer.host_tier", "import numpy as np", "numpy is not"),
        ("directory.daemon.movers", "import multiprocessing as mp", "processes are started"),
        ("tests.unit.test_x", "from pickle import loads", "nothing is read"),
    ],
)
def test_the_rule_finds_a_forbidden_import(module: str, source: str, title: str) -> None:
    rule = next(rule for rule in RULES if rule.title.startswith(title))
    assert rule.breaches(module, imports_of(ast.parse(source), module, is_package=False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("directory.core.tree", "from directory.core.ids import NodeId\nimport bisect"),
        ("directory.protocol.codec", "import msgspec\nfrom directory.core import limits"),
        ("transfer.plan", "from directory.core import ids\nfrom directory.core.errors import X"),
        ("transfer.device.cuda", "from cuda.bindings import driver"),
        ("transfer.device.cuda_batch", "import cuda"),
        ("transfer.ipc.memory_cuda", "import cuda.bindings.driver"),
        ("scheduler_shim.mirror", "from directory.core.tree import Tree\nimport transfer.layout"),
        ("scheduler_shim.sglang.plugin", "import sglang, torch"),
        ("directory.daemon.main", "import os, time, zmq"),
    ],
)
def test_the_rules_leave_an_allowed_import_alone(module: str, source: str) -> None:
    imports = imports_of(ast.parse(source), module, is_package=False)
    assert [rule.title for rule in RULES if rule.breaches(module, imports)] == []


def test_relative_imports_are_resolved_from_packages_and_modules() -> None:
    tree = ast.parse("from . import a\nfrom ..b import c")
    assert imports_of(tree, "p.q", is_package=True) == [Import("p.q.a", 1), Import("p.b.c", 2)]
    assert imports_of(tree, "p.q.m", is_package=False) == [Import("p.q.a", 1), Import("p.b.c", 2)]


@pytest.mark.parametrize("folder", ["directory", "directory/core", "transfer", "scheduler_shim"])
def test_packages_that_others_import_through_hold_only_a_docstring(folder: str) -> None:
    # Importing `directory.core.ids` runs these files first: an import in one of them would load,
    # for instance, the whole tree into a mover process behind the rules' back.
    body = parse(ROOT / folder / "__init__.py").body
    assert all(isinstance(node, ast.Expr) for node in body)
