"""SGLang's own caches and ours: the same hits, frees and sums for the same 10,000 operations."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from tests.sglang.cache.parity import beside_stock
from tests.sglang.cache.rig import NEW

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

OPERATIONS = 10_000
LONG = pytest.mark.every_cell
CORES = (
    ["rust", pytest.param("python", marks=LONG)]
    if NEW
    else ["radix", pytest.param("unified", marks=LONG)]
)
"""Of each version one core is compared in every run of the tests, the other one in the long run."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("core", CORES)
def test_ten_thousand_operations_come_to_the_same(core: str, page_size: int) -> None:
    parity = beside_stock(core, page_size, seed=page_size)
    for number in range(OPERATIONS):
        try:
            name = parity.step()
        except AssertionError as error:
            raise AssertionError(f"operation {number}: {error}") from error
        if number % 1_000 == 0:
            assert parity.ours.cache.shim.check() == [], f"operation {number}, {name}"
    assert set(parity.counts) >= {"start", "extend", "decode", "finish", "abort", "look", "evict"}
    assert parity.ours.cache.shim.check() == []
