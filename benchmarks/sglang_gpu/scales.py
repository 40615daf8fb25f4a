"""How much is asked: the dry run on a CPU, a smoke of everything on a GPU, and the runs that count.

Owns the numbers, and nothing of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.sglang_gpu.gaps import Decodes, Phase
from benchmarks.sglang_gpu.turns import Talk

FULL: Final = 1.05
"""Times what a prompt and a step take: with less, an engine that moves nothing is overrun itself
(gaps_model.py: two passes between two tokens, p99 doubled), with 1.2 half its gaps have no pass."""


@dataclass(frozen=True)
class Load:
    """Of the group `loaded`. `tier_gib`: of one treecored, and of two HiCaches together."""

    talk: Talk
    decodes: Decodes
    rounds: int
    decode_rounds: int
    pool: int
    decodes_pool: int
    """Where decodes are measured: with room for what they hold, a prompt that is computed and two
    that are being restored, of each of which half may have the room of the rest (targets.py)."""
    running: int
    chunk: int
    context: int
    tier_gib: int


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
    ids_tier_gb: int
    """Of the stock engine beside; as large as `host_tier`."""
    kills_model: str
    kills_pool: int
    kills_requests: int
    ttft_model: str
    ttft_lengths: tuple[int, ...]
    ttft_pairs: int
    ttft_pool: int
    ttft_tier_gib: int
    rows_lengths: tuple[int, ...]
    rows_pairs: tuple[int, ...]
    rows_pool: int
    rows_tier_gib: int
    own_pairs: tuple[int, ...]
    """Of the group `own`, which has the lengths of `rows`, the shortest first."""
    own_tier_gib: int
    hicache_pool: int
    hicache_gib: int
    load: Load

    @property
    def rows_pool_other(self) -> int:
        """Of the engine on the other GPU, which is asked for one prompt a round, not for three."""
        return self.rows_pool // 2

    def rows_peers(self, length: int) -> int:
        """Prompts in another's pool: so many that the others alone fill the pool of the engine on
        the other GPU. Pools give pages up one by one, from a path's end: of a prompt that had room
        beside what was asked since, some would still be there when its turn comes again."""
        return -(-self.rows_pool_other // length) + 1

    def rows_pool_source(self, page: int) -> int:
        """Tokens of the pool that holds all of these, each with a page for what it says."""
        held = max(self.rows_peers(length) * (length + page) for length in self.rows_lengths)
        return max(self.rows_pool, held)


SCALES: Final[dict[str, Scale]] = {
    "tiny": Scale(
        model="tiny", prompts=16, shortest=40, longest=600, times=3, pool=1024, running=4,
        chunk=128, under_way=6, host_tier="16MiB", seconds=30, ids=6, ids_longest=300,
        ids_tier_gb=1,
        kills_model="tiny", kills_pool=1024, kills_requests=30, ttft_model="tiny",
        ttft_lengths=(64, 256), ttft_pairs=2, ttft_pool=1024, ttft_tier_gib=1,
        rows_lengths=(256, 64), rows_pairs=(2, 6), rows_pool=1536, rows_tier_gib=1,
        own_pairs=(6, 2), own_tier_gib=1,
        hicache_pool=1024, hicache_gib=1, load=Load(
            Talk(users=6, turns=4, first=64, more=16, new=8),
            Decodes(
                streams=1, tokens=32, new=700, beside=128, kept=8, fresh=64, open_max=2, phases=(
                    Phase("alone", 0.3), Phase("restores", 0.6, 2, 0),
                    Phase("restores, slower", 0.6, 4, 0, full=False),
                    Phase("backups", 0.6, 0, 2), Phase("both", 0.6, 4, 4),
                ),
            ),
            rounds=1, decode_rounds=1, pool=1024, decodes_pool=1024,
            running=4, chunk=128, context=1000, tier_gib=2,
        ),
    ),
    "smoke": Scale(
        model="small", prompts=24, shortest=100, longest=20_000, times=3, pool=40_960, running=8,
        chunk=2_048, under_way=16, host_tier="1GiB", seconds=20, ids=6, ids_longest=4_000,
        ids_tier_gb=1,
        kills_model="wide", kills_pool=40_960, kills_requests=40, ttft_model="large",
        ttft_lengths=(2_048,), ttft_pairs=2, ttft_pool=45_056, ttft_tier_gib=8,
        rows_lengths=(2_048,), rows_pairs=(6,), rows_pool=16_384, rows_tier_gib=8,
        own_pairs=(12,), own_tier_gib=4,
        hicache_pool=16_384, hicache_gib=4, load=Load(
            Talk(users=8, turns=3, first=2_000, more=200, new=16),
            Decodes(
                streams=8, tokens=128, new=600, beside=4_096, kept=8, fresh=1_024, phases=(
                    Phase("alone", 0.5), Phase("restores", 1.0, FULL, 0),
                    Phase("restores, half the rate", 1.0, 2 * FULL, 0, full=False),
                    Phase("both", 1.0, 2 * FULL, 2 * FULL), Phase("backups", 1.0, 0, FULL),
                ),
            ),
            rounds=1, decode_rounds=1, pool=24_576, decodes_pool=28_672,
            running=16, chunk=8_192, context=40_960,
            tier_gib=8,
        ),
    ),
    "full": Scale(
        model="small", prompts=200, shortest=100, longest=20_000, times=3, pool=49_152, running=16,
        chunk=2_048, under_way=32, host_tier="2GiB", seconds=110, ids=200, ids_longest=20_000,
        ids_tier_gb=2,
        kills_model="wide", kills_pool=65_536, kills_requests=200, ttft_model="large",
        ttft_lengths=(8_192, 2_048, 32_768), ttft_pairs=10, ttft_pool=40_960, ttft_tier_gib=16,
        rows_lengths=(32_768, 8_192), rows_pairs=(30, 180), rows_pool=73_728, rows_tier_gib=48,
        own_pairs=(440, 60), own_tier_gib=12,
        hicache_pool=40_960, hicache_gib=12, load=Load(
            Talk(users=32, turns=5, first=2_000, more=250, new=32),
            Decodes(
                streams=8, tokens=128, new=900, beside=8_192, kept=7, fresh=2_048, phases=(
                    Phase("alone", 0.5), Phase("restores", 3.0, FULL, 0),
                    Phase("restores, half the rate", 1.5, 2 * FULL, 0, full=False),
                    Phase("both", 3.0, 2 * FULL, 2 * FULL), Phase("backups", 3.0, 0, FULL),
                ),
            ),
            rounds=4, decode_rounds=2, pool=32_768, decodes_pool=49_152,
            running=16, chunk=8_192, context=40_960,
            tier_gib=16,
        ),
    ),
}  # fmt: skip
"""`under_way` counts over both engines; a batch of one has at most `running` requests."""
