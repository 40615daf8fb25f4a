"""A request's life through our cache: what is stored, what is freed, what is protected."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.sglang.cache.rig import NEW, SALTED, Engine, Pools, Req, our_cache

pytestmark = pytest.mark.sglang

PAGES = 64


@pytest.fixture(params=[1, 16, 64], ids=["page 1", "page 16", "page 64"])
def engine(request: pytest.FixtureRequest) -> Any:
    """Ours, alone."""
    pools = Pools(PAGES, request.param)
    engine = Engine(our_cache(pools), pools)
    yield engine
    assert engine.cache.shim.check() == []


def prompt(engine: Engine, pages: int, seed: int = 0, tail: int = 0) -> list[int]:
    """So many pages of tokens and some more."""
    return [seed * 100_000 + at for at in range(pages * engine.page + tail)]


def whole(engine: Engine, req: Req) -> int:
    """Tokens of the whole pages of its prompt."""
    return len(req.origin_input_ids) // engine.page * engine.page


def serve(engine: Engine, req: Req, output: int = 1) -> int:
    """A request's whole life; returns what it hit."""
    hit = engine.match(req)
    assert engine.admit(req)
    engine.checkpoint(req)
    if output:
        assert engine.decode(req, list(range(output)))
    engine.end(req)
    return hit


def test_what_one_request_stored_another_finds(engine: Engine) -> None:
    tail = engine.page // 2
    assert serve(engine, Req("a", prompt(engine, 4, tail=tail + 1))) == 0
    assert serve(engine, Req("b", prompt(engine, 4, tail=tail + 1))) == 4 * engine.page
    assert sum(engine.accounts()) == engine.pools.size


def test_nothing_is_left_of_a_request_but_its_whole_pages(engine: Engine) -> None:
    req = Req("a", prompt(engine, 3, tail=1))
    serve(engine, req, output=2)
    stored = (3 * engine.page + 2) // engine.page * engine.page
    assert engine.accounts() == (engine.pools.size - stored, stored, 0)


def test_a_duplicate_is_freed_once_and_the_row_is_the_trees_before_f13(engine: Engine) -> None:
    """Two requests compute one prompt at once; the second one's pages go, its row does not."""
    one, two = (Req(rid, prompt(engine, 5, tail=1)) for rid in "ab")
    assert engine.match(one) == engine.match(two) == 0
    assert engine.admit(one)
    assert engine.admit(two)
    engine.checkpoint(one)
    before = engine.accounts()
    engine.checkpoint(two)
    after = engine.accounts()
    assert after == (before[0] + whole(engine, two), before[1], before[2])
    same = slice(0, whole(engine, two))
    assert engine.row(one)[same].tolist() == engine.row(two)[same].tolist()
    for req in (one, two):
        engine.end(req)
    assert sum(engine.accounts()) == engine.pools.size


def test_a_duplicate_within_a_longer_path_goes_alone(engine: Engine) -> None:
    long, short = Req("long", prompt(engine, 6, tail=1)), Req("short", prompt(engine, 4, tail=1))
    engine.match(long)
    engine.match(short)
    assert engine.admit(long)
    assert engine.admit(short)
    engine.checkpoint(short)
    engine.checkpoint(long)
    assert engine.accounts()[2] == whole(engine, long)
    engine.end(short)
    engine.end(long)
    held = engine.cache.total_size()
    assert engine.accounts() == (engine.pools.size - held, held, 0)


def test_an_end_that_brings_nothing_new_names_nothing_and_leaves_the_tree_as_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt once more: its last page is computed again, and is the tree's already."""
    serve(engine, Req("a", prompt(engine, 4)), output=0)
    before = engine.accounts()
    again = Req("b", prompt(engine, 4))
    assert engine.match(again) == whole(engine, again) - engine.page
    assert engine.admit(again)
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.names, "name", _never)
        patch.setattr(engine.cache.shim.pool, "advance", _never)
        engine.end(again)
    assert engine.accounts() == before
    last = Req("c", prompt(engine, 5))
    assert engine.match(last) == 4 * engine.page, "and its pages hold what they must"


def test_an_end_that_brings_a_page_more_is_stored_though_the_tree_has_the_rest(
    engine: Engine,
) -> None:
    serve(engine, Req("a", prompt(engine, 4)), output=0)
    longer = Req("b", prompt(engine, 5))
    assert engine.match(longer) == 4 * engine.page
    assert engine.admit(longer)
    engine.end(longer)
    stored = 5 * engine.page
    assert engine.accounts() == (engine.pools.size - stored, stored, 0)


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is to be named, and nothing to be waited for")


