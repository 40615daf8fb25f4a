"""The backends that one process has, behind one: memory by the kind of its handle.

Owns which backend a mapping came from, so that it goes back to the same one.
"""

from collections.abc import Mapping as MappingOf

from directory.core.errors import ImportFailed, TransferError
from transfer.ipc.memory import (
    DeviceMemoryIPC,
    Mapping,
    MemoryHandle,
    SharedMapping,
    SharedMemoryIPC,
)


class NamedMemory(SharedMemoryIPC):
    """Shared memory that was announced with one device's name, and no other: for trying out,
    without GPUs, a machine whose GPUs do not reach one another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def import_memory(self, handle: MemoryHandle, fds: tuple[int, ...]) -> SharedMapping:
        """Map it, or refuse it as a GPU's driver would."""
        if handle.device != self._device:
            raise ImportFailed(f"{self._device} does not reach memory of {handle.device}")
        return super().import_memory(handle, fds)


class MemoryByKind:
    """Implements `DeviceMemoryIPC` over several backends; `backends` by kind of handle."""

    def __init__(self, backends: MappingOf[str, DeviceMemoryIPC]) -> None:
        self._backends = dict(backends)
        # The mapping itself is kept, so that its id is not another's before it is closed.
        self._from: dict[int, list[tuple[Mapping, DeviceMemoryIPC]]] = {}

    def export(self, mapping: Mapping) -> tuple[MemoryHandle, tuple[int, ...]]:
        """Describe a mapping that was imported here, if its backend lets it go on."""
        return self._origin(mapping)[-1][1].export(mapping)

    def import_memory(self, handle: MemoryHandle, fds: tuple[int, ...]) -> Mapping:
        """Import with the backend of the handle's kind; raises `ImportFailed` without one."""
        backend = self._backends.get(handle.kind)
        if backend is None:
            known = ", ".join(sorted(self._backends))
            raise ImportFailed(
                f"this mover knows memory of the kinds {known}, not {handle.kind!r}; start the "
                "daemon with the device that the pool lies on"
            )
        mapping = backend.import_memory(handle, fds)
        self._from.setdefault(id(mapping), []).append((mapping, backend))
        return mapping

    def close(self, mapping: Mapping) -> None:
        """Give one import back to its backend."""
        origins = self._origin(mapping)
        origins[-1][1].close(mapping)
        origins.pop()
        if not origins:
            del self._from[id(mapping)]

    def _origin(self, mapping: Mapping) -> list[tuple[Mapping, DeviceMemoryIPC]]:
        origins = self._from.get(id(mapping))
        if not origins:
            raise TransferError("the mapping is closed, or another backend's")
        return origins
