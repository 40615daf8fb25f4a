"""The CUDA driver as this project sees it: one GPU's primary context, checked calls, UUIDs.

Owns the only import of the CUDA bindings and the mapping from their results to typed errors. GPUs
are named by UUID, never by an ordinal: an ordinal means something only under one process's
CUDA_VISIBLE_DEVICES. It must never be imported by the daemon's control process.
"""

import ctypes
import importlib
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from directory.core.errors import ImportFailed, TransferError
from transfer.device.protocol import DeviceLost

HANDLE_BYTES = 64
"""Size of the driver's IPC handles, of memory and of events alike (CU_IPC_HANDLE_SIZE)."""
UUID_BYTES = 16
SUCCESS = 0
NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""
POINTER_SINCE = 12_000
"""CUDA version whose form of cuPointerGetAttribute is asked for."""

_PointerGetAttribute = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
)


class CudaError(TransferError):
    """A driver call failed; `status` is the driver's name of the error."""

    def __init__(self, function: str, status: str, description: str) -> None:
        super().__init__(f"{function}: {status} ({description})")
        self.status = status


STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "CONTAINED", "CONTEXT_IS_DESTROYED", "DEINITIALIZED", "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS", "NVLINK_UNCORRECTABLE", "TENSOR_MEMORY_LEAK",
    )
)  # fmt: skip
"""Statuses after which every call of the context fails: the driver's documentation says of each
that the process must be ended and started anew."""


def failure(function: str, status: str, description: str) -> CudaError | DeviceLost:
    """The error of a call that did not succeed: `DeviceLost` if no call ever will again."""
    error = CudaError(function, status, description)
    return DeviceLost(f"the CUDA context is broken: {error}") if status in STICKY else error


class DriverCalls(Protocol):
    """What users of a driver need of it, so that tests can stand in for the hardware."""

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a driver function; returns its results without the status."""
        ...


class Driver:
    """The primary context of one GPU in this process; shared with torch where that is loaded."""

    def __init__(self, api: ModuleType, device: Any, uuid: str) -> None:
        """Retain the primary context of a device and make it current in this thread."""
        self.api = api
        self.uuid = uuid
        self.device = device
        self.visible = visible_devices(api)
        self.context = self.call("cuDevicePrimaryCtxRetain", device)
        self.make_current()

    @classmethod
    def open(cls, uuid: str) -> "Driver":
        """The GPU of a UUID. Raises `ImportFailed`, naming the GPUs that this process sees."""
        api = load_api()
        seen = visible_devices(api)
        if uuid not in seen:
            raise ImportFailed(
                f"GPU {uuid} is not visible to this process, which sees "
                f"{', '.join(seen) or 'no GPU'}; add it to CUDA_VISIBLE_DEVICES, or unset that"
            )
        return cls(api, checked(api, "cuDeviceGet", seen[uuid]), uuid)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a driver function; returns its results without the status (a tuple if several)."""
        return checked(self.api, function, *arguments)

    def ready(self, event: Any) -> bool:
        """Whether an event has been reached. Raises `CudaError` when the context is broken.

        Asked for every slice in flight in every turn of a mover's loop, so the usual answer, "not
        yet", makes no error and no text.
        """
        (status,) = self.api.cuEventQuery(event)
        number = int(status)
        if number not in (SUCCESS, NOT_READY):
            raise failure("cuEventQuery", status.name, describe(self.api, status))
        return number == SUCCESS

    def make_current(self) -> None:
        """Make the context this thread's current one."""
        self.call("cuCtxSetCurrent", self.context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current for a while; a client's own choice is restored."""
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def device_of(self, address: int) -> str:
        """UUID of the GPU that an address belongs to."""
        # Asked through its address: the bindings (13.3.1) answer 0 for memory of any GPU.
        found = self.call("cuGetProcAddress", b"cuPointerGetAttribute", POINTER_SINCE, 0)
        ask = _PointerGetAttribute(int(found[0] if isinstance(found, tuple) else found))
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        ordinal = ctypes.c_int(-1)
        status = self.api.CUresult(ask(ctypes.addressof(ordinal), int(attribute), address))
        if int(status) != SUCCESS:
            raise CudaError("cuPointerGetAttribute", status.name, describe(self.api, status))
        return next((u for u, n in self.visible.items() if n == ordinal.value), "a hidden GPU")

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that an address lies in."""
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def devices(self) -> dict[str, Any]:
        """The driver's device of every GPU that this process sees, by UUID."""
        return {uuid: self.call("cuDeviceGet", n) for uuid, n in self.visible.items()}

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU, as the driver counts them."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Give the primary context back."""
        self.call("cuDevicePrimaryCtxRelease", self.device)

    def __repr__(self) -> str:
        return f"<Driver {self.uuid}>"


def load_api() -> ModuleType:
    """The bindings, initialised. Raises `ImportFailed` with the cure where there is no driver."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ImportFailed(
            f"the CUDA bindings are not installed ({error}); install treecored[cuda]"
        ) from error
    try:
        checked(api, "cuInit", 0)
    except (CudaError, RuntimeError) as error:
        # Where libcuda is missing altogether, the bindings raise a bare RuntimeError.
        raise ImportFailed(f"there is no usable CUDA driver here: {error}") from error
    return api


def visible_devices(api: ModuleType) -> dict[str, int]:
    """Ordinal of every GPU that this process sees, by UUID."""
    seen: dict[str, int] = {}
    for ordinal in range(int(checked(api, "cuDeviceGetCount"))):
        device = checked(api, "cuDeviceGet", ordinal)
        seen[format_uuid(raw_bytes(checked(api, "cuDeviceGetUuid", device), UUID_BYTES))] = ordinal
    return seen


def checked(api: ModuleType, function: str, *arguments: Any) -> Any:
    """Call a function of the bindings; raises `CudaError`, or `DeviceLost`, unless it succeeds."""
    status, *results = getattr(api, function)(*arguments)
    if int(status) != SUCCESS:
        raise failure(function, status.name, describe(api, status))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def describe(api: ModuleType, status: Any) -> str:
    """The driver's sentence about a status."""
    failed, text = api.cuGetErrorString(status)
    if int(failed) != SUCCESS or not text:
        return "no description"
    return str(text.decode(errors="replace"))


def raw_bytes(struct: Any, nbytes: int) -> bytes:
    """The bytes of one of the bindings' plain structs."""
    return ctypes.string_at(int(struct.getPtr()), nbytes)


def fill_struct(struct: Any, content: bytes) -> Any:
    """Put bytes into one of the bindings' plain structs; returns it."""
    ctypes.memmove(int(struct.getPtr()), content, len(content))
    return struct


def format_uuid(raw: bytes) -> str:
    """A GPU's UUID in the form that nvidia-smi and CUDA_VISIBLE_DEVICES use."""
    return f"GPU-{uuids.UUID(bytes=raw)}"
