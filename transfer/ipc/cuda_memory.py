"""GPU memory of other processes: imported, checked, mapped once, and closed.

Owns the imported mappings of this process: one a physical allocation, reference counted, however
many pools and buffers lie in it. Two kinds of handle are understood: legacy CUDA IPC handles of
any cudaMalloc memory, and virtual-memory allocations as file descriptors. Everything a client
says is checked before the driver sees it where that is possible, and against the real allocation
before it is used where it is not. Which GPU the memory lies on cannot be asked (the driver
names the importer's own for every imported address); it maps the right memory all the same, so a
wrong UUID only misleads whoever chooses a mover by it. Exports are in cuda_export.py.
"""

import logging
import os
import stat
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from directory.core.errors import ImportFailed, TransferError
from transfer.ipc.cuda_driver import HANDLE_BYTES, CudaError, Driver, fill_struct
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, Mapping, MemoryHandle
from transfer.topology import Link, Topology, unreachable

VMM_GRANULARITY_MIN = 64 * 1024
LAZY_ENABLE_PEER_ACCESS = 1
NO_HANDLE = bytes(HANDLE_BYTES)

log = logging.getLogger("treecored.cuda")

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class CudaOpaque(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The `opaque` part of a GPU memory handle.

    `offset`: where the usable part begins in the allocation of `allocation_bytes`. `handle`: the
    driver's 64 bytes (legacy); empty where a descriptor travels beside (virtual memory).
    """

    offset: Natural
    allocation_bytes: Positive
    handle: Annotated[bytes, msgspec.Meta(max_length=HANDLE_BYTES)] = b""


_opaque_decoder = msgspec.msgpack.Decoder(CudaOpaque)
_opaque_encoder = msgspec.msgpack.Encoder()


def pack_opaque(opaque: CudaOpaque) -> bytes:
    """The opaque bytes of a handle."""
    return _opaque_encoder.encode(opaque)


def read_opaque(handle: MemoryHandle) -> CudaOpaque:
    """Decode and check what can be checked without a driver; raises `ImportFailed`."""
    try:
        opaque = _opaque_decoder.decode(handle.opaque)
    except msgspec.DecodeError as error:
        raise ImportFailed(f"the {handle.kind} handle cannot be decoded: {error}") from None
    wanted = HANDLE_BYTES if handle.kind == CUDA_IPC else 0
    if len(opaque.handle) != wanted or opaque.handle == NO_HANDLE:
        raise ImportFailed(
            f"the {handle.kind} handle carries {len(opaque.handle)} bytes of the driver's, "
            f"{wanted} that are not all zero belong there"
        )
    if opaque.offset + handle.nbytes > opaque.allocation_bytes:
        raise ImportFailed(
            f"{handle.nbytes} bytes at offset {opaque.offset} are not within an allocation of "
            f"{opaque.allocation_bytes}"
        )
    if handle.kind == CUDA_VMM and opaque.allocation_bytes % VMM_GRANULARITY_MIN:
        raise ImportFailed(
            f"a virtual-memory allocation of {opaque.allocation_bytes} bytes does not exist; "
            f"they are multiples of {VMM_GRANULARITY_MIN}"
        )
    return opaque


class Physical:
    """One imported allocation. `references` is changed by `CudaMemoryIPC` alone."""

    def __init__(self, identity: bytes, address: int, nbytes: int, unmap: Callable[[], None]):
        self.identity = identity  # empty: nothing else can be recognised as the same allocation
        self.address = address
        self.nbytes = nbytes
        self.unmap = unmap
        self.references = 1


class CudaMapping:
    """A part of an imported allocation, as one import asked for it."""

    def __init__(self, physical: Physical, offset: int, nbytes: int, device: str) -> None:
        self.physical = physical
        self.device = device
        self._offset = offset
        self._nbytes = nbytes
        self.closed = False

    @property
    def nbytes(self) -> int:
        """Usable size."""
        return 0 if self.closed else self._nbytes

    @property
    def address(self) -> int:
        """Device address of the first usable byte."""
        return self.physical.address + self._offset

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes of {self.device}"
        return f"<CudaMapping {state}>"


class CudaMemoryIPC:
    """Imports into one GPU's context, also from GPUs that it reaches as peers."""

    def __init__(self, driver: Driver, topology: Topology | None = None) -> None:
        """`topology`: memory of a GPU that is no peer is refused before the driver is asked."""
        self._driver = driver
        self._topology = topology
        self._open: dict[bytes, Physical] = {}
        self._anonymous: set[Physical] = set()

    @property
    def open_count(self) -> int:
        """Physical allocations that are mapped."""
        return len(self._open) + len(self._anonymous)

    def export(self, mapping: Mapping) -> tuple[MemoryHandle, tuple[int, ...]]:
        """Refused: what was imported is its exporter's to hand on."""
        raise TransferError(f"{mapping!r} was imported; only its owner can export it")

    def import_memory(self, handle: MemoryHandle, fds: tuple[int, ...]) -> CudaMapping:
        """Map an allocation after the checks above. Raises `ImportFailed`; nothing stays then."""
        wanted = {CUDA_IPC: 0, CUDA_VMM: 1}.get(handle.kind)
        if wanted is None or len(fds) != wanted:
            raise ImportFailed(
                f"a {handle.kind} handle with {len(fds)} descriptors is not GPU memory; register "
                "the pool with the backend that exported it"
            )
        if handle.device not in self._driver.visible:
            raise ImportFailed(
                f"GPU {handle.device} is not visible to this mover, which sees "
                f"{', '.join(self._driver.visible)}; start the daemon with a CUDA_VISIBLE_DEVICES "
                "that has it, or with none"
            )
        own, topology = self._driver.uuid, self._topology
        if topology is not None and topology.link(own, handle.device) is Link.NONE:
            raise ImportFailed(unreachable(own, handle.device, topology.reachable(own)))
        opaque = read_opaque(handle)
        known = self._open.get(opaque.handle) if opaque.handle else None
        if known is not None:
            known.references += 1
        try:
            with self._driver.current():
                physical = known or self._map(handle, opaque, fds)
                try:
                    self._check(handle, opaque, physical)
                except ImportFailed:
                    self._give_back(physical)
                    raise
        except CudaError as error:
            raise ImportFailed(
                f"the driver refuses the {handle.kind} handle of {handle.device}: {error}; its "
                "owner must be alive, hold the memory, and share this machine and its GPUs"
            ) from error
        return CudaMapping(physical, opaque.offset, handle.nbytes, handle.device)

    def close(self, mapping: Mapping) -> None:
        """Give one import back; the last of an allocation unmaps it.

        Raises `TransferError`, after logging it, when the driver cannot: the address space and
        the owner's memory stay taken then until this process ends.
        """
        if not isinstance(mapping, CudaMapping) or mapping.closed:
            raise TransferError("the mapping is closed, or another backend's")
        mapping.closed = True
        with self._driver.current():
            self._give_back(mapping.physical)

    def _give_back(self, physical: Physical) -> None:
        physical.references -= 1
        if physical.references:
            return
        if physical.identity:
            del self._open[physical.identity]
        else:
            self._anonymous.discard(physical)
        try:
            physical.unmap()
        except CudaError as error:
            log.error("%d bytes of GPU memory stay mapped: %s", physical.nbytes, error)
            raise

    def _map(self, handle: MemoryHandle, opaque: CudaOpaque, fds: tuple[int, ...]) -> Physical:
        if handle.kind == CUDA_VMM:
            physical = self._map_descriptor(opaque.allocation_bytes, fds[0])
            self._anonymous.add(physical)
            return physical
        driver = self._driver
        struct = fill_struct(driver.api.CUipcMemHandle(), opaque.handle)
        address = int(driver.call("cuIpcOpenMemHandle", struct, LAZY_ENABLE_PEER_ACCESS))

        def unmap() -> None:
            driver.call("cuIpcCloseMemHandle", address)

        try:
            base, nbytes = driver.address_range(address)
            if base != address:
                raise ImportFailed("the handle does not open at the base of its allocation")
        except (CudaError, ImportFailed):
            unmap()
            raise
        physical = Physical(opaque.handle, address, nbytes, unmap)
        self._open[opaque.handle] = physical
        return physical

    def _map_descriptor(self, nbytes: int, fd: int) -> Physical:
        """Map a whole virtual-memory allocation; a size that is not its own fails in cuMemMap."""
        check_descriptor(fd)
        driver, api = self._driver, self._driver.api
        kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        undo: list[Callable[[], object]] = []

        def unmap() -> None:
            while undo:
                undo.pop()()

        try:
            memory = driver.call("cuMemImportFromShareableHandle", fd, kind)
            undo.append(lambda: driver.call("cuMemRelease", memory))
            address = int(driver.call("cuMemAddressReserve", nbytes, 0, 0, 0))
            undo.append(lambda: driver.call("cuMemAddressFree", address, nbytes))
            driver.call("cuMemMap", address, nbytes, 0, memory, 0)
            undo.append(lambda: driver.call("cuMemUnmap", address, nbytes))
            driver.call("cuMemSetAccess", address, nbytes, [access_of(driver)], 1)
        except CudaError:
            unmap()
            raise
        return Physical(b"", address, nbytes, unmap)

    def _check(self, handle: MemoryHandle, opaque: CudaOpaque, physical: Physical) -> None:
        if opaque.offset + handle.nbytes > physical.nbytes:
            raise ImportFailed(
                f"{handle.nbytes} bytes at offset {opaque.offset} were announced, the real "
                f"allocation has {physical.nbytes}"
            )

    def __repr__(self) -> str:
        return f"<CudaMemoryIPC {self._driver.uuid}, {self.open_count} allocations>"


def check_descriptor(fd: int) -> None:
    """Refuse what is certainly no GPU memory: files, sockets and pipes. `ImportFailed`."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError as error:
        raise ImportFailed(f"the descriptor cannot be looked at: {error}") from error
    if stat.S_ISREG(mode) or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode):
        raise ImportFailed("the descriptor is a file, a socket or a pipe, not GPU memory")


def access_of(driver: Driver) -> Any:
    """Read and write access for the driver's own GPU."""
    access = driver.api.CUmemAccessDesc()
    access.location.type = driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(driver.device)
    access.flags = driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
