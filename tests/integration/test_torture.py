"""The GPU torture's logic on CPU pools: sound with all protections, and able to find their lack.

What it shows about fences and words holds for any device; about a GPU it shows nothing.
"""

import pytest

from tests.gpu.torture import main

pytestmark = pytest.mark.slow


def test_with_all_protections_not_one_byte_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--seconds", "3", "--seed", "1"]) == 0
    assert " 0 copies with wrong bytes" in capfd.readouterr().out


def test_nor_is_any_by_way_of_staging_slabs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--seconds", "3", "--seed", "1", "--staged"]) == 0
    said = capfd.readouterr().out
    assert " 0 copies with wrong bytes" in said
    assert "stage requests: 0" not in said
    assert "stage requests" in said


@pytest.mark.parametrize("staged", [False, True], ids=["as they lie", "staged"])
@pytest.mark.parametrize("protection", ["forward-fence", "word-recheck"])
def test_without_a_protection_wrong_bytes_are_found(
    capfd: pytest.CaptureFixture[str], protection: str, staged: bool
) -> None:
    arguments = ["--device", "cpu", "--seconds", "5", "--seed", "2", "--without", protection]
    assert main(arguments + ["--staged"] * staged) == 0
    assert "WRONG" in capfd.readouterr().out
