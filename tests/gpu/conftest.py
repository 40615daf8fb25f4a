"""Every test here needs a GPU: marked so, and skipped with the reason where there is none.

The peers (scheduler processes) are shared by the tests of a session: torch takes seconds to load.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.core.errors import TransferError
from tests.gpu.support import Peer, Rig
from transfer.ipc.cuda_driver import load_api, visible_devices

HERE = Path(__file__).parent


def gpus() -> list[str]:
    """UUIDs of the GPUs of this machine; empty without one."""
    try:
        return list(visible_devices(load_api()))
    except TransferError:
        return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies below this folder; without a GPU it is skipped."""
    missing = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not gpus():
                item.add_marker(missing)


@pytest.fixture(scope="session")
def uuids() -> list[str]:
    """UUIDs of the GPUs."""
    return gpus()


@pytest.fixture(scope="session")
def shared_peers(uuids: list[str]) -> Iterator[tuple[Peer, Peer]]:
    """Two schedulers on the first GPU, for the whole session."""
    pair = Peer(uuids[0]), Peer(uuids[0])
    for peer in pair:
        peer.ready()
    yield pair
    for peer in pair:
        peer.close()


@pytest.fixture
def peers(shared_peers: tuple[Peer, Peer]) -> Iterator[tuple[Peer, Peer]]:
    """The two schedulers, without pools before and after."""
    yield shared_peers
    for peer in shared_peers:
        peer.drop_all()


@pytest.fixture
def rig(uuids: list[str]) -> Iterator[Rig]:
    """A mover on the first GPU with a host tier."""
    made = Rig(uuids[0])
    yield made
    made.close()
