"""SGLang's KV tensors on the CPU, moved into memory that the mover can map.

Owns the mapping. The tensors stay the objects that they are, with shape, strides and contents;
only their storage becomes another, so whoever holds one of them sees the shared memory from then
on. It must never leave somebody behind with the old memory: then both sides would go on with
different bytes, so such a pool is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from directory.core.errors import TransferError
from scheduler_shim.sglang.buffers import KvTensor
from scheduler_shim.staging import SharedSlab
from transfer.ipc.memory import MappingBusy, MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.layout import PoolLayout

ALIGNMENT: Final = 4096
"""Of each old storage in the new memory; at least what torch's own allocations have."""


class SharedTensors:
    """A pool's tensors in one memfd. Made before anything uses them from another thread."""

    def __init__(self, kvcache: Any, tensors: Sequence[KvTensor]) -> None:
        """Move them. Raises `TransferError` when something else holds on to the old memory."""
        self._ipc = SharedMemoryIPC()
        owners = _by_storage(part.tensor for part in tensors)
        starts: dict[int, int] = {}
        end = 0
        for address, members in owners.items():
            starts[address] = end
            end += -(-members[0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        self._mapping: SharedMapping = self._ipc.create("treecored-kv", end)
        # A slice of the view: torch keeps the object alive, and while it lives nothing is unmapped.
        shared = torch.frombuffer(self._mapping.view[:], dtype=torch.uint8).untyped_storage()
        moved: list[tuple[int, int, int]] = []
        weak: list[int] = []
        for address, members in owners.items():
            storage = members[0].untyped_storage()
            moved.append((address, address + storage.nbytes(), starts[address]))
            weak.append(storage._weak_ref())
            _copy(storage, shared, starts[address])
            for tensor in members:
                _set(tensor, shared, starts[address])
            del storage
        members = []
        owners.clear()
        _move_pointers(kvcache, moved, self._mapping.address)
        if not all(torch.UntypedStorage._expired(reference) for reference in weak):
            raise TransferError(
                "something in SGLang holds a view of the KV pool's tensors; such a pool cannot be "
                "moved into shared memory"
            )

    @property
    def fds(self) -> list[int]:
        """Descriptors of the allocations: one."""
        return [self._mapping.fd]

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """The handles of the allocations: one."""
        return (self._ipc.export(self._mapping)[0],)

    @property
    def allocation_bytes(self) -> tuple[int, ...]:
        """Sizes of the allocations: one."""
        return (self._mapping.nbytes,)

    def where(self, part: KvTensor) -> tuple[int, int]:
        """Allocation and byte offset of a tensor's first element."""
        return 0, part.tensor.data_ptr() - self._mapping.address

    def make_slab(self, layout: PoolLayout, nbytes: int) -> SharedSlab:
        """A staging slab beside them."""
        return SharedSlab(self._ipc, layout, [self._mapping], nbytes)

    def close(self) -> None:
        """Give the memory back if nothing uses it any more; else it goes with the process."""
        if not self._mapping.closed:
            try:
                self._ipc.close(self._mapping)
            except MappingBusy:
                pass  # the engine's tensors live in it

    def __repr__(self) -> str:
        return f"<SharedTensors {self._mapping!r}>"


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Tensors by the address of their storage, with those that they are views of."""
    owners: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        for member in (tensor._base, tensor):
            if member is None:
                continue
            members = owners.setdefault(member.untyped_storage().data_ptr(), [])
            if not any(known is member for known in members):
                members.append(member)
    return owners


def _copy(old: torch.UntypedStorage, shared: torch.UntypedStorage, start: int) -> None:
    source = torch.empty(0, dtype=torch.uint8).set_(old)
    torch.empty(0, dtype=torch.uint8).set_(shared, start, (old.nbytes(),), (1,)).copy_(source)


def _set(tensor: torch.Tensor, shared: torch.UntypedStorage, start: int) -> None:
    first = tensor.storage_offset() + start // tensor.element_size()
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.set_(shared, first, tensor.size(), tensor.stride())


def _move_pointers(kvcache: Any, moved: Sequence[tuple[int, int, int]], base: int) -> None:
    """Put the new addresses into the pool's tables of raw pointers."""
    for name, table in vars(kvcache).items():
        if not isinstance(table, torch.Tensor) or table.dtype != torch.uint64:
            continue
        pointers = table.tolist()
        for at, pointer in enumerate(pointers):
            for first, last, start in moved:
                if first <= pointer < last:
                    pointers[at] = base + start + pointer - first
        fresh = torch.tensor(pointers, dtype=torch.uint64, device=table.device)
        if table.is_inference():
            setattr(kvcache, name, fresh)
        else:
            table.copy_(fresh)
