"""`python -m tests.storm --operations 1000000 --schedulers 8 --seed S`: one storm, with figures.

Exit status 0 only if every page was accounted for and node count and memory levelled off.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time


class ConstantDigest:
    """A hash function that knows one value."""

    def __init__(self, *_: object, digest_size: int = 16, **__: object) -> None:
        self.digest_size = digest_size

    def update(self, _: bytes) -> None:
        """Whatever it was."""

    def digest(self) -> bytes:
        """Always the same."""
        return b"\7" * self.digest_size

    def hexdigest(self) -> str:
        """The same as text."""
        return self.digest().hex()


def force_constant_digests() -> None:
    """From now on every import of a hash function gets one that cannot tell anything apart."""
    for name in ("blake2b", "blake2s", "sha1", "sha256", "sha512", "md5"):
        setattr(hashlib, name, ConstantDigest)


def main() -> int:
    """Run one storm."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--schedulers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", choices=["mixed", "hot-prefix"], default="mixed")
    parser.add_argument("--check-every", type=int, default=5_000)
    parser.add_argument("--no-levels", action="store_true", help="a run too short to level off")
    parser.add_argument("--constant-digests", action="store_true")
    options = parser.parse_args()
    if options.constant_digests:
        force_constant_digests()
    # Only now: these modules take their hash functions when they are imported.
    from tests.storm.storm import Storm
    from tests.storm.world import Violation

    say = sys.stdout.write
    storm = Storm(
        options.seed,
        operations=options.operations,
        schedulers=options.schedulers,
        scenario=options.scenario,
        check_every=options.check_every,
        figures=lambda line: (say(line + "\n"), sys.stdout.flush(), None)[-1],
    )
    began = time.monotonic()
    try:
        storm.run()
    except Violation as violation:
        say(f"seed {options.seed}, operation {storm.world.now}: {violation}\n")
        return 1
    say(f"outcome {storm.outcome()}\n")
    say(f"{time.monotonic() - began:.1f} s, every page accounted for\n")
    rising = [] if options.no_levels else storm.levels()
    for problem in rising:
        say(f"not level: {problem}\n")
    return 1 if rising else 0


if __name__ == "__main__":
    sys.exit(main())
