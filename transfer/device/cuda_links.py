"""How fast the links between GPUs are, as the driver's management library knows them.

Owns one figure a mover and how it is reckoned. Nobody is asked again later: a link that fails makes
copies slower than the figure, and then nothing is concluded from how long they take (alone.Alone).
"""

import importlib
import logging
from typing import Any

from transfer.topology import Link, Topology

LINKS_MAX = 18  # NVML_NVLINK_MAX_LINKS of the GPUs of 2022 and after
UP = 1  # NVML_FEATURE_ENABLED
FASTER_SINCE = 7  # NVML_NVLINK_VERSION_5_0
BYTES_PER_US, FASTER_BYTES_PER_US = 25_000, 50_000
"""Of a link in one direction: 25 GB/s from NVLink 2 to 4, 50 GB/s since (NVIDIA's figures)."""
ALONE_PERCENT = 55
"""Of what all links could do, that a copy by a kernel does which waits for nobody: 79 between two
H200 with 18 links (355 of 450 GB/s)."""
USUAL_LINKS = 12
"""Where there is NVLink and nobody says how much of it: as many as an A100 has."""

TO_A_GPU = 0  # NVML_NVLINK_DEVICE_TYPE_GPU: a switch has the links of all peers
log = logging.getLogger("treecored.cuda")


def over_nvlink(uuid: str, topology: Topology) -> list[str]:
    """The GPUs that one reaches over NVLink."""
    return [gpu for gpu in topology.gpus if topology.link(uuid, gpu) is Link.NVLINK]


def link_bytes_per_us(uuid: str, topology: Topology, library: Any = None) -> int:
    """So many bytes a microsecond a GPU reads at least from another one over NVLink, alone; 0 where
    it has no peer over that. `library`: stands in for pynvml in tests (None: that itself)."""
    peers = over_nvlink(uuid, topology)
    if not peers:
        return 0
    try:
        library = library or importlib.import_module("pynvml")
        library.nvmlInit()
        peak = _peak(library, library.nvmlDeviceGetHandleByUUID(uuid))
    except Exception as error:  # noqa: BLE001 - the library's errors have no common base
        log.info("nobody knows how many links GPU %s has: %s", uuid, error)
        peak = 0
    if not peak:
        log.info("GPU %s: %d NVLinks of 25 GB/s are supposed", uuid, USUAL_LINKS)
    return (peak or USUAL_LINKS * BYTES_PER_US) * ALONE_PERCENT // 100


def _peak(library: Any, device: Any) -> int:
    """To one peer: of all links that are up to a switch, and of those to GPUs, be they visible here
    or not, a share. Links beyond those that there are end the count."""
    switched = direct = 0
    remote = set()
    for link in range(LINKS_MAX):
        try:
            if library.nvmlDeviceGetNvLinkState(device, link) != UP:
                continue
            faster = library.nvmlDeviceGetNvLinkVersion(device, link) >= FASTER_SINCE
            rate = FASTER_BYTES_PER_US if faster else BYTES_PER_US
            if library.nvmlDeviceGetNvLinkRemoteDeviceType(device, link) == TO_A_GPU:
                remote.add(library.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId)
                direct += rate
            else:
                switched += rate
        except Exception as error:  # noqa: BLE001
            log.debug("link %d: %s", link, error)
            break
    return switched + direct // max(1, len(remote))
