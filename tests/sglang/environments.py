"""Environments with real SGLang on a machine without a GPU: one a version, under `.sglang/`.

    python -m tests.sglang.environments [VERSION ...]

Owns the table of what is installed, and the folder. It runs with the standard library alone, so
that any Python 3.11 can build them; an environment that is up to date is left as it is. It must
never install a torch with CUDA: torch is asked for by its CPU build only, and everything that
would pull another one comes without its dependencies.

The environments share one base: it is made once, and its files are hard-linked into the others
(pip replaces files, it does not write into them).
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".sglang"
STUBS = Path(__file__).resolve().parent / "stubs"
STAMP = "stamp.json"

BASE: tuple[tuple[str, ...], ...] = (
    # torch's CPU build carries a local version; an index without it is an error, not a CUDA torch.
    ("torch==2.13.0+cpu", "numpy", "setuptools"),
    # torchvision must not choose a torch; the others name packages that stand-ins replace.
    ("--no-deps", "torchvision==0.28.0", "compressed-tensors==0.18.0", "xgrammar==0.2.9",
     "ipython", "traitlets"),
    # What the imports of SGLang's engine and server ask for.
    ("aiohttp", "apache-tvm-ffi==0.1.11", "dill", "einops", "fastapi", "gguf", "httpx",
     "jsonschema", "loguru", "msgspec", "openai", "orjson", "packaging", "partial_json_parser",
     "pillow", "prometheus-client", "psutil", "pybase64", "pydantic", "python-multipart", "pyyaml",
     "pyzmq", "regex", "requests", "safetensors", "sentencepiece", "setproctitle", "soundfile",
     "starlette", "tqdm", "uvicorn", "uvloop"),
    # treecored's own, what builds it, and what tests it.
    ("click", "pydantic-settings", "sortedcontainers", "structlog", "rich",
     "hatchling", "editables", "hypothesis", "pytest", "pytest-timeout"),
)  # fmt: skip
"""Calls of pip, in order: what every version gets."""

VERSIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "0.5.16": (("--no-deps", "sglang==0.5.16"), ("transformers==5.12.1",)),
    "0.5.23": (
        ("--no-deps", "sglang==0.5.23", "sglang-router==0.3.2"),
        ("transformers==5.19.0",),
    ),
}
"""The versions that are tested, and what each gets besides."""


def python_of(version: str) -> Path:
    """The interpreter of an environment, whether it is there or not."""
    return HOME / version / "bin" / "python"


def ready(version: str) -> bool:
    """Whether the environment is there and made from the table as it is now."""
    try:
        return (HOME / version / STAMP).read_text(encoding="utf-8") == _stamp(version)
    except OSError:
        return False


def build(versions: Sequence[str]) -> None:
    """Make the environments that are missing or out of date. Raises SystemExit with pip's words."""
    HOME.mkdir(exist_ok=True)
    with _only_one_at_a_time():
        wanted = [version for version in versions if not ready(version)]
        if wanted:
            _base()
        for version in wanted:
            began = time.monotonic()
            _make(version)
            _say(f"SGLang {version}: {HOME / version}, {time.monotonic() - began:.0f} s")


def _stamp(version: str) -> str:
    made_from = [list(sys.version_info[:2]), BASE, VERSIONS[version]]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _base() -> None:
    """The environment that the others are linked from."""
    base = HOME / "base"
    digest = hashlib.sha256(json.dumps([list(sys.version_info[:2]), BASE]).encode()).hexdigest()
    stamp = base / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    began = time.monotonic()
    shutil.rmtree(base, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(base)], check=True)
    for arguments in BASE:
        _pip(base, *arguments)
    _refuse_cuda(base)
    stamp.write_text(digest, encoding="utf-8")
    _say(f"base of all: {base}, {time.monotonic() - began:.0f} s")


def _make(version: str) -> None:
    folder = HOME / version
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    shutil.copytree(
        _packages(HOME / "base"), _packages(folder), copy_function=_link, dirs_exist_ok=True,
        symlinks=True,
    )  # fmt: skip
    for arguments in VERSIONS[version]:
        _pip(folder, *arguments)
    _pip(folder, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    _refuse_cuda(folder)
    (folder / STAMP).write_text(_stamp(version), encoding="utf-8")


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _pip(folder: Path, *arguments: str) -> None:
    """Install; what pip says is shown only if it fails: its warnings about the pins are expected.

    Nothing is compiled ahead: of the 20,000 files a tenth is ever imported.
    """
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-compile",
               "--no-input", "--progress-bar", "off", *arguments]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=tempfile.gettempdir(), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:])
        raise SystemExit(f"pip install {' '.join(arguments)}: exit status {done.returncode}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse_cuda(folder: Path) -> None:
    found = [path.name for path in _packages(folder).glob("nvidia*")]
    torch = (_packages(folder) / "torch" / "version.py").read_text(encoding="utf-8")
    if found or "+cpu" not in torch:
        raise SystemExit(f"{folder}: a torch with CUDA got in ({', '.join(found) or 'torch'})")


@contextmanager
def _only_one_at_a_time() -> Iterator[None]:
    """A second builder waits for the first and then finds everything done."""
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    chosen = parser.parse_args().versions or list(VERSIONS)
    if unknown := [version for version in chosen if version not in VERSIONS]:
        parser.error(f"not in the table: {', '.join(unknown)}")
    build(chosen)
