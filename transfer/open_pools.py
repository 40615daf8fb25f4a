"""The pools that an engine has open: what a copy reads of them, and how one comes and goes.

Owns the table of imported pools and which of them are to go. It decides nothing about copies: the
engine says when none touches a pool any more. A pool that could not be attached is not taken.
"""

from __future__ import annotations

from directory.core.errors import TransferError
from directory.core.ids import PoolId
from transfer.device.protocol import Device
from transfer.imports import ImportedPool
from transfer.layout import PoolLayout


class OpenPools(dict[PoolId, ImportedPool]):
    """Pools by number. `layouts`: theirs; `leaving`: to be closed once no copy involves them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.layouts: dict[PoolId, PoolLayout] = {}
        self.leaving: set[PoolId] = set()
        self._device = device

    def take(self, pool: ImportedPool, stage_bytes: int) -> None:
        """Use a pool from now on; raises `TransferError`: still the caller's.

        `stage_bytes`: of a slice through its slab.
        """
        if pool.pool in self:
            raise TransferError(f"pool {pool.pool} is imported already")
        attached = []
        try:
            for key, mapping in pool.memories():
                self._device.attach(key, mapping)
                attached.append(key)
        except TransferError:
            for key in attached:
                self._device.detach(key)
            raise
        if pool.slab is not None:
            pool.slab.divide(stage_bytes)
        self[pool.pool] = pool
        self.layouts[pool.pool] = pool.layout

    def leave(self, pool: PoolId) -> str:
        """Close a pool that is to go; returns what could not be closed (empty: all was)."""
        self.leaving.remove(pool)
        imported = self.pop(pool)
        del self.layouts[pool]
        try:
            for key, _ in imported.memories():
                self._device.detach(key)
            return imported.close()
        except TransferError as error:
            return str(error)

    def alive(self, pool: PoolId) -> bool:
        """Whether a pool is here to stay."""
        return pool in self and pool not in self.leaving

    def timeline(self, pool: PoolId, index: int) -> int:
        """What a pool's timeline has passed."""
        return self[pool].timelines.read(index)

    def word(self, pool: PoolId, slot: int) -> int:
        """A pool's span word."""
        return self[pool].words.read(slot)

    def __repr__(self) -> str:
        return f"<OpenPools {sorted(self)}, leaving {sorted(self.leaving)}>"
