"""How much is asked: the dry run on a CPU, a smoke of everything on a GPU, and the runs that count.

Owns the numbers, and nothing of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Scale:
    """`pool`: tokens of each engine's pool; lengths in tokens; `seconds`: how long a drive asks."""

    model: str
    prompts: int
    shortest: int
    longest: int
    times: int
    pool: int
    running: int
    chunk: int
    under_way: int
    host_tier: str
    seconds: float
    ids: int
    """Prompts of the group that compares ids."""
    ids_longest: int
    kills_model: str
    kills_pool: int
    kills_requests: int
    ttft_model: str
    ttft_lengths: tuple[int, ...]
    ttft_pairs: int
    ttft_pool: int
    ttft_tier_gib: int


SCALES: Final[dict[str, Scale]] = {
    "tiny": Scale(
        model="tiny", prompts=16, shortest=40, longest=600, times=3, pool=1024, running=4,
        chunk=128, under_way=6, host_tier="16MiB", seconds=30, ids=6, ids_longest=300,
        kills_model="tiny", kills_pool=1024, kills_requests=30, ttft_model="tiny",
        ttft_lengths=(64, 256), ttft_pairs=2, ttft_pool=1024, ttft_tier_gib=1,
    ),
    "smoke": Scale(
        model="small", prompts=24, shortest=100, longest=20_000, times=3, pool=40_960, running=8,
        chunk=2_048, under_way=16, host_tier="1GiB", seconds=20, ids=6, ids_longest=4_000,
        kills_model="wide", kills_pool=40_960, kills_requests=40, ttft_model="large",
        ttft_lengths=(2_048,), ttft_pairs=2, ttft_pool=45_056, ttft_tier_gib=8,
    ),
    "full": Scale(
        model="small", prompts=200, shortest=100, longest=20_000, times=3, pool=49_152, running=16,
        chunk=2_048, under_way=32, host_tier="2GiB", seconds=110, ids=200, ids_longest=20_000,
        kills_model="wide", kills_pool=65_536, kills_requests=200, ttft_model="large",
        ttft_lengths=(8_192, 2_048, 32_768), ttft_pairs=10, ttft_pool=40_960, ttft_tier_gib=16,
    ),
}  # fmt: skip
"""`under_way` counts over both engines; a batch of one has at most `running` requests."""
