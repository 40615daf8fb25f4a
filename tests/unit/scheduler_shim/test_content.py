"""Page content: equal exactly for equal paths, and wrong in every way that a copy can be wrong."""

from collections.abc import Iterator

import pytest

from directory.core.namespace import NamespaceKey
from scheduler_shim.content import PageContent, namespace_seed, page_digests
from scheduler_shim.pools import SharedPool
from tests.unit.scheduler_shim.support import tokens

KEY = 16  # bytes of tokens a page of four


@pytest.fixture(params=[4, 64, 2048], ids=lambda n: f"{n}-bytes-a-token")
def pool(request: pytest.FixtureRequest) -> Iterator[SharedPool]:
    pool = SharedPool(page_size=4, page_count=4, bytes_per_token=request.param)
    yield pool
    pool.close()


def test_a_page_is_what_its_path_says(pool: SharedPool) -> None:
    content = PageContent(pool.chunks())
    digests = page_digests(b"seed", tokens(1, 2, 3), KEY)
    for page, digest in enumerate(digests):
        content.write(page, digest)
    for page in range(3):
        assert [content.verify(page, digest) for digest in digests] == [
            page == other for other in range(3)
        ]
    assert not content.verify(3, digests[0])


def test_any_changed_byte_is_noticed(pool: SharedPool) -> None:
    content = PageContent(pool.chunks())
    (digest,) = page_digests(b"seed", tokens(1), KEY)
    content.write(1, digest)
    for chunk in pool.chunks():
        for byte in (0, chunk.nbytes // 2, chunk.nbytes - 1):
            at = chunk.offset + chunk.stride + byte
            chunk.view[at] ^= 0x10
            assert not content.verify(1, digest)
            chunk.view[at] ^= 0x10
    assert content.verify(1, digest)


def test_chunks_in_the_wrong_buffer_or_shifted_are_noticed(pool: SharedPool) -> None:
    content = PageContent(pool.chunks())
    (digest,) = page_digests(b"seed", tokens(1), KEY)
    content.write(0, digest)
    first, second = pool.chunks()[:2]
    one, two = bytes(first.view[: first.nbytes]), bytes(second.view[: second.nbytes])
    first.view[: first.nbytes], second.view[: second.nbytes] = two, one
    assert not content.verify(0, digest)
    second.view[: second.nbytes] = two
    first.view[: first.nbytes] = one[1:] + one[:1]
    assert not content.verify(0, digest)


def test_a_digest_stands_for_the_whole_path_up_to_its_page() -> None:
    left = page_digests(b"seed", tokens(1, 2, 3), KEY)
    right = page_digests(b"seed", tokens(9, 2, 3), KEY)
    assert page_digests(b"seed", tokens(1, 2), KEY) == left[:2]
    assert set(left).isdisjoint(right)
    assert set(page_digests(b"other", tokens(1, 2, 3), KEY)).isdisjoint(left)


def test_a_partial_page_has_a_digest_of_its_own() -> None:
    digests = page_digests(b"seed", tokens(1, 2)[:20], KEY)
    assert len(digests) == 2
    assert digests[1] != page_digests(b"seed", tokens(1, 2), KEY)[1]


def test_namespaces_have_seeds_of_their_own() -> None:
    keys = [NamespaceKey(), NamespaceKey(cache_salt=""), NamespaceKey(extra_key="")]
    assert len({namespace_seed(b"f", key) for key in keys}) == 3
    assert namespace_seed(b"f", keys[0]) != namespace_seed(b"g", keys[0])
