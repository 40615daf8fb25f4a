"""The rounds of the group `rows`: what is compared is asked under the same circumstances.

Real `Rows` at the scales that count, over engines that are no more than pools of prompts, of which
the one that was asked longest ago gives up pages first: treecored's from its end, as many as are
wanted, SGLang's own all it has. So an order of asking that finds a prompt where it should not be
any more, or a part of it, fails here, and not on a GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import pytest

from benchmarks.sglang_gpu import own, rows
from benchmarks.sglang_gpu.cores import Seat
from benchmarks.sglang_gpu.scales import SCALES
from tests.sglang import wire

ALL: Final = ("b", "n", "stock", "hicache")
ORDERS: Final = 16


@pytest.mark.parametrize("engines", [ALL, ("b", "stock", "hicache")], ids=["two-gpus", "one-gpu"])
def test_no_column_follows_another_of_its_engine_and_what_is_compared_takes_every_place_alike(
    engines: tuple[str, ...],
) -> None:
    orders = [rows.order(number, engines) for number in range(ORDERS)]
    columns = [name for name, engine in rows.ASKED_OF.items() if engine in engines]
    for asked in orders:
        assert sorted(asked) == sorted(columns)
        of = [rows.ASKED_OF[column] for column in asked]
        assert all(one != other for one, other in pairwise(["stock", *of]))
    places = {name: sum(asked.index(name) for asked in orders) / ORDERS for name in columns}
    assert set(places.values()) == {(len(columns) - 1) / 2}
    for ours, theirs in rows.GOALS:
        if {ours, theirs} <= set(columns):
            apart = [asked.index(ours) - asked.index(theirs) for asked in orders]
            assert max(map(abs, apart)) <= 2
            assert sum(at > 0 for at in apart) == ORDERS / 2


class Node:
    """What the engines of a tree, or one alone, have in common: the host tier, the pools, and the
    log of everything that any of them was asked."""

    def __init__(self, log: list[tuple[str, int, str]], page: int = 64) -> None:
        self.log = log
        self.page = page
        self.host: set[tuple[int, ...]] = set()
        self.pools: list[Model] = []
        self.counters = dict.fromkeys(
            ("pages_backed_up", "host_pages_restored", "peer_pages_restored"), 0
        )


class Model:
    """An engine with a pool of so many tokens, that backs up what it computes where it can.
    `whole`: a prompt leaves its pool whole."""

    def __init__(
        self, name: str, tokens: int, node: Node, *, tiers: bool = True, whole: bool = False
    ) -> None:
        self.name = name
        self.size = tokens
        self.node = node
        self.tiers = tiers
        self.whole = whole
        self.pool: OrderedDict[tuple[int, ...], int] = OrderedDict()
        node.pools.append(self)

    def flush(self) -> None:
        """Of a and b, once, while the prompts are prepared."""
        self.pool.clear()

    def generate(self, tokens: list[int], new: int) -> wire.Output:
        return self.collect(self.submit(tokens, new))

    def submit(self, tokens: list[int], _new: int) -> tuple[int, ...]:
        return tuple(tokens)

    def collect(self, tokens: tuple[int, ...], _deadline_s: float = 0) -> wire.Output:
        node = self.node
        pages, there = (len(tokens) - 1) // node.page, self.pool.get(tokens, 0) // node.page
        source = self._source(tokens)
        node.log.append((self.name, len(tokens), source))
        if source in ("host", "peer"):
            node.counters[f"{source}_pages_restored"] += pages - there
        if not source and self.tiers:
            node.counters["pages_backed_up"] += len(tokens) // node.page
            node.host.add(tokens)
        self.pool[tokens] = len(tokens)
        self.pool.move_to_end(tokens)
        while (over := sum(self.pool.values()) - self.size) > 0:
            coldest = next(iter(self.pool))
            if self.whole or over >= self.pool[coldest]:
                del self.pool[coldest]
            else:
                self.pool[coldest] -= over
        found = pages * node.page if source else 0
        details: dict[str, object] = {"host": found if source in ("host", "peer") else 0}
        return wire.Output("r", [7], found, details, "length", (0.1,))

    def _source(self, tokens: tuple[int, ...]) -> str:
        if self.pool.get(tokens) == len(tokens):
            return "own"
        if any(other.pool.get(tokens) == len(tokens) for other in self.node.pools):
            return "peer"
        return "host" if tokens in self.node.host else ""


class Tree:
    """As much of a `Pair` as a table asks of it."""

    def __init__(self, node: Node) -> None:
        self.given = {"page_size": node.page}
        self.counters = node.counters

    def report(self) -> Tree:
        return self

    at_rest = report


class Unseated(rows.Rows):
    """Models have no processes."""

    def _seat(self) -> None:
        """Nobody is moved."""


class UnseatedOwn(own.Own):
    """Nor have these."""

    def _seat(self) -> None:
        """Nobody is moved."""


def table(
    scale_name: str, names: str, of: type[rows.Rows] = Unseated
) -> tuple[rows.Rows, list[tuple[str, int, str]]]:
    """The table of a scale over models, and the log of what they are asked."""
    scale = SCALES[scale_name]
    log: list[tuple[str, int, str]] = []
    node = Node(log)
    pools = {"n": scale.rows_pool_other, "a": scale.rows_pool_source(node.page)}
    engines = {name: Model(name, pools.get(name, scale.rows_pool), node) for name in names}
    if "stock" in of.BESIDE:
        engines["stock"] = Model("stock", scale.rows_pool, Node(log), tiers=False, whole=True)
    if "hicache" in of.BESIDE:
        engines["hicache"] = Model("hicache", scale.hicache_pool, Node(log), whole=True)
    pair: Any = Tree(node)
    asked: Any = engines
    return of(pair, asked, scale, 0, Seat(None)), log


def in_rounds(of: rows.Rows, at: int, pairs: int) -> Iterator[rows.Column]:
    column: rows.Column = {}
    for _ in of._rounds(at, of.lengths(of.scale)[at][0], column, pairs):
        yield column


@pytest.mark.parametrize("names", ["abn", "ab"], ids=["two-gpus", "one-gpu"])
@pytest.mark.parametrize(
    ("scale", "at"),
    [(scale, at) for scale in ("full", "smoke") for at in range(len(SCALES[scale].rows_lengths))],
)
def test_everything_is_where_its_column_says_in_every_order(
    scale: str, at: int, names: str
) -> None:
    of, _ = table(scale, names)
    (*_, column) = in_rounds(of, at, 24)
    assert of.misses == []
    counts = {name: len(ms) for name, ms in column.items() if name != "cold"}
    assert counts == {name: 24 for name, of_ in rows.ASKED_OF.items() if of_ in of.engines}


@pytest.mark.parametrize("names", ["abn", "ab"], ids=["two-gpus", "one-gpu"])
def test_each_timed_request_follows_a_hit_of_its_engine_that_follows_another_engine(
    names: str,
) -> None:
    of, log = table("smoke", names)
    timed: list[int] = []
    check = of._check

    def checked(column: str, answer: wire.Output, whole: int, *, restored: bool) -> None:
        check(column, answer, whole, restored=restored)
        if column in rows.ASKED_OF:
            timed.append(len(log) - 1)

    of._check = checked  # type: ignore[method-assign]
    for _ in in_rounds(of, 0, 18):
        pass
    columns = [name for name, engine in rows.ASKED_OF.items() if engine in of.engines]
    assert len(timed) == (1 + 18) * len(columns)
    for at in timed:
        (before, _, _), hit, (name, length, _) = log[at - 2 : at + 1]
        assert hit == (name, length, "own")
        assert before != name


def test_a_hit_that_does_not_count_and_is_none_fails_the_run() -> None:
    of, _ = table("smoke", "ab")
    asking = in_rounds(of, 0, 2 * rows.SEATED_FOR)
    next(asking)
    stock: Any = of.engines["stock"]
    stock.flush()
    next(asking)
    assert of.misses[0].startswith("uncounted hit: 0 of")


@pytest.mark.parametrize(
    ("scale", "at"),
    [(scale, at) for scale in ("full", "smoke") for at in range(len(SCALES[scale].own_pairs))],
)
def test_own_and_stock_are_asked_in_turn_and_each_goes_first_as_often_after_a_hit_of_its_own(
    scale: str, at: int
) -> None:
    of, log = table(scale, "b", UnseatedOwn)
    began: list[int] = []
    ask = of._ask

    def noted(name: str, *given: Any) -> None:
        began.append(len(log))
        ask(name, *given)

    of._ask = noted  # type: ignore[method-assign, assignment]
    (*_, column) = in_rounds(of, at, 20)
    assert of.misses == []
    assert {name: len(ms) for name, ms in column.items()} == {"own": 20, "stock own": 20}
    length = of.lengths(of.scale)[at][0]
    assert all(log[at - 1] == log[at] == (log[at][0], length, "own") for at in began)
    pairs = [
        (log[first][0], log[second][0])
        for first, second in zip(began[::2], began[1::2], strict=True)
    ]
    assert set(pairs[::2]) == {("b", "stock")}
    assert set(pairs[1::2]) == {("stock", "b")}
    apart = {second - first for first, second in zip(began[::2], began[1::2], strict=True)}
    assert apart == {2}, "one uncounted hit stands between the two of a pair"


def test_a_page_that_moves_while_all_is_in_the_pools_fails_the_run() -> None:
    of, _ = table("smoke", "b", UnseatedOwn)
    asking = in_rounds(of, 0, rows.SEATED_FOR + 1)
    next(asking)
    tree: Any = of.pair
    tree.counters["host_pages_restored"] += 1
    assert list(asking)
    assert of.misses == ["pages were moved while all was in the pools: [33, 0, 0], [33, 1, 0]"]
