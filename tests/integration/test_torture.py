"""The GPU torture's logic on CPU pools: sound with all protections, and able to find their lack.

What it shows about fences and words holds for any device; about a GPU it shows nothing.
"""

import pytest

from tests.gpu.torture import main

pytestmark = pytest.mark.slow


def test_with_all_protections_not_one_byte_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--seconds", "3", "--seed", "1"]) == 0
    assert " 0 copies with wrong bytes" in capfd.readouterr().out


@pytest.mark.parametrize("protection", ["forward-fence", "word-recheck"])
def test_without_a_protection_wrong_bytes_are_found(
    capfd: pytest.CaptureFixture[str], protection: str
) -> None:
    arguments = ["--device", "cpu", "--seconds", "5", "--seed", "2", "--without", protection]
    assert main(arguments) == 0
    assert "WRONG" in capfd.readouterr().out
