"""SGLang's own decoder reads our events, and its hashes are ours: each version in its own form."""

from __future__ import annotations

import array
import random
from importlib.metadata import version
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache import utils

from directory.kvevents.blocks import Stored
from directory.kvevents.hashing import chain, published, seed
from directory.kvevents.wire import Event, Form, encode_batch
from tests.property.test_kv_events import storm

pytestmark = pytest.mark.sglang

MAPS_SINCE = (0, 5, 20)
FORM: Form = "map" if tuple(map(int, version("sglang").split(".")[:3])) >= MAPS_SINCE else "array"
OTHER: Form = "array" if FORM == "map" else "map"

_decoder = msgspec.msgpack.Decoder(type=KVEventBatch)


def stored(**changes: Any) -> Stored:
    """One event of two blocks."""
    event = Stored([-5, 2**62], None, [1, 2, 3, 4], 2, "CPU_PINNED", None, None)
    return event._replace(**changes)


def test_every_event_is_read_and_says_what_it_should() -> None:
    told: list[Event] = [None, (("GPU"), [7, -7]), stored(), stored(parent=-9, medium="GPU")]
    batch = _decoder.decode(encode_batch(told, FORM, 12.5))
    assert (batch.ts, batch.attn_dp_rank) == (12.5, 0)
    cleared, removed, first, second = batch.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (type(removed).__name__, removed.block_hashes, removed.medium) == (
        "BlockRemoved", [7, -7], "GPU",
    )  # fmt: skip
    assert type(first).__name__ == "BlockStored"
    assert (first.block_hashes, first.parent_block_hash) == ([-5, 2**62], None)
    assert (first.token_ids, first.block_size, first.lora_id) == ([1, 2, 3, 4], 2, None)
    assert (first.medium, second.medium) == ("CPU_PINNED", "GPU")
    assert second.parent_block_hash == -9


def test_an_empty_batch_is_read() -> None:
    assert _decoder.decode(encode_batch([], FORM, 1.0)).events == []


def test_the_other_form_is_refused_so_the_option_is_needed() -> None:
    with pytest.raises(msgspec.ValidationError):
        _decoder.decode(encode_batch([None], OTHER, 1.0))


@pytest.mark.parametrize("seed_", range(4))
def test_what_a_random_history_tells_is_read_whole(seed_: int) -> None:
    seen: set[str] = set()
    told = storm(seed_, FORM, records_max=10_000, patience=4).payloads
    assert told
    for payload in told:
        seen |= {type(event).__name__ for event in _decoder.decode(payload).events}
    assert seen == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.skipif(FORM == "array", reason="salts came later")
def test_salt_and_adapter_are_read() -> None:
    told: list[Event] = [stored(cache_salt="s", lora_name="adapter")]
    (event,) = _decoder.decode(encode_batch(told, FORM, 1.0)).events
    assert (event.cache_salt, event.lora_name) == ("s", "adapter")


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_our_hashes_are_sglangs(page_size: int) -> None:
    pick = random.Random(page_size)
    tokens = [pick.randrange(1 << 32) for _ in range(6 * page_size)]
    ours = chain(seed(None), array.array("I", tokens).tobytes(), 4 * page_size)
    prior = None
    for at in range(6):
        page = tokens[at * page_size : (at + 1) * page_size]
        prior = utils.get_hash_str(page, prior)
        assert ours[at].hex() == prior
        assert published(ours[at]) == utils.hash_str_to_int64(prior)
