"""What `treecored doctor` looks at: facts of this machine, read and nothing changed.

Owns how each fact is found out. A fact that cannot be found out is None or empty, with no guess in
its place; judging is doctor_checks.py's. It must never load a GPU driver into this process: the
driver's own tool is asked.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from directory.daemon.memory import available_bytes
from directory.daemon.runtime import SESSION_NAME

TOOL: Final = "nvidia-smi"
TOOL_S: Final = 20.0
QUERY: Final = "index,uuid,name,driver_version,memory.total,compute_mode,mig.mode.current"
SHM: Final = Path("/dev/shm")
THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as the driver's tool names it."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_bytes: int
    compute_mode: str
    mig: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. Bytes; -1: without limit; None: not known."""

    python: str
    kernel: str
    architecture: str
    cpus: int
    memory_available: int | None
    memlock: int
    open_files: int
    shm_total: int | None
    shm_free: int | None
    huge_pages: str
    huge_pages_shm: str
    tool: str
    tool_problem: str
    gpus: tuple[Gpu, ...]
    peer_access: str
    """The tool's table of which GPU reads which; empty: not known."""
    allocator_settings: str
    visible_devices: str | None
    packages: dict[str, str]
    runtime_dir: str
    runtime_problem: str
    daemon: bool
    settings_problem: str
    device: str
    host_tier: int


def gather(runtime_dir: Path, *, device: str, host_tier: int, settings_problem: str = "") -> Facts:
    """Look at everything."""
    tool = shutil.which(TOOL) or ""
    gpus, problem = _gpus(tool)
    shm = _room(SHM)
    return Facts(
        python=platform.python_version(),
        kernel=platform.release(),
        architecture=platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        memory_available=available_bytes(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shm_total=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        huge_pages=_chosen(THP / "enabled"),
        huge_pages_shm=_chosen(THP / "shmem_enabled"),
        tool=tool,
        tool_problem=problem,
        gpus=gpus,
        peer_access=_asked(tool, "topo", "-p2p", "r")[0] if len(gpus) > 1 else "",
        allocator_settings=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        or os.environ.get("PYTORCH_ALLOC_CONF", ""),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        packages={name: _version(name) for name in PACKAGES},
        runtime_dir=str(runtime_dir),
        runtime_problem=_runtime_problem(runtime_dir),
        daemon=_listens(runtime_dir / SESSION_NAME),
        settings_problem=settings_problem,
        device=device,
        host_tier=host_tier,
    )


BINDINGS: Final = ("cuda-bindings", "cuda-python")
"""Either brings the module that the mover needs: PyTorch comes with the first one alone."""
PACKAGES: Final = ("treecored", "sglang", "torch", *BINDINGS, "pyzmq", "msgspec")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _room(path: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _chosen(path: Path) -> str:
    """The word in brackets of a kernel switch."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _asked(tool: str, *arguments: str) -> tuple[str, str]:
    """What the driver's tool says, and its complaint."""
    if not tool:
        return "", f"{TOOL} is not on the path"
    try:
        done = subprocess.run(
            [tool, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{TOOL} did not answer: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return "", f"{TOOL} failed: {said[-1] if said else done.returncode}"
    return done.stdout, ""


def _gpus(tool: str) -> tuple[tuple[Gpu, ...], str]:
    said, problem = _asked(tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    return parse_gpus(said), problem


def parse_gpus(said: str) -> tuple[Gpu, ...]:
    """GPUs out of the tool's table; lines of another form are left out."""
    gpus: list[Gpu] = []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 7 and parts[0].isdigit():
            memory = int(parts[4]) * 1024 * 1024 if parts[4].isdigit() else 0
            gpus.append(
                Gpu(int(parts[0]), parts[1], parts[2], parts[3], memory, parts[5], parts[6])
            )
    return tuple(gpus)


def _runtime_problem(folder: Path) -> str:
    """What keeps a daemon from using its runtime folder; empty: nothing."""
    there = folder
    try:
        while not there.exists():
            there = there.parent
        if there == folder:
            found = folder.stat()
            if found.st_uid != os.getuid():
                return f"it belongs to user {found.st_uid}"
            if found.st_mode & 0o077:
                return f"its mode is {found.st_mode & 0o777:o}, others may look in"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{there} cannot be written to"
    except OSError as error:
        return f"{there}: {error.strerror}"
    return ""


def _listens(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            sock.connect(str(path))
    except OSError:
        return False
    return True
