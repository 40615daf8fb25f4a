"""What is refused at the start, each with one sentence that says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

import sglang

from scheduler_shim.sglang import compat
from scheduler_shim.sglang.compat import REFUSED, check_supported, dialect
from scheduler_shim.sglang.versions import Unsupported
from tests.sglang.cache.rig import Pools

pytestmark = pytest.mark.sglang


def context(**flags: Any) -> Any:
    """As SGLang hands it to a factory: flags of the server, but for hybrids and `params`."""
    hybrid = {name: flags.pop(name, False) for name in ("is_hybrid_swa", "is_hybrid_ssm")}
    params = Pools(8, 16).params()
    for name, value in flags.pop("params", {}).items():
        setattr(params, name, value)
    return SimpleNamespace(server_args=SimpleNamespace(**flags), params=params, **hybrid)


def test_a_plain_engine_is_served() -> None:
    check_supported(context(tp_size=1, radix_eviction_policy="LRU", disaggregation_mode="null"))


@pytest.mark.parametrize("flag", [refused.flag for refused in REFUSED])
def test_a_flag_that_does_not_go_with_it_is_named(flag: str) -> None:
    with pytest.raises(Unsupported, match=flag.replace("_", "-")):
        check_supported(context(**{flag: True}))
    check_supported(context(**{flag: False}))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"is_hybrid_swa": True}, "sliding window"),
        ({"is_hybrid_ssm": True}, "Mamba"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"radix_eviction_policy": "tlru"}, "radix-eviction-policy tlru"),
        ({"radix_eviction_policy": "lfu"}, "radix-eviction-policy lfu"),
        ({"tp_size": 2}, "tp_size 2"),
        ({"pp_size": 4}, "pp_size 4"),
        ({"params": {"page_size": 64}}, "pages of 16 tokens in a cache of 64"),
        ({"params": {"token_to_kv_pool_allocator": SimpleNamespace(page_size=16)}}, "Namespace"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(args: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why) as refused:
        check_supported(context(**args))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.24", "0.6.0", "1.0", "abc"])
def test_a_version_outside_the_range_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "__version__", version)
    with pytest.raises(Unsupported, match=r"0\.5\.13 to 0\.5\.23"):
        check_supported(context())


def test_the_dialect_is_known_by_what_there_is() -> None:
    assert dialect() == ("old" if sglang.__version__.startswith("0.5.1") else "new")
    assert compat.cache_class().__name__ == ("OldCache" if dialect() == "old" else "NewCache")


def test_nothing_abstract_is_left_to_do() -> None:
    assert not compat.cache_class().__abstractmethods__
