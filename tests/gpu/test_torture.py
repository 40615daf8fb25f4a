"""The torture test, shortly, and that it notices when a protection is missing."""

import subprocess
import sys

import pytest

from tests.gpu.support import ROOT
from tests.gpu.torture_report import PROTECTIONS


def torture(*arguments: str) -> str:
    """Run it in a process of its own; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.torture", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_with_all_protections_not_one_byte_is_wrong() -> None:
    assert " 0 copies with wrong bytes" in torture("--seconds", "10", "--seed", "11")


def test_nor_is_any_by_way_of_staging_slabs() -> None:
    said = torture("--seconds", "10", "--seed", "13", "--staged")
    assert " 0 copies with wrong bytes" in said
    assert "stage requests" in said


@pytest.mark.parametrize("protection", ["destination-fence", "forward-fence", "word-recheck"])
def test_without_a_protection_wrong_bytes_are_found_in_slabs_too(protection: str) -> None:
    said = torture("--seconds", "10", "--seed", "14", "--staged", "--without", protection)
    assert "WRONG" in said


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_without_a_protection_wrong_bytes_are_found(protection: str) -> None:
    assert "WRONG" in torture("--seconds", "10", "--seed", "12", "--without", protection)
