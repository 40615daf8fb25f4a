"""Memory that two processes share: how it is exported, imported and closed.

Owns mappings and their reference counts: one mapping a physical allocation, however often it is
imported. `DeviceMemoryIPC` is the seam; `SharedMemoryIPC` is the backend for CPU pools, the host
tier and all small tables. It must never map memory whose owner could still shrink it, because a
touch beyond the new end would kill this process.
"""

import ctypes
import fcntl
import mmap
import os
import stat
from typing import Annotated, Protocol

import msgspec

from directory.core.errors import ImportFailed, TransferError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # 0x10: F_SEAL_FUTURE_WRITE, which fcntl lacks

MEMFD = "memfd"
CUDA_IPC = "cuda-ipc"
CUDA_VMM = "cuda-vmm"
DRIVER_KINDS = frozenset({CUDA_IPC})
"""Kinds whose handle is bytes of a driver's: no descriptor travels beside it."""


class MemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """What the exporter tells the importer of one allocation; a descriptor travels beside it.

    `nbytes`: the part that the importer may use. `device`: UUID of the GPU, or "cpu".
    `opaque`: what the backend of `kind` needs besides (a driver's handle, for example).
    """

    kind: Annotated[str, msgspec.Meta(max_length=32)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    device: Annotated[str, msgspec.Meta(max_length=64)] = "cpu"
    opaque: Annotated[bytes, msgspec.Meta(max_length=1024)] = b""


class MappingBusy(TransferError):
    """A mapping is still in use by a view of it; let go of the views and close it again."""


class Mapping(Protocol):
    """One physical allocation as this process sees it."""

    @property
    def nbytes(self) -> int:
        """Usable size."""
        ...

    @property
    def address(self) -> int:
        """Address in this process (of the host or of the device)."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the memory was unmapped here."""
        ...


class DeviceMemoryIPC(Protocol):
    """Contract of a memory backend.

    Nothing is copied. An import is checked against the real allocation before it is mapped, and
    refused with `ImportFailed`. Every import is paired with one `close`; the last one unmaps.
    """

    def export(self, mapping: Mapping) -> tuple[MemoryHandle, tuple[int, ...]]:
        """Describe an allocation; the descriptors stay the exporter's, to be sent along."""
        ...

    def import_memory(self, handle: MemoryHandle, fds: tuple[int, ...]) -> Mapping:
        """Map an allocation. The descriptors stay the caller's, who may close them afterwards."""
        ...

    def close(self, mapping: Mapping) -> None:
        """Give one import back. Raises `MappingBusy` when it is the last and still in use."""
        ...


class SharedMapping:
    """A mapped memfd. `references` is changed by `SharedMemoryIPC` alone."""

    def __init__(self, fd: int, nbytes: int, identity: tuple[int, int]) -> None:
        """Map the descriptor (a duplicate of it is kept); raises `OSError`."""
        self._mmap = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._mmap.close()
            raise
        self._view = memoryview(self._mmap)
        self.identity = identity
        self.references = 1

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 0 if self._mmap.closed else len(self._mmap)

    @property
    def view(self) -> memoryview:
        """Writable bytes. Slices of it keep the mapping open until they are released."""
        return self._view

    @property
    def fd(self) -> int:
        """The descriptor of the memory, valid until the mapping is closed."""
        return self._fd

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        anchor = ctypes.c_char.from_buffer(self._mmap)
        try:
            return ctypes.addressof(anchor)
        finally:
            del anchor

    @property
    def closed(self) -> bool:
        """Whether the memory was unmapped."""
        return self._mmap.closed

    def unmap(self) -> None:
        """Unmap and close the descriptor. Raises `MappingBusy` while slices of `view` live."""
        if self.closed:
            return
        try:
            self._view.release()
        except BufferError as error:
            raise MappingBusy(f"shared memory of {self.nbytes} bytes is in use") from error
        try:
            self._mmap.close()
        except BufferError as error:
            self._view = memoryview(self._mmap)
            raise MappingBusy(f"shared memory of {self.nbytes} bytes is in use") from error
        os.close(self._fd)
        self._fd = -1

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes, {self.references} references"
        return f"<SharedMapping {state}>"


class SharedMemoryIPC:
    """Shared memory in sealed memfds."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int], SharedMapping] = {}

    def create(self, name: str, nbytes: int) -> SharedMapping:
        """Make zeroed memory that nobody can shrink or grow; pages are touched only when used.

        `name` is for the eyes of an operator only. Raises `ImportFailed` when there is no room.
        """
        if nbytes <= 0:
            raise ImportFailed(f"shared memory {name!r} needs a positive size, not {nbytes}")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ImportFailed(f"shared memory {name!r} cannot be created: {error}") from error
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return self._map(fd, nbytes)
        except OSError as error:
            raise ImportFailed(
                f"shared memory {name!r} of {nbytes} bytes cannot be made: {error}"
            ) from error
        finally:
            os.close(fd)

    def export(self, mapping: Mapping) -> tuple[MemoryHandle, tuple[int, ...]]:
        """Describe a mapping that this object made or imported."""
        own = self._own(mapping)
        return MemoryHandle(MEMFD, own.nbytes), (own.fd,)

    def import_memory(self, handle: MemoryHandle, fds: tuple[int, ...]) -> SharedMapping:
        """Map a memfd after checking kind, seals and size."""
        if handle.kind != MEMFD or handle.device.partition(":")[0] != "cpu" or len(fds) != 1:
            raise ImportFailed(
                f"a {handle.kind} handle of device {handle.device!r} with {len(fds)} descriptors "
                "is not shared memory; register the pool with the backend that exported it"
            )
        return self.import_fd(fds[0], handle.nbytes)

    def import_fd(self, fd: int, nbytes_min: int, *, sealed: bool = True) -> SharedMapping:
        """Map a whole memfd of at least `nbytes_min` bytes; raises `ImportFailed`.

        `sealed` False is for memory of a process that is trusted never to shrink it: files cannot
        be sealed.
        """
        try:
            status = os.fstat(fd)
            seals = SEALS if not sealed else 0
            if sealed and stat.S_ISREG(status.st_mode):
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ImportFailed(f"the descriptor is not a memfd: {error}") from error
        if not seals & fcntl.F_SEAL_SHRINK or not seals & fcntl.F_SEAL_GROW:
            raise ImportFailed(
                "the memory can still be resized by its owner; seal the memfd with F_SEAL_SHRINK "
                "and F_SEAL_GROW before exporting it"
            )
        if seals & WRITE_SEALS:
            raise ImportFailed("the memory is sealed against writing; export it without that seal")
        if status.st_size < nbytes_min:
            raise ImportFailed(
                f"the memory has {status.st_size} bytes, {nbytes_min} were announced; "
                "announce the size of the real allocation"
            )
        known = self._mappings.get((status.st_dev, status.st_ino))
        if known is not None:
            known.references += 1
            return known
        try:
            return self._map(fd, status.st_size)
        except (OSError, ValueError) as error:
            raise ImportFailed(f"{status.st_size} bytes cannot be mapped: {error}") from error

    def close(self, mapping: Mapping) -> None:
        """Give one reference back; the last one unmaps."""
        own = self._own(mapping)
        if own.references > 1:
            own.references -= 1
            return
        own.unmap()
        own.references = 0
        del self._mappings[own.identity]

    @property
    def open_count(self) -> int:
        """Mappings that are open."""
        return len(self._mappings)

    def _own(self, mapping: Mapping) -> SharedMapping:
        if isinstance(mapping, SharedMapping):
            known = self._mappings.get(mapping.identity)
            if known is mapping:
                return mapping
        raise TransferError("the mapping is closed, or another backend's")

    def _map(self, fd: int, nbytes: int) -> SharedMapping:
        status = os.fstat(fd)
        mapping = SharedMapping(fd, nbytes, (status.st_dev, status.st_ino))
        self._mappings[mapping.identity] = mapping
        return mapping
