"""The import rules of the project as one table, and the function that applies it.

Owns the table. It repeats the contracts of pyproject.toml where those cannot be exact (standard
library modules, file-name patterns, imports inside functions) and adds nothing that contradicts
them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.tidy.source import Import, within

CORE_DATA = tuple(
    f"directory.core.{name}" for name in ("ids", "actions", "events", "errors", "limits")
)
# A pure state machine sees no clock, no chance, no file, no process and no network.
IMPURE = (
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "logging", "mmap", "os", "pathlib",
    "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "subprocess", "tempfile", "threading", "time", "uuid",
    "cuda", "cupy", "numpy", "structlog", "torch", "zmq",
)  # fmt: skip
SERIALISERS = ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve")


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that match `applies` and not `exempt` import nothing of `forbidden`.

    `allowed` names what is permitted all the same, below something forbidden. Patterns are those
    of `fnmatch`; forbidden and allowed are module names and cover everything below them.
    """

    title: str
    applies: tuple[str, ...]
    forbidden: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether the rule speaks of this module."""
        return _matches(module, self.applies) and not _matches(module, self.exempt)

    def breaches(self, module: str, imports: Iterable[Import]) -> list[Import]:
        """The imports of the module that break the rule."""
        if not self.covers(module):
            return []
        return [found for found in imports if self._forbids(found.name)]

    def _forbids(self, name: str) -> bool:
        if any(within(name, module) for module in self.allowed):
            return False
        return any(within(name, module) for module in self.forbidden)


def _below(*packages: str) -> tuple[str, ...]:
    return tuple(pattern for name in packages for pattern in (name, f"{name}.*"))


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


PRODUCT = _below("directory", "transfer", "scheduler_shim")

RULES = (
    Rule(
        "directory.core is pure",
        applies=_below("directory.core"),
        forbidden=(*IMPURE, "directory", "transfer", "scheduler_shim"),
        allowed=("directory.core",),
    ),
    Rule(
        "directory.protocol knows directory.core only",
        applies=_below("directory.protocol"),
        forbidden=("directory", "transfer", "scheduler_shim", "zmq", "time", "random", "socket"),
        allowed=("directory.core", "directory.protocol"),
    ),
    Rule(
        "directory.kvevents is pure and knows directory.core only",
        applies=_below("directory.kvevents"),
        forbidden=(*IMPURE, "directory", "transfer", "scheduler_shim"),
        allowed=("directory.core", "directory.kvevents"),
    ),
    Rule(
        "transfer knows ids, actions, events, errors and limits of directory.core only",
        applies=_below("transfer"),
        forbidden=("directory", "scheduler_shim"),
        allowed=CORE_DATA,
    ),
    Rule(
        "scheduler_shim knows directory.protocol, directory.core and parts of transfer only",
        applies=_below("scheduler_shim"),
        forbidden=("directory", "transfer"),
        allowed=(
            "directory.protocol",
            "directory.core",
            "transfer.layout",
            "transfer.ipc",
            "transfer.fence",
        ),
    ),
    Rule(
        "the control process imports neither torch nor cuda",
        applies=_below("directory"),
        forbidden=("cuda", "cupy", "numpy", "torch"),
    ),
    Rule(
        "cuda only below transfer/device/cuda* and transfer/ipc",
        applies=PRODUCT,
        forbidden=("cuda", "cupy"),
        exempt=("transfer.device.cuda*", *_below("transfer.ipc")),
    ),
    Rule(
        "sglang only in scheduler_shim/sglang",
        applies=PRODUCT,
        forbidden=("sglang",),
        exempt=_below("scheduler_shim.sglang"),
    ),
    Rule(
        "numpy is not a dependency of the product",
        applies=PRODUCT,
        forbidden=("numpy",),
        exempt=_below("scheduler_shim.sglang"),
    ),
    Rule(
        "processes are started with subprocess, never with multiprocessing",
        applies=PRODUCT,
        forbidden=("multiprocessing",),
    ),
    Rule(
        "nothing is read with a format that can run code",
        applies=(*PRODUCT, *_below("tests", "benchmarks")),
        forbidden=SERIALISERS,
    ),
)
