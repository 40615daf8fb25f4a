"""The torture test, shortly, and that it notices when a protection is missing."""

import subprocess
import sys

import pytest

from tests.gpu.beside_mover import SAID
from tests.gpu.support import ROOT
from tests.gpu.torture_report import PROTECTIONS

TRIES = 4
NOTHING_FOUND = " 0 copies with wrong bytes: NOT AS IT SHOULD BE"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.torture", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def torture(*arguments: str) -> str:
    """What a run says that ends as it should."""
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tortured_until_found(protection: str, seed: int, *arguments: str) -> str:
    """What the first run says that finds wrong bytes, of a few.

    Without a protection a wrong page is likely, not certain: it takes two processes that meet at
    one moment, and on a machine with much else to do they may miss it for as long as a run takes.
    A run that ends in any other way than by finding nothing is no reason to try again.
    """
    said = []
    for again in range(TRIES):
        with_seed = ("--seconds", "10", "--seed", str(seed + 100 * again))
        done = run(*with_seed, "--without", protection, *arguments)
        if done.returncode == 0:
            return done.stdout
        said.append(done.stdout)
        assert NOTHING_FOUND in done.stdout, done.stdout + done.stderr
    pytest.fail(f"{TRIES} runs found nothing:\n" + "\n".join(said))


def test_with_all_protections_not_one_byte_is_wrong() -> None:
    assert " 0 copies with wrong bytes" in torture("--seconds", "10", "--seed", "11")


def test_nor_is_any_by_way_of_staging_slabs() -> None:
    said = torture("--seconds", "10", "--seed", "13", "--staged")
    assert " 0 copies with wrong bytes" in said
    assert "stage requests" in said


def test_nor_where_a_thread_makes_the_drivers_calls() -> None:
    done = run("--seconds", "10", "--seed", "15", "--staged", "--beside")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 copies with wrong bytes" in done.stdout
    assert SAID in done.stderr, "or nothing of this was shown"


@pytest.mark.parametrize("protection", ["destination-fence", "forward-fence", "word-recheck"])
def test_without_a_protection_wrong_bytes_are_found_in_slabs_too(protection: str) -> None:
    assert "WRONG" in tortured_until_found(protection, 14, "--staged")


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_without_a_protection_wrong_bytes_are_found(protection: str) -> None:
    assert "WRONG" in tortured_until_found(protection, 12)
