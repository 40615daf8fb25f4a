"""What must never be shared is not, end to end: the rows F1 and F7 of the failure list."""

from typing import Any

import pytest

from tests.sglang import model
from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS
from tests.sglang.node import PATIENT, Node, floor
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LENGTH, PAGE = 200, 16
WHOLE = floor(LENGTH, PAGE)
PAGES = LENGTH // PAGE

every_version = pytest.mark.parametrize(
    "version", [pytest.param("0.5.16", marks=pytest.mark.every_cell), "0.5.23"]
)


def prompt(seed: int) -> list[int]:
    """A prompt of the length that all tests here use."""
    return model.prompt(seed, LENGTH)


def pair(node: Node, version: str, **given: Any) -> tuple[Engine, Engine]:
    """Two engines that have nothing against sharing."""
    a = node.engine("a", version, page_size=PAGE, **given)
    b = node.engine("b", version, page_size=PAGE, **given)
    return a.wait_up(), b.wait_up()


@every_version
def test_another_salt_never_shares_f1(version: str, node: Node) -> None:
    a, b = pair(node, version)
    with node.backed_up(PAGES):
        assert a.generate(prompt(1), extra_key="red").cached == 0
    for engine in (a, b):
        assert engine.generate(prompt(1)).cached == 0 or engine is b
        assert engine.generate(prompt(1), extra_key="blue").cached == (0 if engine is a else WHOLE)
    assert b.generate(prompt(1), extra_key="red").cached == WHOLE
    node.assert_clean()


def test_a_cache_salt_is_no_extra_key_f1(node: Node) -> None:
    a, b = pair(node, "0.5.23")
    with node.backed_up(PAGES):
        assert a.generate(prompt(1), cache_salt="red").cached == 0
    assert b.generate(prompt(1), extra_key="red").cached == 0
    assert b.generate(prompt(1), extra_key="r", cache_salt="ed").cached == 0
    assert b.generate(prompt(1), cache_salt="red").cached == WHOLE
    node.assert_clean()


@every_version
def test_a_crafted_key_does_not_reach_an_adapters_pages_f1(
    version: str, node: Node, oracle: Oracle
) -> None:
    lora = {
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_backend": "torch_native",
    }
    a, b = pair(node, version, **lora)
    loaded = a.load_adapter("tuned", node.model.parent / "adapter")
    assert loaded.success, loaded.text
    with node.backed_up(PAGES):
        tuned = a.generate(prompt(1), lora="tuned")
    plain = oracle.tokens(version, prompt(1))
    assert tuned.tokens != plain, "the adapter changes nothing, so the test shows nothing"
    assert a.generate(prompt(1), lora="tuned").cached == WHOLE
    for engine in (a, b):
        crafted = engine.generate(prompt(1), extra_key=loaded.text)
        assert (crafted.tokens, crafted.cached) == (plain, 0 if engine is a else WHOLE)
        assert engine.generate(prompt(1)).tokens == plain
    node.assert_clean()


@every_version
def test_another_model_of_the_same_shape_never_shares_f1(
    version: str, node: Node, oracle: Oracle
) -> None:
    a = node.engine("a", version, page_size=PAGE)
    other = str(node.model.parent / "two")
    b = node.engine("b", version, page_size=PAGE, model_path=other)
    for engine in (a.wait_up(), b.wait_up()):
        with node.backed_up(PAGES):
            cold = engine.generate(prompt(1))
        named = "one" if engine is a else "two"
        assert (cold.tokens, cold.cached) == (oracle.tokens(version, prompt(1), model=named), 0)
    node.assert_clean()


@every_version
def test_another_dtype_never_shares_f1(version: str, node: Node) -> None:
    a = node.engine("a", version, page_size=PAGE)
    b = node.engine("b", version, page_size=PAGE, dtype="bfloat16")
    for engine in (a.wait_up(), b.wait_up()):
        with node.backed_up(PAGES):
            assert engine.generate(prompt(1)).cached == 0
        assert engine.generate(prompt(1)).cached == WHOLE
    node.assert_clean()


@every_version
def test_old_pages_do_not_come_back_after_a_weight_update_f7(
    version: str, node: Node, oracle: Oracle
) -> None:
    a, b = pair(node, version)
    with node.backed_up(PAGES):
        a.generate(prompt(1))
    # SGLang (0.5.16) takes an update only when it is idle, which it is a moment after the answer.
    assert a.flush()
    updated = a.update_weights(node.model.parent / "two")
    assert updated.success, updated.text
    old = oracle.tokens(version, prompt(1))
    new = oracle.tokens(version, prompt(1), model="two")
    with node.backed_up(PAGES):
        after = a.generate(prompt(1))
    assert (after.tokens, after.cached) == (new, 0)
    again = a.generate(prompt(1))
    assert (again.tokens, again.cached) == (new, WHOLE)
    # The other engine has the old weights, and still shares what belongs to them.
    other = b.generate(prompt(1))
    assert (other.tokens, other.cached) == (old, WHOLE)
    node.assert_clean()


def test_versions_are_apart_unless_told_to_share(node: Node, oracle: Oracle) -> None:
    for number, (environ, shared) in enumerate(
        ((PATIENT, 0), ({**PATIENT, "TREECORED_SHARE_VERSIONS": "true"}, WHOLE))
    ):
        one, two = (
            node.engine(f"{version}-{number}", version, page_size=PAGE, environ=environ)
            for version in VERSIONS
        )
        with node.backed_up(PAGES):
            one.wait_up().generate(prompt(number))
        answer = two.wait_up().generate(prompt(number))
        assert answer.cached == shared
        assert answer.tokens == oracle.tokens("0.5.16", prompt(number))
    node.assert_clean()
