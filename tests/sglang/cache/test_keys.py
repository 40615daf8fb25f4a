"""Keys: what SGLang glued together is taken apart, and what is apart stays apart."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from hypothesis import given
from hypothesis import strategies as st

from directory.core.limits import KEY_PART_CHARS_MAX
from directory.core.namespace import Adapter
from directory.core.tokens import pack_tokens
from scheduler_shim.sglang import keys
from scheduler_shim.sglang.adapters import adapter_versions
from scheduler_shim.sglang.keys import KeyMaker, pack, unglue
from tests.sglang.cache.rig import SALTED, Req, radix_key

pytestmark = pytest.mark.sglang

LORA = "0123456789abcdef0123456789abcdef"


def maker(page_size: int = 4, *, bigram: bool = False, epoch: list[int] | None = None) -> KeyMaker:
    """Keys of a cache of its own."""
    now = epoch or [0]
    return KeyMaker(page_size, bigram=bigram, epoch=lambda: now[0])


def fresh(req: Req) -> Req:
    """A request whose fill ids are up to date."""
    req.refresh()
    return req


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
)
def test_packing_is_what_the_core_packs(
    tokens: list[int], first: int, bigram: bool, wide: bool
) -> None:
    """Any part of it, so that what is packed bit by bit comes to the same."""
    first = min(first, len(tokens))
    packed = pack(array("q", tokens), first, len(tokens), bigram=bigram, wide=wide)
    assert packed == pack_tokens(tokens[first:], bigram=bigram, wide=wide)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 40])
def test_an_id_that_does_not_fit_makes_a_wide_namespace(token: int) -> None:
    assert pack(array("q", [1, token]), 0, 2, bigram=False, wide=False) is None
    path = maker(1).of_request(Req("a", [1, token]))
    assert path.key.wide
    assert path.tokens == array("q", [1, token]).tobytes()
    assert not maker(1).of_request(Req("a", [1, 2])).key.wide


def test_the_parts_of_a_namespace_are_kept_apart() -> None:
    made = maker()
    requests = {
        "plain": Req("a", [1]),
        "extra": Req("b", [1], extra_key="k"),
        "empty": Req("c", [1], extra_key=""),
        "adapter": Req("d", [1], lora_id=LORA),
        "both": Req("e", [1], extra_key="k", lora_id=LORA),
        "looks like both": Req("f", [1], extra_key="k" + LORA),
        "looks like an adapter": Req("g", [1], extra_key=LORA),
        "salted": Req("h", [1], cache_salt="k"),
    }
    found = {name: made.of_request(req).key for name, req in requests.items()}
    assert len(set(found.values())) == len(requests)
    assert found["both"].extra_key == "k"
    assert found["both"].adapter == found["adapter"].adapter == Adapter(LORA, 0)
    assert found["adapter"].extra_key is None
    assert (found["empty"].extra_key, found["plain"].extra_key) == ("", None)
    assert found["salted"].cache_salt == "k"


@pytest.mark.parametrize(
    ("glued", "extra"),
    [
        (LORA, None),
        ("k" + LORA, "k"),
        ("k" + LORA + "|elastic_ep_size=4", "k|elastic_ep_size=4"),
        (LORA + "|elastic_ep_size=4", "|elastic_ep_size=4"),
        ("elsewhere " + LORA + " in it", "elsewhere " + LORA + " in it"),
        (None, None),
    ],
)
def test_an_adapter_is_taken_out_where_sglang_glues_it(
    glued: str | None, extra: str | None
) -> None:
    assert unglue(glued, LORA) == extra


def test_an_adapters_version_and_the_weights_are_part_of_the_namespace() -> None:
    epoch = [3]
    made = KeyMaker(4, bigram=False, epoch=lambda: epoch[0], adapter_version=len)
    req = Req("a", [1, 2], lora_id=LORA)
    before = made.of_request(req).key
    assert (before.weight_epoch, before.adapter) == (3, Adapter(LORA, 32))
    epoch[0] = 4
    assert made.of_request(req).key.weight_epoch == 4, "what was packed before must not say"


def test_adapters_of_one_id_are_one_only_with_the_same_files(tmp_path: Path) -> None:
    def engine(folder: Path) -> Callable[[str], int]:
        references = {LORA: SimpleNamespace(lora_path=str(folder))}
        manager = SimpleNamespace(lora_refs=references)
        runner = SimpleNamespace(lora_manager=manager)
        return adapter_versions(SimpleNamespace(model_runner=runner))

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    first, second = engine(tmp_path), engine(tmp_path)
    assert first(LORA) == second(LORA) >= 0
    assert first("loaded later") != second("loaded later"), "nobody saw its files"
    weights.write_bytes(b"another")
    assert engine(tmp_path)(LORA) != first(LORA)
    assert engine(Path("some/hub/name"))(LORA) != engine(Path("some/hub/name"))(LORA)


def test_a_key_honours_its_limit_and_ends_with_a_whole_page() -> None:
    made, tokens = maker(4), array("q", range(11))
    assert len(made.of_key(radix_key(Req("a", []), tokens)).tokens) == 4 * 8
    assert len(made.of_key(radix_key(Req("a", []), tokens, 7)).tokens) == 4 * 4
    assert made.of_key(radix_key(Req("a", []), tokens, 3)).tokens == b""


def test_pairs_are_one_fewer_than_tokens() -> None:
    made = maker(4, bigram=True)
    req = fresh(Req("a", list(range(9))))
    path = made.of_prefix(req, req.full_untruncated_fill_ids, 9)
    assert path.key.bigram
    assert path.tokens == pack_tokens(range(9), bigram=True)
    assert len(made.of_prefix(req, req.full_untruncated_fill_ids, 8).tokens) == 4 * 8
    req.output_ids.extend([9, 10, 11, 12])
    req.refresh()
    path = made.of_prefix(req, req.full_untruncated_fill_ids, 13)
    assert path.tokens == pack_tokens(range(13), bigram=True), "the pair at the seam is there"


def test_a_prompt_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []

    def counted(tokens: array[int], first: int, count: int, **how: bool) -> bytes | None:
        ranges.append((first, count))
        return pack(tokens, first, count, **how)

    monkeypatch.setattr(keys, "pack", counted)
    made, req = maker(1), fresh(Req("a", list(range(8))))
    for _ in range(3):
        made.of_request(req)
        made.of_key(radix_key(req, req.full_untruncated_fill_ids, 7), req)
        made.of_key(radix_key(req, req.origin_input_ids + req.output_ids), req)
    assert ranges == [(0, 8)]
    req.output_ids.extend([50, 51])
    req.refresh()
    path = made.of_prefix(req, req.full_untruncated_fill_ids, 10)
    assert path.tokens == pack_tokens([*range(8), 50, 51])
    assert ranges == [(0, 8), (0, 2)], "of the outputs, from their first"


def test_other_tokens_are_never_taken_for_those_that_were_packed() -> None:
    made, req = maker(1), fresh(Req("a", list(range(8))))
    made.of_request(req)
    req.origin_input_ids = array("q", [0])  # what SGLang does to a request that it aborts
    assert made.of_request(req).tokens == pack_tokens([0])
    req = fresh(Req("b", list(range(8))))
    req.output_ids.extend([1, 2])
    made.of_request(req)
    req.output_ids = array("q", [2, 1])
    assert made.of_request(req).tokens == pack_tokens([*range(8), 2, 1])
    other = array("q", [5, 6, 7])
    assert made.of_key(radix_key(req, other), req).tokens == pack_tokens([5, 6, 7])
    assert made.of_request(req).tokens == pack_tokens([*range(8), 2, 1])


def test_an_id_that_fits_no_more_ends_what_is_stored() -> None:
    made, req = maker(1), fresh(Req("a", [1, 2]))
    made.of_request(req)
    req.output_ids.extend([3])
    made.of_request(req)
    req.output_ids.extend([1 << 33])
    req.refresh()
    path = made.of_prefix(req, req.full_untruncated_fill_ids, 4)
    assert (path.tokens, path.key.wide) == (pack_tokens([1, 2, 3]), False)


@pytest.mark.parametrize("name", ["positional_embed_overrides", "input_embeds"])
def test_vectors_in_the_place_of_tokens_are_never_looked_up_nor_stored(name: str) -> None:
    made, req = maker(1), fresh(Req("a", list(range(4))))
    setattr(req, name, object())
    assert made.of_request(req).tokens == b""
    assert made.of_prefix(req, req.full_untruncated_fill_ids, 4).tokens == b""


def shown(tokens: list[int], *hashes: int, wide: bool = False) -> Req:
    """A request with an item for each hash; its id says 30 bits of it, or (`wide`) all."""
    items = [
        SimpleNamespace(
            hash=one,
            pad_value=1_000_000 + one % (1 << 30),
            pad_values=(1_000_000 + one,) if wide else None,
        )
        for one in hashes
    ]
    req = fresh(Req("a", tokens))
    req.multimodal_inputs = SimpleNamespace(mm_items=items)
    return req


def test_pictures_of_which_sglang_knows_too_little_are_told_apart_by_all_that_is_known() -> None:
    short, one, two = 1_000_000 + 77, 77 + (5 << 30), 77 + (6 << 30)
    tokens = [1, 2, short, short, 3]
    paths = [maker(1).of_request(shown(tokens, whole)) for whole in (one, two, one)]
    assert paths[0].tokens == paths[2].tokens != paths[1].tokens
    assert paths[0].tokens[:16] == paths[1].tokens[:16], "what is said before it is the same"
    text = maker(1).of_request(fresh(Req("t", tokens)))
    assert text.key != paths[0].key, "an id that somebody sends as text is no picture"


def test_a_prompt_with_pictures_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, req = maker(1), shown([1_000_077, 1, 2, 1_000_077], 77)
    path = made.of_request(req)
    monkeypatch.setattr(keys, "pack", lambda *_, **__: pytest.fail("packed again"))
    assert made.of_prefix(req, req.full_untruncated_fill_ids, 4) == path
    assert made.of_prefix(req, req.full_untruncated_fill_ids, 3).tokens == path.tokens[:24]


def test_a_prompt_is_not_stored_where_two_pictures_have_one_id_or_one_has_no_hash() -> None:
    req = shown([1, 1_000_077], 77, 77 + (5 << 30))
    assert maker(1).of_request(req).tokens == b""
    req = shown([1, 1_000_077], 77)
    req.multimodal_inputs.mm_items[0].hash = None
    assert maker(1).of_request(req).tokens == b""


def test_ids_that_say_all_of_a_picture_are_left_alone() -> None:
    whole = 77 + (5 << 30)
    tokens = [1, 1_000_000 + whole]
    req = shown(tokens, whole, wide=True)
    assert maker(1).of_request(req).tokens == pack_tokens(tokens, wide=True)


def test_a_key_that_cannot_travel_serves_without_the_cache() -> None:
    req = fresh(Req("a", list(range(4)), extra_key="k" * (KEY_PART_CHARS_MAX + 1)))
    assert maker(1).of_request(req).tokens == b""


def test_a_key_without_a_request_is_read_as_requests_have_used_it() -> None:
    made = maker(1)
    adapter = Req("a", [1], lora_id=LORA)
    made.of_request(adapter)
    assert made.of_key(radix_key(adapter, adapter.origin_input_ids)).key.adapter is not None
    plain = Req("b", [1], extra_key=LORA)
    assert made.of_request(plain).key.adapter is None
    ambiguous = made.of_key(radix_key(plain, plain.origin_input_ids))
    assert ambiguous.tokens == b"", "one of the two would see the other's"


@pytest.mark.skipif(not SALTED, reason="this SGLang glues a salt to the extra key before we see it")
def test_a_salt_is_a_part_of_its_own() -> None:
    made = maker(1)
    salted = Req("a", [1], cache_salt="s")
    key = made.of_key(radix_key(salted, salted.origin_input_ids), salted).key
    assert (key.cache_salt, key.extra_key) == ("s", None)
