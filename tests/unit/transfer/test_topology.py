"""Topology of any number of GPUs: eight of them, with and without links between."""

from typing import Any

import pytest

from directory.core.errors import ImportFailed
from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.ipc.cuda_driver import CudaError
from transfer.ipc.cuda_memory import CudaMemoryIPC
from transfer.ipc.memory import CUDA_IPC, MemoryHandle
from transfer.topology import Link, Topology, unreachable

GPUS = [f"GPU-{number}" for number in range(8)]


class EightDriver(FakeDriver):
    """Two islands of four GPUs linked among themselves, peers over the bus within each half of the
    other island, and nothing between the halves; GPU 7 cannot be asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.uuid = GPUS[0]
        self.visible = {gpu: number for number, gpu in enumerate(GPUS)}

    def call(self, function: str, *arguments: Any) -> Any:
        if function != "cuDeviceGetP2PAttribute":
            return super().call(function, *arguments)
        attribute, one, other = arguments
        if 7 in (one, other):
            raise CudaError(function, "CUDA_ERROR_INVALID_DEVICE", "as the test wants")
        linked = one // 4 == other // 4
        access = linked or one % 4 // 2 == other % 4 // 2
        return {1: abs(one - other), 2: int(access), 3: int(linked)}[attribute]


@pytest.fixture
def topology() -> Topology:
    return Topology.probe(EightDriver(), {gpu: number for number, gpu in enumerate(GPUS)})


def test_each_pair_is_what_the_driver_says_of_it(topology: Topology) -> None:
    assert topology.gpus == GPUS
    links = [topology.link("GPU-0", gpu) for gpu in GPUS]
    nv, bus, none = Link.NVLINK, Link.PCIE, Link.NONE
    assert links == [Link.SAME, nv, nv, nv, bus, bus, none, Link.UNKNOWN]
    assert topology.link("GPU-0", "GPU-elsewhere") is Link.NONE
    assert repr(topology) == "<Topology of 8 GPUs>"


def test_reachable_gpus_are_in_the_order_of_their_speed(topology: Topology) -> None:
    assert topology.reachable("GPU-0") == [
        "GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4", "GPU-5", "GPU-7",
    ]  # fmt: skip
    assert topology.reachable("GPU-2")[:3] == ["GPU-2", "GPU-1", "GPU-3"]


def test_what_no_mover_reaches_directly_goes_through_the_host(topology: Topology) -> None:
    assert topology.route("GPU-0", "GPU-0", "GPU-3") == ("GPU-0", "GPU-3")
    assert topology.route("GPU-0", "GPU-6", "GPU-0") == ("GPU-6", "host", "GPU-0")
    assert topology.route("GPU-4", "GPU-0", "GPU-6") == ("GPU-0", "GPU-6"), (
        "a third one reaches both"
    )


@pytest.mark.parametrize("source", GPUS[:7])
@pytest.mark.parametrize("target", GPUS[:7])
def test_a_mover_that_copies_directly_reaches_both_sides(
    topology: Topology, source: str, target: str
) -> None:
    mover = topology.mover_for(source, target)
    assert mover is not None
    assert topology.route(mover, source, target) == (source, target)
    if topology.link(target, source) is not Link.NONE:
        assert mover == target, "the target's own, if it can"


def test_gpus_that_nobody_links_have_no_mover() -> None:
    alone = Topology.probe(
        EightDriver(), {gpu: number for number, gpu in enumerate(GPUS) if number in (0, 6)}
    )
    assert alone.mover_for("GPU-0", "GPU-6") is None
    assert alone.mover_for("GPU-0", "GPU-0") == "GPU-0"


def test_every_gpu_has_a_line_with_all_others(topology: Topology) -> None:
    lines = topology.describe()
    assert len(lines) == 8
    assert lines[0].startswith("GPU-0: GPU-1 nvlink,")
    assert "GPU-6 none" in lines[0]


def test_a_pool_on_a_gpu_that_is_no_peer_is_refused_with_the_cure(topology: Topology) -> None:
    driver = EightDriver()
    memory = CudaMemoryIPC(driver, topology)
    handle = MemoryHandle(CUDA_IPC, 100, "GPU-6", b"")
    with pytest.raises(ImportFailed, match=r"no peers .*through the host tier"):
        memory.import_memory(handle, ())
    assert driver.named("cuIpcOpenMemHandle") == []
    with pytest.raises(ImportFailed, match="cannot be decoded"):
        memory.import_memory(MemoryHandle(CUDA_IPC, 100, "GPU-7", b""), ())
    assert "reaches none" in unreachable("GPU-1", "GPU-2", [])
