"""What one engine has computed another reuses: every version, page size and mode.

Each cell is a pair of engines with one daemon. The tests of a cell share the pair and use prompts
of their own. The tokens of every answer are compared with those of a stock engine that caches
nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sglang import model, wire
from tests.sglang.engines import Engine, Nursery
from tests.sglang.environments import VERSIONS
from tests.sglang.node import Mode, Node, floor
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LENGTH = 400
POOL = 1024


class Cell(NamedTuple):
    """What all engines of a cell have in common. `latent`: a model with latent attention (MLA)
    and its kind of pool; `overlap`: SGLang prepares a step while the one before is computed."""

    version: str
    page_size: int
    mode: Mode
    latent: bool = False
    overlap: bool = False

    @property
    def model(self) -> str:
        """The model's name among the tests' models."""
        return "latent" if self.latent else "one"

    def start(self, node: Node, name: str) -> Engine:
        """Start an engine."""
        return node.engine(
            name,
            self.version,
            self.mode,
            page_size=self.page_size,
            max_total_tokens=POOL,
            disable_overlap_schedule=not self.overlap,
        )

    def __str__(self) -> str:
        more = " latent" * self.latent + " overlap" * self.overlap
        return f"{self.version} page {self.page_size} {self.mode}{more}"


IN_CI = {
    Cell("0.5.16", 16, "thin"),
    Cell("0.5.23", 1, "mirrored"),
    Cell("0.5.23", 64, "thin"),
}
"""Together each version, page size and mode; the others run with `make engines`."""

VARIANTS = (
    Cell("0.5.16", 16, "thin", latent=True),
    Cell("0.5.23", 16, "mirrored", latent=True),
    Cell("0.5.16", 16, "mirrored", overlap=True),
    Cell("0.5.23", 16, "thin", overlap=True),
)


@dataclass(slots=True)
class Pair:
    """Two engines of a cell and what is needed to judge them."""

    node: Node
    cell: Cell
    oracle: Oracle
    a: Engine
    b: Engine

    @property
    def page_size(self) -> int:
        """The cell's."""
        return self.cell.page_size

    def start(self, name: str) -> Engine:
        """Another engine like the two."""
        return self.cell.start(self.node, name)

    def cold(self, prompt: list[int]) -> list[int]:
        """The answer to a prompt where nothing is cached."""
        return self.oracle.tokens(self.cell.version, prompt, model=self.cell.model)

    def ask(self, engine: Engine, seed: int) -> wire.Output:
        """Have a prompt served and its tokens compared."""
        prompt = model.prompt(seed, LENGTH)
        output = engine.generate(prompt)
        assert output.tokens == self.cold(prompt)
        return output

    def serve(self, engine: Engine, seed: int) -> None:
        """Have a new prompt computed, and wait until the host tier has it."""
        with self.node.backed_up(LENGTH // self.page_size):
            assert self.ask(engine, seed).cached == 0

    def push_out(self, engine: Engine, seeds: range) -> None:
        """Have so many new prompts served that the pool has no room for what was there before."""
        assert len(seeds) * LENGTH > POOL
        for seed in seeds:
            self.serve(engine, seed)

    @property
    def whole(self) -> int:
        """Cached tokens of a whole hit."""
        return floor(LENGTH, self.page_size)


def cells() -> Iterator[object]:
    """Every cell; those that are not for CI are for `make engines`."""
    modes: tuple[Mode, ...] = ("mirrored", "thin")
    plain = [
        Cell(version, page_size, mode)
        for version in VERSIONS
        for page_size in (1, 16, 64)
        for mode in modes
    ]
    for cell in (*plain, *VARIANTS):
        marks = () if cell in IN_CI else pytest.mark.every_cell
        yield pytest.param(cell, marks=marks, id=str(cell))


@pytest.fixture(scope="class", params=cells())
def pair(
    request: pytest.FixtureRequest,
    nursery: Callable[[str], Nursery],
    models: Path,
    oracle: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    cell: Cell = request.param
    with Node(tmp_path_factory.mktemp("cell"), nursery, models / cell.model) as node:
        a, b = cell.start(node, "a"), cell.start(node, "b")
        yield Pair(node, cell, oracle, a.wait_up(), b.wait_up())
        node.assert_clean()


class TestCell:
    """One cell's tests, in order."""

    def test_a_prompt_that_was_served_before_hits_the_own_pool(self, pair: Pair) -> None:
        pair.serve(pair.a, 1)
        again = pair.ask(pair.a, 1)
        assert again.cached == pair.whole
        assert again.details == {"device": pair.whole, "host": 0}

    def test_the_other_engine_reuses_it_at_its_first_request(self, pair: Pair) -> None:
        pair.serve(pair.a, 2)
        assert pair.ask(pair.b, 2).cached == pair.whole
        assert pair.ask(pair.b, 2).cached == pair.whole

    def test_the_other_way_round(self, pair: Pair) -> None:
        pair.serve(pair.b, 3)
        assert pair.ask(pair.a, 3).cached == pair.whole

    def test_an_evicted_prompt_comes_back_from_the_host_tier(self, pair: Pair) -> None:
        pair.serve(pair.a, 4)
        pair.push_out(pair.a, range(5, 8))
        again = pair.ask(pair.a, 4)
        assert again.cached == pair.whole
        assert again.details == {"device": 0, "host": pair.whole}

    def test_the_other_engine_reuses_what_its_owner_has_evicted(self, pair: Pair) -> None:
        pair.serve(pair.a, 8)
        pair.push_out(pair.a, range(9, 12))
        assert pair.ask(pair.b, 8).cached == pair.whole

    def test_a_longer_prompt_reuses_the_part_that_is_known(self, pair: Pair) -> None:
        pair.serve(pair.a, 12)
        known = LENGTH // pair.page_size * pair.page_size
        longer = [*model.prompt(12, LENGTH), *model.prompt(13, 100)]
        output = pair.b.generate(longer)
        assert output.cached == known
        assert output.tokens == pair.cold(longer)

    def test_what_a_killed_engine_had_computed_is_still_there(self, pair: Pair) -> None:
        doomed = pair.start("doomed").wait_up()
        pair.serve(doomed, 14)
        pools = len(pair.node.report().pools)
        doomed.kill()
        pair.node.wait_for(lambda report: len(report.pools) == pools - 1)
        assert pair.ask(pair.b, 14).cached == pair.whole

    def test_a_new_engine_hits_with_its_very_first_request(self, pair: Pair) -> None:
        pair.serve(pair.b, 15)
        fresh = pair.start("fresh").wait_up()
        assert pair.ask(fresh, 15).cached == pair.whole
        fresh.stop()


@pytest.mark.every_cell
@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_that_was_started_the_usual_way_shares_too(
    version: str, node: Node, oracle: Oracle
) -> None:
    usual = node.spawned("usual", version, page_size=16)
    forked = node.engine("forked", version, page_size=16).wait_up()
    prompt = model.prompt(1, LENGTH)
    with node.backed_up(LENGTH // 16):
        forked.generate(prompt)
    answer = usual.wait_up().generate(prompt)
    assert answer.cached == floor(LENGTH, 16)
    assert answer.tokens == oracle.tokens(version, prompt)
    node.assert_clean()
