"""Digests of pages: of all their bytes, wherever they lie, and of nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

import torch

from scheduler_shim.sglang.buffers import find_tensors
from scheduler_shim.sglang.checking import DIGEST_BYTES
from scheduler_shim.sglang.names import PageNames
from scheduler_shim.sglang.page_digests import PageDigests
from tests.sglang.pools.support import mha, mla

pytestmark = pytest.mark.sglang

PAGES = 9


def digests_over(pool: object, page_size: int) -> tuple[PageDigests, PageNames]:
    names = PageNames(PAGES, page_size, "cpu")
    return PageDigests(find_tensors(pool), names), names


def name(names: PageNames, page: int, page_size: int) -> bytes:
    slots = torch.arange(page * page_size, (page + 1) * page_size)
    return names.name(slots).tobytes()


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equal_pages_have_equal_digests_and_any_other_byte_changes_them(
    make: object, page_size: int
) -> None:
    pool = make((PAGES - 1) * page_size, page_size)  # type: ignore[operator]
    digests, names = digests_over(pool, page_size)
    one, other = name(names, 3, page_size), name(names, 5, page_size)
    tensors = [part.tensor for part in find_tensors(pool)]
    draw = torch.Generator().manual_seed(1)
    for tensor in tensors:
        rows = torch.randn(tensor[:page_size].shape, generator=draw).to(tensor.dtype)
        tensor[3 * page_size : 4 * page_size] = rows
        tensor[5 * page_size : 6 * page_size] = rows
    first = digests(one + other).take()
    assert first[:DIGEST_BYTES] == first[DIGEST_BYTES:]
    for tensor in tensors:
        bytes_ = tensor.view(torch.uint8)[5 * page_size : 6 * page_size].flatten()
        for at in (0, bytes_.numel() // 2, bytes_.numel() - 1):
            kept = int(bytes_[at])
            # A view of the pool: the highest bit of one byte, which is a sign.
            tensor.view(torch.uint8)[5 * page_size : 6 * page_size].view(-1)[at] = kept ^ 0x80
            assert digests(other).take() != first[:DIGEST_BYTES]
            assert digests(one).take() == first[:DIGEST_BYTES]
            tensor.view(torch.uint8)[5 * page_size : 6 * page_size].view(-1)[at] = kept
    assert digests(other).take() == first[:DIGEST_BYTES]


def test_two_tokens_that_changed_places_are_another_page() -> None:
    pool = mha((PAGES - 1) * 16, 16)
    digests, names = digests_over(pool, 16)
    page = name(names, 2, 16)
    for part in find_tensors(pool):
        part.tensor.copy_(torch.randn(part.tensor.shape).to(part.tensor.dtype))
    before = digests(page).take()
    for part in find_tensors(pool):
        rows = part.tensor[32:34].clone()
        part.tensor[32:34] = rows.flip(0)
    assert digests(page).take() != before


def test_engines_agree_on_the_digest_of_the_same_bytes_whatever_the_page() -> None:
    values = torch.randn((16, 2, 8)).to(torch.bfloat16)
    found = []
    for page in (2, 7):
        pool = mha((PAGES - 1) * 16, 16)
        digests, names = digests_over(pool, 16)
        for part in find_tensors(pool):
            part.tensor[page * 16 : (page + 1) * 16] = values
        found.append(digests(name(names, page, 16)).take())
    assert found[0] == found[1]


def test_many_pages_in_portions_give_what_each_gives_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = mha((PAGES - 1) * 16, 16)
    digests, names = digests_over(pool, 16)
    for part in find_tensors(pool):
        part.tensor.copy_(torch.randn(part.tensor.shape).to(part.tensor.dtype))
    packed = [name(names, page, 16) for page in range(1, 8)]
    whole = digests(b"".join(packed)).take()
    monkeypatch.setattr("scheduler_shim.sglang.page_digests.AT_ONCE_BYTES", digests.page_bytes * 2)
    assert digests(b"".join(packed)).take() == whole
    assert b"".join(digests(one).take() for one in packed) == whole
