"""`treecored doctor` on a machine with GPUs: each is named, and what keeps one from being used."""

import json
import resource
import subprocess
import sys
from typing import Any

from tests.tidy.source import ROOT


def ran(device: str, *, memlock: int | None = None) -> dict[str, Any]:
    """What it says for a device, by topic."""

    def limit() -> None:
        if memlock is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

    done = subprocess.run(
        [sys.executable, "-m", "directory.cli.main", "doctor", "--json", "--host-tier", "1GiB",
         "--device", device],
        capture_output=True, text=True, cwd=ROOT, preexec_fn=limit, timeout=120, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    return {line[0]: line[1:] for line in found["lines"]}


def test_every_gpu_that_the_driver_has_can_be_used_and_is_named_by_its_uuid(
    uuids: list[str],
) -> None:
    names = [uuid.removeprefix("cuda:") for uuid in uuids]
    lines = ran(f"cuda:{names[0]}")
    gpus = [line for topic, line in lines.items() if topic.startswith("GPU ")]
    assert {state for state, *_ in gpus} == {"ok"}
    assert all(any(name in text for _, text, _ in gpus) for name in names)
    assert "device" not in lines
    assert "cuda-python" not in lines  # these tests could not run without
    if len(gpus) > 1:
        assert lines["peer access"][0] in ("ok", "note")


def test_with_64_kib_of_locked_memory_a_host_tier_cannot_be_pinned(uuids: list[str]) -> None:
    state, text, cure = ran(f"cuda:{uuids[0].removeprefix('cuda:')}", memlock=64 * 1024)[
        "locked memory"
    ]
    assert (state, text) == ("problem", "64 KiB, the host tier is 1 GiB")
    assert "--host-unpinned" in cure


def test_a_gpu_that_is_not_there_is_a_problem_that_names_those_there_are(uuids: list[str]) -> None:
    state, _, cure = ran("cuda:GPU-00000000-0000-0000-0000-000000000000")["device"]
    assert state == "problem"
    assert all(uuid.removeprefix("cuda:") in cure for uuid in uuids)
