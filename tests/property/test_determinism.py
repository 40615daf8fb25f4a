"""The same events give the same actions, byte for byte, whatever the hash seed.

Strategy: one seeded history run in two fresh interpreters with different PYTHONHASHSEED; the logs
of events and actions are digested and compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import hashlib, random, sys
from tests.property.history import History
pick = random.Random(int(sys.argv[1])).randrange
history = History(2, 20, ["thin", "mirrored", "thin"])
rules = "compute compute look grow release restore evict finish finish carry_out mishap".split()
for _ in range(300):
    getattr(history, rules[pick(len(rules))])(pick)
    history.check()
sys.stdout.write(hashlib.sha256(b"".join(history.world.log)).hexdigest())
sys.stdout.write(f" {len(history.world.log)} {hash('a')}")
"""


def digest(seed: int, hash_seed: str) -> list[str]:
    """Run one history; its log's digest and length, and what strings hash to there."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    return done.stdout.split()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_events_give_the_same_actions_under_any_hash_seed(seed: int) -> None:
    first, second = digest(seed, "1"), digest(seed, "4242")
    assert first[2] != second[2], "the two interpreters must really hash differently"
    assert int(first[1]) > 100
    assert first[:2] == second[:2]
