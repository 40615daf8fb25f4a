"""A CUDA driver that only remembers what it was asked, and fails where the test says so."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from transfer.ipc.cuda_driver import CudaError, Driver, failure

RESULTS = {"cuCtxGetStreamPriorityRange": (0, -5), "cuMemHostGetDevicePointer": 0x1000}


class FakeDriver(Driver):
    """Implements what the CUDA parts of transfer call; nothing is copied."""

    def __init__(self) -> None:
        self.uuid = "GPU-fake"
        self.visible = {self.uuid: 0}
        self.context = self.device = 0
        self.api: Any = SimpleNamespace()
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, list[str]] = {}
        self.reached = False
        self._made: Counter[str] = Counter()

    def fail(self, function: str, *statuses: str) -> None:
        """Let the next calls of a function end so; an empty status means success."""
        self.failures[function] = list(statuses)

    def call(self, function: str, *arguments: Any) -> Any:
        """Remember a call; new objects are numbers."""
        self.calls.append((function, *arguments))
        status = self.failures.get(function, [])[:1]
        del self.failures.get(function, [])[:1]
        if status and status[0]:
            raise failure(function, status[0], "as the test wants")
        if function == "cuGetProcAddress":
            raise CudaError(function, "CUDA_ERROR_NOT_FOUND", "a driver without the batch call")
        self._made[function] += 1
        return RESULTS.get(function, self._made[function])

    def ready(self, event: Any) -> bool:
        """Whether the test lets events be reached."""
        self.call("cuEventQuery", event)
        return self.reached

    def named(self, function: str) -> list[tuple[Any, ...]]:
        """Arguments of every call of a function."""
        return [call[1:] for call in self.calls if call[0] == function]
