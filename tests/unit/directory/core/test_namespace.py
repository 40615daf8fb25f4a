"""Namespaces: what tells two of them apart."""

from itertools import permutations

import msgspec
import pytest

from directory.core import limits
from directory.core.errors import BadMessage, TooLarge
from directory.core.namespace import Adapter, Fingerprint, NamespaceKey
from tests.unit.directory.core.world import Scheduler, World

KEYS = [
    NamespaceKey(),
    NamespaceKey(extra_key="ab"),
    NamespaceKey(cache_salt="a", extra_key="b"),
    NamespaceKey(cache_salt="ab"),
    NamespaceKey(cache_salt=""),
    NamespaceKey(extra_key=""),
    NamespaceKey(cache_salt="", extra_key="", adapter=Adapter("", 0)),
    NamespaceKey(adapter=Adapter("x", 0)),
    NamespaceKey(adapter=Adapter("x", 1)),
    NamespaceKey(cache_salt="x"),
    NamespaceKey(extra_key="x"),
    NamespaceKey(weight_epoch=1),
]


def test_no_namespace_matches_what_another_one_holds_f1() -> None:
    for mine in KEYS:
        world = World()
        a, b = Scheduler(world, "a"), Scheduler(world, "b")
        a.publish([1, 2, 3], key=mine)
        world.finish_all()
        for key in KEYS:
            for who in (a, b):
                got = who.match([1, 2, 3], key=key, acquire=False)
                assert got.own_pages + got.restorable_pages == (3 if key == mine else 0)


def test_flags_that_change_the_units_are_namespaces_of_their_own_f1() -> None:
    keys = [NamespaceKey(bigram=b, wide=w) for b in (False, True) for w in (False, True)]
    world = World()
    a = Scheduler(world, "a")
    for key in keys:
        assert a.match([1, 2, 3, 4], key=key).own_pages == 0
        a.publish([1, 2, 3, 4], key=key)
    assert len(world.directory.tree.spaces) == 4


def test_schedulers_share_nothing_when_any_part_of_the_fingerprint_differs_f1() -> None:
    base = Fingerprint(model="m")
    others = {
        name: msgspec.structs.replace(base, **{name: value})
        for name, value in {
            "model": "n", "revision": "", "weight_dtype": "fp8", "quantisation": "awq",
            "kv_dtype": "fp8", "kv_scales": "s", "layer_count": 2, "layer_kind": "mla",
            "heads": 8, "head_dim": 128, "page_size": 2, "layout": "page_first", "tp_size": 2,
            "pp_size": 2, "tp_rank": 1, "pp_rank": 1, "weights": "", "overrides": "{}",
            "engine": "sglang 1",
        }.items()
    }  # fmt: skip
    assert others.keys() == set(Fingerprint.__struct_fields__)
    prints = [one.encode() for one in (base, *others.values())]
    assert len(set(prints)) == len(prints)
    world = World()
    pools = [Scheduler(world, str(at), fingerprint=fp) for at, fp in enumerate(prints)]
    for writer, reader in permutations(pools, 2):
        if writer.pool == 1:
            writer.publish([5, 6])
            got = reader.match([5, 6])
            assert got.own_pages + got.restorable_pages == 0


def test_absent_is_not_the_same_as_empty_in_a_fingerprint() -> None:
    assert (
        Fingerprint(model="m", revision=None).encode()
        != Fingerprint(model="m", revision="").encode()
    )


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (NamespaceKey(weight_epoch=-1), BadMessage),
        (NamespaceKey(cache_salt="s" * (limits.KEY_PART_CHARS_MAX + 1)), TooLarge),
        (NamespaceKey(extra_key="s" * (limits.KEY_PART_CHARS_MAX + 1)), TooLarge),
        (NamespaceKey(adapter=Adapter("s" * (limits.KEY_PART_CHARS_MAX + 1), 0)), TooLarge),
    ],
)
def test_a_part_out_of_range_is_refused(key: NamespaceKey, error: type[Exception]) -> None:
    with pytest.raises(error):
        key.check()


def test_units_grow_with_wide_and_bigram() -> None:
    assert [
        NamespaceKey(bigram=b, wide=w).unit_bytes for b in (False, True) for w in (False, True)
    ] == [4, 8, 8, 16]


@pytest.mark.parametrize("page", [1, 2, 4, 7])
def test_bigram_lengths_around_a_page_never_go_past_the_end_f9(page: int) -> None:
    key = NamespaceKey(bigram=True)
    for n in (0, 1, page - 1, page, page + 1, 2 * page, 2 * page + 1):
        world = World()
        a, b = Scheduler(world, "a", page_size=page), Scheduler(world, "b", page_size=page)
        tokens = list(range(100, 100 + n))
        want = max(0, n - 1) // page
        out = a.publish(tokens, key=key)
        assert out is not None
        assert len(out[0]) == want
        assert a.match(tokens, key=key).own_pages == want
        assert b.match(tokens, key=key).restorable_pages == want
