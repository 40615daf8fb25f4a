"""A mover that breaks its own CUDA context on SIGUSR1: for tests of what follows.

A kernel stores to an address that is no memory. Every later call in the context fails with
CUDA_ERROR_ILLEGAL_ADDRESS, as after a fault of the hardware or the driver, and no call mends it.
The product's own kernel copies between checked addresses only.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

import transfer.device.cuda
from transfer.device.cuda import CudaDevice, open_device
from transfer.ipc.cuda_driver import Driver
from transfer.mover import main

WILD_STORE_FILE = "WILD_STORE_FILE"
"""The variable that names the file which is there once the store was launched. A line on stderr
can be lost to a test that reads and cuts the file behind it."""
KERNEL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""


def _open_and_arm(uuid: str, **options: Any) -> tuple[CudaDevice, Driver]:
    device, driver = open_device(uuid, **options)
    module = driver.call("cuModuleLoadData", KERNEL)
    kernel = driver.call("cuModuleGetFunction", module, b"wild")
    stream = driver.call("cuStreamCreate", 1)

    def launch(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not os.path.exists(os.environ[WILD_STORE_FILE]):
            driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
            with open(os.environ[WILD_STORE_FILE], "wb"):
                pass

    signal.signal(signal.SIGUSR1, launch)
    return device, driver


if __name__ == "__main__":
    transfer.device.cuda.open_device = _open_and_arm
    sys.exit(main())
