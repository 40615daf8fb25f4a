"""Shared memory: seals, checks on import, reference counts, descriptors."""

import fcntl
import os
import tempfile
from collections.abc import Iterator

import pytest

from directory.core.errors import ImportFailed, TransferError
from tests.descriptors import open_descriptors
from transfer.ipc.memory import MappingBusy, MemoryHandle, SharedMemoryIPC


@pytest.fixture
def memfd() -> Iterator[int]:
    """A memfd of one page without seals."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


def test_what_one_side_writes_the_other_side_reads() -> None:
    owner, importer = SharedMemoryIPC(), SharedMemoryIPC()
    made = owner.create("test", 5000)
    handle, fds = owner.export(made)
    seen = importer.import_memory(handle, fds)
    made.view[4999] = 7
    assert seen.view[4999] == 7
    assert seen.nbytes == 5000
    owner.close(made)
    seen.view[0] = 1  # the importer's mapping does not depend on the owner's
    importer.close(seen)


def test_exported_memory_can_neither_shrink_nor_grow() -> None:
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    ipc.close(made)


def test_memory_that_its_owner_could_shrink_is_refused(memfd: int) -> None:
    ipc = SharedMemoryIPC()
    for seal in (0, fcntl.F_SEAL_GROW):
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seal)
        with pytest.raises(ImportFailed, match="F_SEAL_SHRINK"):
            ipc.import_fd(memfd, 4096)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    ipc.close(ipc.import_fd(memfd, 4096))


def test_memory_smaller_than_announced_is_refused(memfd: int) -> None:
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ImportFailed, match="4096 bytes, 4097 were announced"):
        SharedMemoryIPC().import_fd(memfd, 4097)


def test_memory_sealed_against_writing_is_refused(memfd: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ImportFailed, match="against writing"):
        SharedMemoryIPC().import_fd(memfd, 4096)


def test_a_file_a_pipe_and_a_closed_descriptor_are_refused() -> None:
    ipc = SharedMemoryIPC()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        for fd in (file.fileno(), read_end, 999_999):
            with pytest.raises(ImportFailed):
                ipc.import_fd(fd, 4096)
    os.close(read_end)
    os.close(write_end)
    assert ipc.open_count == 0


@pytest.mark.parametrize(
    "handle", [MemoryHandle("cuda_ipc", 4096), MemoryHandle("memfd", 4096, device="GPU-1")]
)
def test_another_backends_handle_is_refused(handle: MemoryHandle) -> None:
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    with pytest.raises(ImportFailed, match="not shared memory"):
        ipc.import_memory(handle, (made.fd,))
    ipc.close(made)


def test_one_allocation_is_mapped_once_however_often_it_is_imported_f39() -> None:
    owner, importer = SharedMemoryIPC(), SharedMemoryIPC()
    made = owner.create("test", 4096)
    first = importer.import_fd(made.fd, 1024)
    second = importer.import_fd(made.fd, 4096)
    assert second is first
    importer.close(first)
    second.view[0] = 1
    assert importer.open_count == 1
    importer.close(second)
    assert importer.open_count == 0
    assert second.closed
    owner.close(made)


def test_closing_once_too_often_is_an_error() -> None:
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    ipc.close(made)
    with pytest.raises(TransferError, match="closed"):
        ipc.close(made)


def test_a_mapping_in_use_stays_open_until_the_view_is_released() -> None:
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    piece = made.view[10:20]
    with pytest.raises(MappingBusy):
        ipc.close(made)
    piece[0] = 3
    assert made.view[10] == 3
    piece.release()
    ipc.close(made)


def test_neither_success_nor_failure_leaks_a_descriptor(memfd: int) -> None:
    before = open_descriptors()
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    ipc.close(ipc.import_fd(made.fd, 1))
    ipc.close(made)
    with pytest.raises(ImportFailed):
        ipc.import_fd(memfd, 1)
    with pytest.raises(ImportFailed):
        ipc.create("test", 0)
    with pytest.raises(ImportFailed):
        ipc.create("test", 1 << 62)
    assert open_descriptors() == before


def test_the_address_is_that_of_the_first_byte() -> None:
    ipc = SharedMemoryIPC()
    made = ipc.create("test", 4096)
    assert made.address % 4096 == 0
    ipc.close(made)
