"""How the GPUs of a machine reach one another: who with whom, over what, and what to do if not.

Owns the matrix and the words about it. Pure: the driver is asked through `DriverCalls`, once, at a
mover's start. It moves nothing; which source a copy takes is the directory's to decide.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from directory.core.errors import TransferError
from transfer.ipc.cuda_driver import DriverCalls

RANK_ATTRIBUTE = 1  # CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
ACCESS_ATTRIBUTE = 2  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
ATOMIC_ATTRIBUTE = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Link(enum.Enum):
    """What lies between two GPUs."""

    SAME = "same"  # one GPU
    NVLINK = "nvlink"  # peers that also do atomics on one another: no bus does those
    PCIE = "pcie"  # peers over the bus
    UNKNOWN = "unknown"  # the driver does not say: it may be tried
    NONE = "none"  # not peers: only through the host


class Reach(NamedTuple):
    """One pair. `rank`: the driver's own order of peers, 0 the fastest."""

    link: Link
    rank: int = 0


class Topology:
    """The matrix of any number of GPUs, by UUID."""

    def __init__(self, reaches: Mapping[tuple[str, str], Reach]) -> None:
        """`reaches`: by (who reads or writes, whose memory); a pair that is missing is NONE."""
        self._reaches = dict(reaches)
        self.gpus = sorted({gpu for pair in reaches for gpu in pair})

    @classmethod
    def probe(cls, driver: DriverCalls, devices: Mapping[str, object]) -> "Topology":
        """Ask the driver about every pair. `devices`: the driver's device of each UUID."""
        reaches = {}
        for one, device in devices.items():
            for other, peer in devices.items():
                reaches[one, other] = (
                    Reach(Link.SAME) if one == other else _ask(driver, device, peer)
                )
        return cls(reaches)

    def link(self, gpu: str, memory: str) -> Link:
        """What lies between a GPU and the memory of another (or its own)."""
        return self._reaches.get((gpu, memory), Reach(Link.NONE)).link

    def reachable(self, gpu: str) -> list[str]:
        """GPUs whose memory a mover on this one can import; its own first, then the fastest."""
        order = list(Link)
        found = [
            (order.index(reach.link), reach.rank, memory)
            for (one, memory), reach in self._reaches.items()
            if one == gpu and reach.link is not Link.NONE
        ]
        return [memory for _, _, memory in sorted(found)]

    def route(self, mover: str, source: str, target: str) -> tuple[str, ...]:
        """The memories that a copy between pools passes: two, or three with "host" between.

        A mover copies directly what it reaches on both sides; everything else goes through the
        host tier, as a backup by one mover and a load back by another.
        """
        if Link.NONE in (self.link(mover, source), self.link(mover, target)):
            return (source, "host", target)
        return (source, target)

    def mover_for(self, source: str, target: str) -> str | None:
        """The GPU whose mover copies directly, or None. The target's where both can: it is the
        one whose streams wait for the pages."""
        for gpu in dict.fromkeys((target, source, *self.gpus)):
            if "host" not in self.route(gpu, source, target):
                return gpu
        return None

    def describe(self) -> list[str]:
        """A line for each GPU, with what it reaches; for a log."""
        return [
            f"{gpu}: "
            + ", ".join(
                f"{memory} {self.link(gpu, memory).value}" for memory in self.gpus if memory != gpu
            )
            for gpu in self.gpus
        ]

    def __repr__(self) -> str:
        return f"<Topology of {len(self.gpus)} GPUs>"


def _ask(driver: DriverCalls, device: object, peer: object) -> Reach:
    try:
        values = [
            int(driver.call("cuDeviceGetP2PAttribute", attribute, device, peer))
            for attribute in (ACCESS_ATTRIBUTE, ATOMIC_ATTRIBUTE, RANK_ATTRIBUTE)
        ]
    except TransferError:
        return Reach(Link.UNKNOWN)
    access, atomic, rank = values
    if not access:
        return Reach(Link.NONE)
    return Reach(Link.NVLINK if atomic else Link.PCIE, rank)


def unreachable(mover: str, memory: str, reachable: Sequence[str]) -> str:
    """Why a pool cannot be imported, and the cure, in one sentence."""
    return (
        f"GPU {mover} of this mover and GPU {memory} of the pool are no peers (it reaches "
        f"{', '.join(reachable) or 'none'}); start a daemon for that GPU, its pages then travel "
        "through the host tier"
    )