@pytest.mark.parametrize("stored", [False, True])
def test_an_aborted_request_leaves_what_it_had_stored_and_nothing_else_f15(
    engine: Engine, stored: bool
) -> None:
    req = Req("a", prompt(engine, 4, tail=1))
    engine.match(req)
    assert engine.admit(req)
    if stored:
        engine.checkpoint(req)
        assert engine.decode(req, list(range(engine.page + 1)))
    engine.end(req, insert=False)
    held = whole(engine, req) if stored else 0
    assert engine.accounts() == (engine.pools.size - held, held, 0)


def test_a_prompt_in_chunks_is_stored_chunk_by_chunk(engine: Engine) -> None:
    req = Req("a", prompt(engine, 8, tail=1))
    engine.match(req)
    chunk = 2 * engine.page + engine.page // 2
    assert engine.admit(req, chunk)
    engine.checkpoint(req, chunked=True)
    while req.prefix_len < len(req.origin_input_ids):
        stored = req.holder.cache_protected_len
        assert stored == req.prefix_len // engine.page * engine.page
        assert engine.accounts()[2] == stored
        assert engine.compute(req, min(req.prefix_len + chunk, len(req.origin_input_ids)))
        engine.checkpoint(req, chunked=True)
    assert serve_other(engine) == 8 * engine.page
    engine.end(req)


def serve_other(engine: Engine) -> int:
    """Another request over the same prompt."""
    return serve(engine, Req("other", prompt(engine, 8, tail=1)))


def test_a_retracted_request_finds_its_own_pages_again(engine: Engine) -> None:
    req = Req("a", prompt(engine, 4, tail=1))
    engine.match(req)
    assert engine.admit(req)
    engine.checkpoint(req)
    assert engine.decode(req, [7, 8, 9])
    engine.end(req, insert=False)
    req.last_node = None
    assert engine.match(req) == whole(engine, req)
    assert engine.admit(req)
    engine.checkpoint(req)
    engine.end(req)


def test_what_is_locked_is_not_evicted_and_what_is_not_goes_to_the_page(engine: Engine) -> None:
    held, cold = Req("held", prompt(engine, 10, tail=1)), Req("cold", prompt(engine, 20, 1, 1))
    serve(engine, cold, output=0)
    engine.match(held)
    assert engine.admit(held)
    engine.checkpoint(held)
    free, evictable, protected = engine.accounts()
    assert protected == whole(engine, held)
    result = engine.cache.evict(EvictParams(num_tokens=3 * engine.page))
    assert result.num_tokens_evicted == 3 * engine.page
    assert engine.accounts() == (free + 3 * engine.page, evictable - 3 * engine.page, protected)
    assert not engine.make_room(engine.pools.size), "it must not evict what is locked"
    assert engine.accounts()[1:] == (0, protected)
    engine.verify(held, engine.row(held)[: held.extend_end].long())
    engine.end(held)


def test_a_handle_outlives_a_merge_of_the_node_that_it_was_made_from(engine: Engine) -> None:
    """A match in the middle of a node splits it; what follows is evicted and merged meanwhile."""
    serve(engine, Req("a", prompt(engine, 8, tail=1)), output=0)
    other = prompt(engine, 4) + prompt(engine, 2, 9, 1)
    half = Req("half", prompt(engine, 4, tail=1))
    assert engine.match(half) == 4 * engine.page
    serve(engine, Req("fork", other), output=0)
    engine.cache.evict(EvictParams(num_tokens=4 * engine.page))
    assert engine.admit(half)
    engine.checkpoint(half)
    engine.end(half)
    assert serve(engine, Req("again", prompt(engine, 4, tail=1))) == 4 * engine.page


def test_a_reset_gives_everything_back(engine: Engine) -> None:
    serve(engine, Req("a", prompt(engine, 8, tail=1)))
    serve(engine, Req("b", prompt(engine, 8, 1, 1)))
    engine.cache.reset()
    assert engine.accounts() == (engine.pools.size, 0, 0)
    assert serve(engine, Req("c", prompt(engine, 8, tail=1))) == 0


def test_without_a_tree_nothing_is_stored_and_all_is_freed() -> None:
    pools = Pools(PAGES, 16)
    engine = Engine(our_cache(pools, disable=True), pools)
    for rid in "ab":
        assert serve(engine, Req(rid, prompt(engine, 4, tail=3))) == 0
    assert engine.accounts() == (pools.size, 0, 0)


def test_what_was_computed_under_other_weights_is_never_stored(engine: Engine) -> None:
    req = Req("a", prompt(engine, 6, tail=1))
    engine.match(req)
    assert engine.admit(req, 3 * engine.page)
    engine.checkpoint(req, chunked=True)
    engine.cache.shim.change_weights(7)
    assert engine.compute(req, 6 * engine.page)
    engine.checkpoint(req, chunked=True)
    assert req.holder.cache_protected_len == 3 * engine.page
    engine.end(req)
    assert engine.accounts() == (engine.pools.size - 3 * engine.page, 3 * engine.page, 0)
    assert serve(engine, Req("b", prompt(engine, 6, tail=1))) == 0


