"""What must never be shared is not, end to end: the rows F1 and F7 of the failure list."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import model
from tests.sglang.engines import Engine, Nursery
from tests.sglang.environments import VERSIONS
from tests.sglang.node import PATIENT, Node, floor
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LENGTH, PAGE = 200, 16
WHOLE = floor(LENGTH, PAGE)
PAGES = LENGTH // PAGE


@dataclass(slots=True)
class Sharing:
    """Two engines that have nothing against sharing; the tests use prompts of their own."""

    node: Node
    version: str
    a: Engine
    b: Engine


@pytest.fixture(scope="module")
def sharing(
    request: pytest.FixtureRequest,
    nursery: Callable[[str], Nursery],
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Sharing]:
    """The pair of one version; the last test that uses it gives one of them other weights."""
    version: str = request.param
    with Node(tmp_path_factory.mktemp("sharing"), nursery, models / "one") as node:
        a, b = (node.engine(name, version, page_size=PAGE) for name in ("a", "b"))
        yield Sharing(node, version, a.wait_up(), b.wait_up())
        node.assert_clean()


every_version = pytest.mark.parametrize(
    "sharing", [pytest.param("0.5.16", marks=pytest.mark.every_cell), "0.5.23"], indirect=True
)
newest = pytest.mark.parametrize("sharing", ["0.5.23"], indirect=True)


def prompt(seed: int) -> list[int]:
    """A prompt of the length that all tests here use."""
    return model.prompt(seed, LENGTH)


@every_version
def test_another_salt_never_shares_f1(sharing: Sharing) -> None:
    node, a, b = sharing.node, sharing.a, sharing.b
    with node.backed_up(PAGES):
        assert a.generate(prompt(1), extra_key="red").cached == 0
    for engine in (a, b):
        assert engine.generate(prompt(1)).cached == 0 or engine is b
        assert engine.generate(prompt(1), extra_key="blue").cached == (0 if engine is a else WHOLE)
    assert b.generate(prompt(1), extra_key="red").cached == WHOLE
    node.assert_clean()


@newest
def test_a_cache_salt_is_no_extra_key_f1(sharing: Sharing) -> None:
    node, a, b = sharing.node, sharing.a, sharing.b
    with node.backed_up(PAGES):
        assert a.generate(prompt(2), cache_salt="red").cached == 0
    assert b.generate(prompt(2), extra_key="red").cached == 0
    assert b.generate(prompt(2), extra_key="r", cache_salt="ed").cached == 0
    assert b.generate(prompt(2), cache_salt="red").cached == WHOLE
    node.assert_clean()


@every_version
def test_another_model_of_the_same_shape_never_shares_f1(sharing: Sharing, oracle: Oracle) -> None:
    node, version = sharing.node, sharing.version
    two = str(node.model.parent / "two")
    other = node.engine("two", version, page_size=PAGE, model_path=two).wait_up()
    for engine, named in ((sharing.a, "one"), (other, "two")):
        with node.backed_up(PAGES):
            cold = engine.generate(prompt(3))
        assert (cold.tokens, cold.cached) == (oracle.tokens(version, prompt(3), model=named), 0)
    node.assert_clean()
    other.stop()


@every_version
def test_another_dtype_never_shares_f1(sharing: Sharing) -> None:
    node = sharing.node
    other = node.engine("half", sharing.version, page_size=PAGE, dtype="bfloat16").wait_up()
    for engine in (sharing.a, other):
        with node.backed_up(PAGES):
            assert engine.generate(prompt(4)).cached == 0
        assert engine.generate(prompt(4)).cached == WHOLE
    node.assert_clean()
    other.stop()


@newest
def test_versions_are_apart_unless_told_to_share(sharing: Sharing, oracle: Oracle) -> None:
    node = sharing.node
    cold = oracle.tokens("0.5.16", prompt(5))
    older = node.engine("older", "0.5.16", page_size=PAGE).wait_up()
    with node.backed_up(PAGES):
        assert older.generate(prompt(5)).cached == 0
    answer = sharing.b.generate(prompt(5))
    assert (answer.tokens, answer.cached) == (cold, 0)
    older.stop()
    told = {**PATIENT, "TREECORED_SHARE_VERSIONS": "true"}
    one, two = (
        node.engine(f"told-{version}", version, page_size=PAGE, environ=told)
        for version in VERSIONS
    )
    with node.backed_up(PAGES):
        assert one.wait_up().generate(prompt(5)).cached == 0
    answer = two.wait_up().generate(prompt(5))
    assert (answer.tokens, answer.cached) == (cold, WHOLE)
    node.assert_clean()
    for engine in (one, two):
        engine.stop()


@every_version
def test_a_crafted_key_does_not_reach_an_adapters_pages_f1(
    sharing: Sharing, oracle: Oracle
) -> None:
    node, version = sharing.node, sharing.version
    lora: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_backend": "torch_native",
    }
    a, b = (node.engine(f"lora-{name}", version, page_size=PAGE, **lora) for name in "ab")
    loaded = a.wait_up().load_adapter("tuned", node.model.parent / "adapter")
    assert loaded.success, loaded.text
    with node.backed_up(PAGES):
        tuned = a.generate(prompt(6), lora="tuned")
    plain = oracle.tokens(version, prompt(6))
    assert tuned.tokens != plain, "the adapter changes nothing, so the test shows nothing"
    assert a.generate(prompt(6), lora="tuned").cached == WHOLE
    for engine in (a, b.wait_up()):
        crafted = engine.generate(prompt(6), extra_key=loaded.text)
        assert (crafted.tokens, crafted.cached) == (plain, 0 if engine is a else WHOLE)
        assert engine.generate(prompt(6)).tokens == plain
    node.assert_clean()
    for engine in (a, b):
        engine.stop()


@every_version
def test_old_pages_do_not_come_back_after_a_weight_update_f7(
    sharing: Sharing, oracle: Oracle
) -> None:
    node, version, a, b = sharing.node, sharing.version, sharing.a, sharing.b
    with node.backed_up(PAGES):
        a.generate(prompt(7))
    # SGLang (0.5.16) takes an update only when it is idle, which it is a moment after the answer.
    assert a.flush()
    updated = a.update_weights(node.model.parent / "two")
    assert updated.success, updated.text
    old = oracle.tokens(version, prompt(7))
    new = oracle.tokens(version, prompt(7), model="two")
    with node.backed_up(PAGES):
        after = a.generate(prompt(7))
    assert (after.tokens, after.cached) == (new, 0)
    again = a.generate(prompt(7))
    assert (again.tokens, again.cached) == (new, WHOLE)
    # The other engine has the old weights, and still shares what belongs to them.
    other = b.generate(prompt(7))
    assert (other.tokens, other.cached) == (old, WHOLE)
    node.assert_clean()
