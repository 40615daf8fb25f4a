"""Where engines run: on a CPU in one of the project's environments, or on a GPU machine's site.

Owns the interpreter, the variables and the arguments that go with each, and nothing of what is
asked of an engine. `--device cpu` is the dry run of everything that `--device cuda` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.engines import ARGUMENTS, MODELS, Engine, Nursery, spawned_by

VERSION = "0.5.16"
"""The release that is packed for GPU machines (pack.py), and of which dry runs are made."""
ROOT = Path(__file__).resolve().parents[2]

ON_CUDA: Mapping[str, object] = {
    "device": "cuda",
    "attention_backend": "triton",
    "dtype": "bfloat16",
    "disable_overlap_schedule": False,
    "mem_fraction_static": 0.9,
    "sleep_on_idle": True,
}


@dataclass
class Place:
    """A machine as the runs see it. `gpus`: the UUIDs of its GPUs; none: a CPU.

    `port`: below it are ports of others; engines get those above it, below the ephemeral ones.
    `first`: which of the GPUs is number 0 here, so that groups that run together spread out.
    """

    folder: Path
    gpus: tuple[str, ...] = ()
    port: int = 21_000
    first: int = 0
    _nursery: Nursery | None = field(default=None, init=False)

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return bool(self.gpus)

    @property
    def daemon_flags(self) -> list[str]:
        """What `treecored serve` is told of the machine."""
        return ["--device", f"cuda:{self.gpus[self.ordinal(0)]}"] if self.gpus else []

    def ordinal(self, gpu: int) -> int:
        """The machine's number of a GPU of this place."""
        return (self.first + gpu) % len(self.gpus)

    def engine(
        self, name: str, environ: Mapping[str, str], given: Mapping[str, Any], gpu: int = 0
    ) -> Engine:
        """Start an engine; `wait_up` it. `given`: SGLang's arguments, over those of the place."""
        arguments: dict[str, Any] = {**ARGUMENTS, **(ON_CUDA if self.cuda else {}), **given}
        # SGLang's own choice is a port that was free a moment ago; many engines start at a time.
        self.port += 1
        arguments.setdefault("nccl_port", self.port)
        if not self.cuda:
            if self._nursery is None:
                self._nursery = Nursery(VERSION, self.folder)
            return self._nursery.engine(name, self.folder, environ=dict(environ), **arguments)
        arguments["environ"] = dict(environ)
        variables = cuda_environ(self.ordinal(gpu))
        return spawned_by((sys.executable,), variables, VERSION, name, self.folder, arguments)

    def gpu_bytes_used(self, gpu: int = 0) -> int:
        """Memory of a GPU that is taken, by whomever; 0 without one."""
        if not self.cuda:
            return 0
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(self.gpus[self.ordinal(gpu)])
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    def gpu_bytes_of(self, pid: int) -> int:
        """Memory of all GPUs that a process has; 0 where nobody can say."""
        if not self.cuda:
            return 0
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        used = 0
        for uuid in self.gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == pid:
                    used += int(process.usedGpuMemory or 0)
        return used

    def close(self) -> None:
        """End what was started for all engines."""
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


def cuda_environ(gpu: int) -> dict[str, str]:
    """The variables of an engine on a GPU machine: those of the runs, less treecored's own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TREECORED_")}
    return kept | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def other_models() -> list[str]:
    """SGLang's model files that nothing here needs; importing them takes it 10 s."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        models = Path(folder) / "sglang" / "srt" / "models"
        if models.is_dir():
            return sorted(path.stem for path in models.glob("*.py") if path.stem not in MODELS)
    return []


def gpus() -> tuple[str, ...]:
    """UUIDs of this machine's GPUs, as nvidia-smi has them."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return tuple(line.strip() for line in said.splitlines() if line.strip())