def test_a_prompt_of_which_nothing_may_match_belongs_to_the_weights_it_began_under_f7(
    engine: Engine,
) -> None:
    """One token, or all of whose log-probabilities are wanted: SGLang looks up an empty key."""
    req = Req("a", prompt(engine, 0, tail=1))
    assert engine.match(req) == 0
    assert engine.admit(req)
    req.prefix_len = req.extend_end  # computed, and nothing of it stored yet
    engine.cache.shim.change_weights(7)
    assert engine.decode(req, list(range(2 * engine.page)))
    engine.end(req)
    assert engine.accounts() == (engine.pools.size, 0, 0)


@pytest.mark.skipif(not NEW, reason="this SGLang keeps no request out of the tree by name")
def test_the_row_of_a_request_that_is_kept_out_of_the_tree_stays_as_it_is(engine: Engine) -> None:
    """What was loaded for it belongs to it alone: other rows may share its pages (beams do)."""
    req, other = (Req(rid, prompt(engine, 4, tail=1)) for rid in "ab")
    for one in (req, other):
        engine.match(one)
        assert engine.admit(one)
    req.skip_radix_cache_insert = True
    engine.checkpoint(other)
    before = engine.row(req)[: req.extend_end].tolist()
    engine.cache.publish_loaded(req, 4)
    assert engine.row(req)[: req.extend_end].tolist() == before
    assert req.holder.cache_protected_len == 0
    for one in (req, other):
        engine.end(one, insert=False)
    assert engine.accounts()[2] == 0


def test_the_same_tokens_under_other_keys_never_meet_f1() -> None:
    """Salt, extra key and adapter, in every pair of which one could be taken for the other."""
    pools = Pools(PAGES, 4)
    engine = Engine(our_cache(pools), pools)
    tokens = prompt(engine, 2, tail=1)
    adapter = "0123456789abcdef0123456789abcdef"
    parts: list[dict[str, str]] = [
        {},
        {"extra_key": ""},
        {"extra_key": "ab"},
        {"extra_key": "a" + adapter},
        {"extra_key": "a", "lora_id": adapter},
        {"extra_key": adapter},
        {"lora_id": adapter},
    ]
    if SALTED:
        parts += [{"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"}]
    for number, some in enumerate(parts):
        assert serve(engine, Req(f"r{number}", tokens, **some)) == 0, some
    for number, some in enumerate(parts):
        assert engine.match(Req(f"again {number}", tokens, **some)) == 8, some


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_one_token_is_always_left_to_compute_f32(engine: Engine, more: int) -> None:
    tokens = prompt(engine, 4, tail=2)[: 3 * engine.page + more]
    serve(engine, Req("a", tokens), output=0)
    hit = serve(engine, Req("b", tokens))
    assert hit == (len(tokens) - 1) // engine.page * engine.page


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pairs_of_tokens_are_stored_as_far_as_they_are_whole_f9(page_size: int) -> None:
    """A prompt of n tokens has n - 1 pairs, and what is left of it stays the request's."""
    pools = Pools(PAGES, page_size)
    engine = Engine(our_cache(pools, is_eagle=True), pools)
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1]
    for number, length in enumerate(max(length, 1) for length in lengths):
        tokens = [number * 1_000 + at for at in range(length)]
        first = Req(f"a{number}", tokens)
        assert engine.match(first) == 0
        assert engine.admit(first)
        engine.checkpoint(first)
        stored = (length - 1) // page_size * page_size
        assert first.holder.cache_protected_len == stored
        engine.end(first)
        # A longer prompt that begins alike: all of the pairs that are stored are its own too.
        second = Req(f"b{number}", [*tokens, 5, 6])
        assert engine.match(second) == stored
        assert engine.admit(second)
        engine.checkpoint(second)
        assert engine.decode(second, [1, 2, 3])
        engine.end(second)
        assert sum(engine.accounts()) == pools.size
    assert engine.accounts()[2] == 0
    assert engine.cache.shim.check() == []


@pytest.mark.parametrize("until", ["matched", "admitted", "checkpointed", "decoded"])
def test_no_lock_is_left_wherever_a_request_ends_f72(engine: Engine, until: str) -> None:
    serve(engine, Req("before", prompt(engine, 3, tail=1)))
    req = Req("a", prompt(engine, 6, tail=1))
    engine.match(req)
    if until != "matched":
        assert engine.admit(req)
        if until != "admitted":
            engine.checkpoint(req)
        if until == "decoded":
            assert engine.decode(req, list(range(engine.page + 2)))
        engine.end(req, insert=False)
    assert engine.accounts()[2] == 0
    assert list(engine.cache.shim.rows()) == []
    assert sum(engine.accounts()) == engine.pools.size
