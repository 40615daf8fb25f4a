"""How fast NVLink is: what the management library says of each link, or the usual."""

from types import SimpleNamespace
from typing import Any

import pytest

from transfer.device.cuda_links import (
    ALONE_PERCENT,
    BYTES_PER_US,
    FASTER_SINCE,
    LINKS_MAX,
    TO_A_GPU,
    USUAL_LINKS,
    link_bytes_per_us,
    over_nvlink,
)
from transfer.topology import Link, Reach, Topology

OWN, OTHER = "GPU-own", "GPU-other"
SWITCH = TO_A_GPU + 2


def topology(link: Link) -> Topology:
    """Two GPUs with this between them."""
    reaches = {(OWN, OTHER): Reach(link), (OTHER, OWN): Reach(link)}
    return Topology(reaches | {(gpu, gpu): Reach(Link.SAME) for gpu in (OWN, OTHER)})


class Library:
    """Stands in for the management library: the links' states, until one is not there."""

    def __init__(
        self, states: list[int], version: int = FASTER_SINCE - 1, remote: int = SWITCH
    ) -> None:
        self.states = states
        self.version = version
        self.remote = remote
        self.others = 3

    def nvmlInit(self) -> None:  # noqa: N802
        """As the library has it."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        """A GPU."""
        return uuid

    def nvmlDeviceGetNvLinkState(self, _device: str, link: int) -> int:  # noqa: N802
        """Raises where there is no such link."""
        return self.states[link]

    def nvmlDeviceGetNvLinkVersion(self, _device: str, _link: int) -> int:  # noqa: N802
        """Of every link."""
        return self.version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, _device: str, _link: int) -> int:  # noqa: N802
        """Of every link."""
        return self.remote

    def nvmlDeviceGetNvLinkRemotePciInfo(self, _device: str, link: int) -> Any:  # noqa: N802
        """The other GPUs in turn."""
        return SimpleNamespace(busId=f"0000:{link % self.others:02}:00.0")


@pytest.mark.parametrize(
    ("states", "version", "links"),
    [
        ([1] * LINKS_MAX, FASTER_SINCE - 1, 18),
        ([1, 0, 1, 1], FASTER_SINCE - 1, 3),
        ([1] * 18, FASTER_SINCE, 36),
    ],
)
def test_links_that_are_up_count(states: list[int], version: int, links: int) -> None:
    found = link_bytes_per_us(OWN, topology(Link.NVLINK), Library(states, version))
    assert found == links * BYTES_PER_US * ALONE_PERCENT // 100


@pytest.mark.parametrize("states", [[], [0, 0]])
def test_where_nobody_says_how_many_there_are_it_is_the_usual_number(states: list[int]) -> None:
    found = link_bytes_per_us(OWN, topology(Link.NVLINK), Library(states))
    assert found == USUAL_LINKS * BYTES_PER_US * ALONE_PERCENT // 100


@pytest.mark.parametrize("link", [Link.PCIE, Link.UNKNOWN, Link.NONE])
def test_a_gpu_without_peers_over_nvlink_has_no_figure(link: Link) -> None:
    assert link_bytes_per_us(OWN, topology(link), Library([1] * LINKS_MAX)) == 0


@pytest.mark.parametrize(("remote", "shares"), [(SWITCH, 1), (TO_A_GPU, 3)])
def test_links_that_end_at_gpus_are_shared_among_these(remote: int, shares: int) -> None:
    gpus = ["GPU-a", "GPU-b", OWN]  # the third one is not visible here
    reaches = {(one, two): Reach(Link.NVLINK) for one in gpus for two in gpus if one != two}
    mesh = Topology(reaches | {(OWN, "GPU-d"): Reach(Link.PCIE)})
    found = link_bytes_per_us(OWN, mesh, Library([1] * 12, remote=remote))
    assert found == 12 * BYTES_PER_US // shares * ALONE_PERCENT // 100
    assert over_nvlink(OWN, mesh) == ["GPU-a", "GPU-b"]
