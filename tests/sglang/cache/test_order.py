"""The order of waiting requests by depth and weight, as SGLang's own caches give it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from directory.core.namespace import NamespaceKey
from scheduler_shim.own_tree import Found
from scheduler_shim.sglang.handles import Handle, grow
from tests.sglang.cache.rig import NEW, Engine, Pools, Req, our_cache, stock_cache
from tests.sglang.cache.test_requests import serve

pytestmark = pytest.mark.sglang

PAGE = 4


def waiting(engine: Engine, prompts: list[list[int]]) -> list[Req]:
    """Requests in the queue, matched as the policy does it before it sorts."""
    found = [Req(f"w{number}", tokens) for number, tokens in enumerate(prompts)]
    for req in found:
        engine.match(req)
    return found


def order(engine: Engine, queue: list[Req]) -> list[str]:
    """What SGLang's scheduler makes of the queue."""
    if NEW:
        places = engine.cache.dfs_weight_order([req.last_node for req in queue])
        return [queue[at].rid for at in places]
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    queue = list(queue)
    SchedulePolicy._sort_by_dfs_weight(queue, engine.cache)
    return [req.rid for req in queue]


def engines() -> tuple[Engine, Engine]:
    """SGLang's and ours."""
    made = []
    for ours in (False, True):
        pools = Pools(200, PAGE)
        cache = our_cache(pools) if ours else stock_cache(pools, "python" if NEW else "radix")
        made.append(Engine(cache, pools))
    return made[0], made[1]


def family(*parts: int, pages: int = 2) -> list[int]:
    """A prompt of parts of so many pages each, and one token."""
    return [part for part in parts for _ in range(pages * PAGE)] + [999]


def test_requests_of_one_prefix_stand_together_and_the_heavy_first() -> None:
    prompts = [
        family(1, 2, 3),
        family(5, 6),
        family(1, 2, 4),
        family(7),
        family(5, 8),
        family(1, 9),
        family(77),
    ]
    orders = []
    for engine in engines():
        for number, tokens in enumerate(prompts[:-1]):
            serve(engine, Req(f"s{number}", tokens), output=0)
        orders.append(order(engine, waiting(engine, prompts)))
    theirs, mine = orders
    assert sorted(mine) == sorted(theirs)
    groups = [set(mine[:3]), set(mine[3:5]), set(mine[5:6]), set(mine[6:])]
    assert groups == [{"w0", "w2", "w5"}, {"w1", "w4"}, {"w3"}, {"w6"}]
    assert groups == [set(theirs[:3]), set(theirs[3:5]), set(theirs[5:6]), set(theirs[6:])]
    assert mine.index("w5") > max(mine.index("w0"), mine.index("w2"))


def test_no_waiting_request_is_lost_whatever_is_cached() -> None:
    """The oldest dialect empties its queue and fills it by walking the tree."""
    draw = random.Random(5)
    for engine in engines()[1:]:
        for number in range(60):
            tokens = family(*(draw.randint(1, 3) for _ in range(draw.randint(1, 4))))
            if number % 2:
                serve(engine, Req(f"s{number}", tokens), output=0)
            prompts = [
                family(*(draw.randint(1, 3) for _ in range(draw.randint(1, 4)))) for _ in range(9)
            ]
            queue = waiting(engine, prompts)
            assert sorted(order(engine, queue)) == sorted(req.rid for req in queue)


def test_paths_part_between_pages_only() -> None:
    key = NamespaceKey()
    paths = [b"aaaabbbb", b"aaaabbcc", b"aaaa", b"aaaabbbbcccc", b"zzzz"]
    root, *handles = [handle_of(key, path) for path in [b"", *paths]]
    grow(root, handles, lambda _: 4)
    first, second = root.children.values()
    assert (first, second) == (handles[2], handles[4])
    assert list(first.children.values()) == [handles[0], handles[1]]
    assert list(handles[0].children.values()) == [handles[3]]


def test_a_fork_stands_where_no_path_ends() -> None:
    key = NamespaceKey()
    root, *handles = [handle_of(key, path) for path in (b"", b"aaaabbbb", b"aaaacccc", b"zzzz")]
    grow(root, handles, lambda _: 4)
    by_size = sorted(root.children.values(), key=lambda at: len(at.children))
    assert by_size[0] is handles[2]
    assert list(by_size[1].children.values()) == handles[:2]
    assert not isinstance(by_size[1], Handle)


def handle_of(key: NamespaceKey, tokens: bytes) -> Handle:
    """A handle whose pages are four bytes of tokens each."""
    return Handle(key, tokens, Found(bytes(len(tokens))))
