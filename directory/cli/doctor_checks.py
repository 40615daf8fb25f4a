"""The judgement of `treecored doctor`: from facts to lines, each ok, a note, or a problem with its
cure.

Owns what is right and the words of every cure. It is pure: the same facts give the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from directory.analytics.words import NBSP, size
from directory.cli.doctor_facts import BINDINGS, Facts, Gpu

State = Literal["ok", "note", "problem"]

GIB: Final = 1 << 30
MIB: Final = 1 << 20
DRIVER_MIN: Final = (525, 60)
"""First driver of CUDA 12.0 (NVIDIA, CUDA release notes, table of driver versions)."""
KERNEL_MIN: Final = (5, 3)
"""pidfd_open(2): how the end of a scheduler is noticed."""
SGLANG_MIN, SGLANG_MAX = (0, 5, 13), (0, 5, 23)
OPEN_FILES_MIN: Final = 4_096
POOL_SHM_BYTES: Final = 64 * MIB


class Line(NamedTuple):
    """One finding. `cure`: what to do, only of notes and problems."""

    topic: str
    state: State
    text: str
    cure: str = ""


def judge(facts: Facts) -> list[Line]:
    """Every line, in a fixed order."""
    lines: list[Line] = [
        *_settings(facts),
        *_system(facts),
        *_memory(facts),
        *_gpu(facts),
        *_software(facts),
    ]
    return lines


def _gpus_wanted(facts: Facts) -> list[str]:
    """The devices of the settings that are GPUs; a daemon has a mover for each."""
    return [device for device in facts.device.split(",") if device.startswith("cuda:")]


def _plain(nbytes: float) -> str:
    return size(nbytes).replace(NBSP, " ")


def _settings(facts: Facts) -> Iterator[Line]:
    if facts.settings_problem:
        yield Line("settings", "problem", facts.settings_problem, "correct or remove that setting")
    else:
        yield Line("settings", "ok", f"device {facts.device}, host tier {_plain(facts.host_tier)}")
    if facts.runtime_problem:
        yield Line(
            "runtime folder",
            "problem",
            f"{facts.runtime_dir}: {facts.runtime_problem}",
            f"chown and `chmod 700 {facts.runtime_dir}`, or choose another one with --runtime-dir",
        )
    else:
        running = "a daemon listens there" if facts.daemon else "no daemon listens there now"
        yield Line("runtime folder", "ok", f"{facts.runtime_dir}; {running}")


def _system(facts: Facts) -> Iterator[Line]:
    if _numbers(facts.kernel)[:2] < KERNEL_MIN:
        yield Line(
            "kernel",
            "problem",
            f"Linux {facts.kernel} has no pidfds",
            "use Linux 5.3 or newer",
        )
    else:
        yield Line("kernel", "ok", f"Linux {facts.kernel}, {facts.architecture}, {facts.cpus} cpus")
    if 0 <= facts.open_files < OPEN_FILES_MIN:
        yield Line(
            "open files",
            "problem",
            f"at most {facts.open_files:,}; pools and the host tier are descriptors",
            f"raise the hard limit to {OPEN_FILES_MIN:,} or more (ulimit -Hn, LimitNOFILE=)",
        )
    else:
        limit = "without limit" if facts.open_files < 0 else f"up to {facts.open_files:,}"
        yield Line("open files", "ok", limit)


def _memory(facts: Facts) -> Iterator[Line]:
    yield _memlock(facts)
    yield _shm(facts)
    available = facts.memory_available
    if available is not None and facts.host_tier > available:
        yield Line(
            "memory",
            "problem",
            f"{_plain(available)} are available, the host tier may take {_plain(facts.host_tier)}",
            "make the host tier smaller (--host-tier), or give the machine or its cgroup more",
        )
    elif available is not None:
        yield Line("memory", "ok", f"{_plain(available)} available")
    if facts.huge_pages_shm in ("never", "deny"):
        yield Line(
            "huge pages",
            "note",
            f"of shared memory: {facts.huge_pages_shm}",
            "Linux 6.1 and later makes them for a mover unless this is 'deny'; for an older one "
            "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` may make pinning "
            "and copies of a large host tier faster",
        )
    else:
        text = f"anonymous {facts.huge_pages or 'unknown'}, shared {facts.huge_pages_shm or '-'}"
        yield Line("huge pages", "ok", text)


def _memlock(facts: Facts) -> Line:
    """A driver that pins the host tier locks it."""
    limit = "without limit" if facts.memlock < 0 else _plain(facts.memlock)
    if 0 <= facts.memlock < facts.host_tier:
        wanted = _plain(facts.host_tier)
        text = f"{limit}, the host tier is {wanted}"
        cure = (
            f"raise it to {wanted} or more (ulimit -l unlimited, LimitMEMLOCK=infinity, docker run "
            "--ulimit memlock=-1), or start with --host-unpinned, which copies more slowly"
        )
        if not _gpus_wanted(facts) and not facts.gpus:
            return Line("locked memory", "note", f"{text}; without a GPU nothing is locked", cure)
        return Line("locked memory", "problem", text, cure)
    return Line("locked memory", "ok", limit)


def _shm(facts: Facts) -> Line:
    if facts.shm_free is None or facts.shm_total is None:
        return Line(
            "/dev/shm",
            "problem",
            "is not there",
            "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`",
        )
    text = f"{_plain(facts.shm_free)} free of {_plain(facts.shm_total)}"
    if facts.shm_free < POOL_SHM_BYTES:
        return Line(
            "/dev/shm",
            "problem",
            f"{text}: SGLang and tensor-parallel ranks need some themselves",
            "docker run --shm-size 16g (or --ipc host); else `mount -o remount,size=16G /dev/shm`",
        )
    if facts.shm_free < facts.host_tier:
        return Line(
            "/dev/shm",
            "note",
            f"{text}, less than the host tier ({_plain(facts.host_tier)}): unless the runtime "
            "folder is in memory and large, the tier ends with the daemon",
            "enlarge it (docker run --shm-size), or name a folder in memory with --host-dir",
        )
    return Line("/dev/shm", "ok", text)


def _gpu(facts: Facts) -> Iterator[Line]:
    wanted = _gpus_wanted(facts)
    if not facts.gpus:
        text = facts.tool_problem or "none is there"
        if wanted:
            yield Line(
                "GPU",
                "problem",
                f"{', '.join(wanted)} is wanted, and none is found: {text}",
                "install the NVIDIA driver, or pass the GPU into the container (docker run --gpus)",
            )
        else:
            yield Line("GPU", "note", f"none: {text}", "not needed for --device cpu")
        return
    for gpu in facts.gpus:
        yield from _one_gpu(gpu)
    present = [f"cuda:{gpu.uuid}" for gpu in facts.gpus]
    if not wanted and not facts.settings_problem:
        yield Line(
            "device",
            "problem",
            "this machine has GPUs, and the daemon is to drive the cpu: engines on a GPU would "
            "share nothing",
            f"start it with --device {','.join(present)} (those that engines use)",
        )
    for device in wanted:
        if device not in present:
            cure = f"choose one of {', '.join(present)}"
            yield Line("device", "problem", f"there is no {device}", cure)
    yield from _peers(facts)
    if re.search(r"expandable_segments:\s*true", facts.allocator_settings, re.IGNORECASE):
        yield Line(
            "allocator",
            "problem",
            "expandable_segments are on here: such memory cannot be exported to the daemon",
            "start engines without it: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
        )
    else:
        yield Line("allocator", "ok", facts.allocator_settings or "PyTorch's own settings")
    if facts.visible_devices is not None:
        yield Line(
            "visible devices",
            "note",
            f"CUDA_VISIBLE_DEVICES is {facts.visible_devices!r} here",
            "ordinals mean something else under another value: name GPUs by UUID",
        )


def _one_gpu(gpu: Gpu) -> Iterator[Line]:
    topic = f"GPU {gpu.index}"
    if _numbers(gpu.driver)[:2] < DRIVER_MIN:
        yield Line(
            topic,
            "problem",
            f"{gpu.name}: driver {gpu.driver} is older than CUDA 12",
            "install driver 525.60 or newer",
        )
        return
    if gpu.compute_mode.lower() not in ("default", "0", "[n/a]", "n/a"):
        yield Line(
            topic,
            "problem",
            f"{gpu.name}: compute mode {gpu.compute_mode}: engines and the mover cannot share it",
            f"`nvidia-smi -i {gpu.index} -c DEFAULT` (as root)",
        )
        return
    if gpu.mig.lower() == "enabled":
        yield Line(
            topic,
            "note",
            f"{gpu.name}: MIG is on; memory of one slice is not read by another",
            "give all engines of one daemon the same slice, or switch MIG off",
        )
        return
    yield Line(
        topic, "ok", f"{gpu.name}, {_plain(gpu.memory_bytes)}, driver {gpu.driver}, cuda:{gpu.uuid}"
    )


def _peers(facts: Facts) -> Iterator[Line]:
    if len(facts.gpus) < 2:
        return
    if not facts.peer_access:
        yield Line("peer access", "note", "not known", "see `nvidia-smi topo -p2p r`")
        return
    cells = [
        cell
        for line in facts.peer_access.splitlines()
        if re.match(r"\s*GPU\d+\s", line)
        for cell in line.split()[1:]
    ]
    bad = sorted({cell for cell in cells if cell not in ("X", "OK") and not cell.startswith("GPU")})
    if bad:
        yield Line(
            "peer access",
            "note",
            f"not between all GPUs ({', '.join(bad)})",
            "pages go by the host tier there; check the IOMMU (ACS) and the topology",
        )
    else:
        yield Line("peer access", "ok", "between all GPUs")


def _software(facts: Facts) -> Iterator[Line]:
    packages = facts.packages
    known = ", ".join(f"{name} {text}" for name, text in packages.items() if text)
    yield Line("software", "ok", f"Python {facts.python}, {known}")
    sglang = packages.get("sglang", "")
    if sglang:
        numbers = _numbers(sglang)[:3]
        if SGLANG_MIN <= numbers <= SGLANG_MAX:
            yield Line("SGLang", "ok", sglang)
        else:
            yield Line(
                "SGLang",
                "problem",
                f"{sglang} is not one that the plugin was tested with",
                "use SGLang 0.5.13 to 0.5.23",
            )
    else:
        yield Line(
            "SGLang", "note", "not in this environment", "run `doctor` in that of the engines, too"
        )
    if _gpus_wanted(facts) and not any(packages.get(name) for name in BINDINGS):
        yield Line(
            "cuda-python",
            "problem",
            "is missing, and so are cuda-bindings: the mover needs either",
            "pip install 'treecored[cuda]'",
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
