"""The control process, freshly started, has loaded neither torch nor cuda nor numpy."""

import json
import subprocess
import sys

from tests.tidy.source import ROOT, module_name, python_files

_UNWANTED = ("torch", "cuda", "cupy", "numpy")
_PROGRAM = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(modules: list[str]) -> set[str]:
    """The names of all modules in a fresh interpreter that has imported the given ones."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(modules)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(*folders: str) -> list[str]:
    """Every module below the folders but `__main__`, whose import would run a command."""
    return [module_name(path) for path in python_files(folders) if path.stem != "__main__"]


def test_the_control_process_loads_neither_torch_nor_cuda_nor_numpy() -> None:
    modules = modules_of("directory/daemon", "directory/cli")
    assert "directory.daemon.main" in modules
    loaded = loaded_by(modules)
    assert "directory.daemon.main" in loaded
    assert sorted(name for name in loaded if name.split(".")[0] in _UNWANTED) == []


def test_the_core_loads_nothing_of_the_other_packages() -> None:
    loaded = loaded_by(modules_of("directory/core"))
    others = ("directory.protocol", "directory.daemon", "directory.cli", "transfer", "zmq")
    assert "directory.core" in loaded
    assert sorted(name for name in loaded if name.startswith(others)) == []
