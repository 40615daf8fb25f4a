"""`treecored doctor`: for each kind of machine the right lines, and a real run on this one."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from directory.cli.doctor_checks import Line, judge
from directory.cli.doctor_facts import Facts, Gpu, gather, parse_gpus
from directory.cli.main import app
from tests.tidy.source import ROOT

GIB, MIB = 1 << 30, 1 << 20
H200 = Gpu(0, "GPU-1", "NVIDIA H200", "570.86.15", 143_771 * MIB, "Default", "Disabled")
PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\tOK\t
 GPU1\tOK\tX\t

Legend:
  X    = Self
"""
GOOD = Facts(
    python="3.11.7",
    kernel="6.8.0-45-generic",
    architecture="x86_64",
    cpus=16,
    memory_available=512 * GIB,
    memlock=-1,
    open_files=1_048_576,
    shm_total=256 * GIB,
    shm_free=250 * GIB,
    huge_pages="madvise",
    huge_pages_shm="advise",
    tool="/usr/bin/nvidia-smi",
    tool_problem="",
    gpus=(H200, msgspec.structs.replace(H200, index=1, uuid="GPU-2")),
    peer_access=PEERS,
    allocator_settings="",
    visible_devices=None,
    packages={"treecored": "0.1.0", "sglang": "0.5.23", "torch": "2.8", "cuda-python": "12.9"},
    runtime_dir="/run/user/0/treecored",
    runtime_problem="",
    daemon=True,
    settings_problem="",
    device="cuda:GPU-1",
    host_tier=64 * GIB,
)
NO_GPU = msgspec.structs.replace(
    GOOD,
    device="cpu",
    gpus=(),
    tool="",
    tool_problem="nvidia-smi is not on the path",
    peer_access="",
    packages={"treecored": "0.1.0"},
)


def line(facts: Facts, topic: str) -> Line:
    (found,) = [each for each in judge(facts) if each.topic == topic]
    return found


def changed(facts: Facts = GOOD, **changes: object) -> Facts:
    return msgspec.structs.replace(facts, **changes)


def test_a_machine_that_has_all_gets_no_note_and_no_problem() -> None:
    assert {each.state for each in judge(GOOD)} == {"ok"}
    assert line(GOOD, "GPU 0").text.startswith("NVIDIA H200, 140 GiB, driver 570.86.15")
    assert line(GOOD, "peer access").text == "between all GPUs"


def test_every_line_that_is_not_ok_says_what_to_do() -> None:
    broken = changed(
        kernel="4.18.0",
        memlock=64 * 1024,
        open_files=1_024,
        shm_free=0,
        memory_available=GIB,
        huge_pages_shm="never",
        gpus=(),
        settings_problem="there is no setting 'x'",
        runtime_problem="it belongs to user 7",
        packages={"sglang": "0.4.9"},
    )
    for each in judge(broken):
        assert bool(each.cure) is (each.state != "ok"), each


def test_without_a_gpu_the_cpu_device_has_no_problem() -> None:
    assert all(each.state != "problem" for each in judge(NO_GPU))
    assert line(NO_GPU, "GPU").state == "note"
    wanted = line(changed(NO_GPU, device="cuda:GPU-1"), "GPU")
    assert (wanted.state, "--gpus" in wanted.cure) == ("problem", True)


def test_locked_memory_of_64_kib_is_a_problem_where_a_gpu_pins_and_a_note_where_none_does() -> None:
    with_gpu = line(changed(memlock=64 * 1024), "locked memory")
    assert with_gpu.state == "problem"
    assert with_gpu.text == "64 KiB, the host tier is 64 GiB"
    assert "LimitMEMLOCK=infinity" in with_gpu.cure
    assert line(changed(NO_GPU, memlock=64 * 1024), "locked memory").state == "note"
    assert line(changed(memlock=64 * GIB), "locked memory").state == "ok"


def test_a_tiny_dev_shm_is_a_problem_and_a_small_one_a_note() -> None:
    tiny = line(changed(shm_total=64 * MIB, shm_free=63 * MIB), "/dev/shm")
    assert (tiny.state, "--shm-size" in tiny.cure) == ("problem", True)
    assert line(changed(shm_free=GIB), "/dev/shm").state == "note"
    assert line(changed(shm_total=None, shm_free=None), "/dev/shm").state == "problem"


@pytest.mark.parametrize(
    ("gpu", "state", "words"),
    [
        (msgspec.structs.replace(H200, compute_mode="Exclusive_Process"), "problem", "-c DEFAULT"),
        (msgspec.structs.replace(H200, driver="470.82.01"), "problem", "525.60"),
        (msgspec.structs.replace(H200, mig="Enabled"), "note", "MIG"),
    ],
)
def test_a_gpu_that_cannot_be_shared_is_named_with_its_cure(
    gpu: Gpu, state: str, words: str
) -> None:
    found = line(changed(gpus=(gpu,), peer_access=""), "GPU 0")
    assert found.state == state
    assert words in found.cure


def test_expandable_segments_are_a_problem_because_they_cannot_be_exported() -> None:
    found = line(changed(allocator_settings="expandable_segments:True"), "allocator")
    assert (found.state, found.cure.endswith("expandable_segments:False")) == ("problem", True)
    assert line(changed(allocator_settings="expandable_segments:False"), "allocator").state == "ok"


def test_gpus_that_cannot_read_one_another_are_noted() -> None:
    found = line(changed(peer_access=PEERS.replace("OK", "CNS")), "peer access")
    assert (found.state, "CNS" in found.text) == ("note", True)


def test_a_device_that_is_not_there_is_a_problem_that_names_those_there_are() -> None:
    found = line(changed(device="cuda:GPU-9"), "device")
    assert (found.state, found.cure) == ("problem", "choose one of cuda:GPU-1, cuda:GPU-2")


@pytest.mark.parametrize("device", ["cpu", "cpu:left"])
def test_a_daemon_that_is_to_drive_the_cpu_beside_gpus_is_a_problem(device: str) -> None:
    found = line(changed(device=device), "device")
    assert (found.state, "share nothing" in found.text) == ("problem", True)
    assert "--device cuda:GPU-1,cuda:GPU-2" in found.cure
    unknown = changed(device="cpu", settings_problem="there is no setting 'x'")
    assert "device" not in [each.topic for each in judge(unknown)], "nobody knows what is wanted"


@pytest.mark.parametrize("devices", ["cuda:GPU-2,cuda:GPU-9", "cuda:GPU-9,cuda:GPU-1"])
def test_of_several_devices_the_one_that_is_not_there_is_named(devices: str) -> None:
    found = line(changed(device=devices), "device")
    assert (found.state, found.text) == ("problem", "there is no cuda:GPU-9")


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.5.12", "problem"), ("0.5.13", "ok"), ("0.5.23.post1", "ok"), ("0.6.0", "problem")],
)
def test_the_version_of_sglang_is_one_that_was_tested(version: str, state: str) -> None:
    packages = {**GOOD.packages, "sglang": version}
    assert line(changed(packages=packages), "SGLang").state == state


def test_the_driver_s_tool_is_read_line_by_line() -> None:
    said = (
        "0, GPU-8f, NVIDIA H200, 570.1, 143771, Default, Disabled\n"
        "1, GPU-9f, Tesla T4, 570.1, [N/A], Prohibited, [N/A]\n"
        "garbage\n"
    )
    gpus = parse_gpus(said)
    assert [(gpu.uuid, gpu.memory_bytes // MIB) for gpu in gpus] == [
        ("GPU-8f", 143_771),
        ("GPU-9f", 0),
    ]


def test_a_runtime_folder_that_others_may_look_into_is_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o755)
    facts = gather(folder, device="cpu", host_tier=0)
    assert "mode is 755" in facts.runtime_problem
    folder.chmod(0o700)
    assert gather(folder, device="cpu", host_tier=0).runtime_problem == ""


def test_a_real_run_here_prints_every_line_and_exits_by_the_worst(tmp_path: Path) -> None:
    arguments = ["doctor", "--runtime-dir", str(tmp_path / "rt"), "--host-tier", "1MiB"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == (1 if found["problems"] else 0)
    topics = [each["topic"] for each in map(dict, map(_as_dict, found["lines"]))]
    for topic in ("settings", "runtime folder", "kernel", "locked memory", "/dev/shm", "software"):
        assert topic in topics
    printed = CliRunner().invoke(app, arguments)
    assert "runtime folder" in printed.output
    assert max(map(len, printed.output.splitlines())) <= 80


def test_each_of_several_devices_is_looked_for() -> None:
    both = changed(device="cuda:GPU-1,cuda:GPU-2")
    assert {each.state for each in judge(both)} == {"ok"}
    lines = judge(changed(device="cuda:GPU-2,cuda:GPU-9,cuda:GPU-8"))
    missing = [each.text for each in lines if each.topic == "device"]
    assert missing == ["there is no cuda:GPU-9", "there is no cuda:GPU-8"]
    for device in ("cpu", "cpu:left,cpu:right"):
        alone = changed(NO_GPU, device=device, memlock=64 * 1024)
        assert {each.state for each in judge(alone)} == {"ok", "note"}
    assert line(changed(NO_GPU, device="cpu:left,cuda:GPU-1"), "GPU").state == "problem"


@pytest.mark.parametrize(
    ("packages", "there"),
    [
        ({"cuda-python": "12.9.0"}, True),
        ({"cuda-bindings": "13.0.1", "cuda-python": ""}, True),
        ({"torch": "2.11.0"}, False),
    ],
)
def test_the_mover_needs_the_bindings_of_the_driver_from_whichever_package(
    packages: dict[str, str], there: bool
) -> None:
    found = [
        each.state for each in judge(changed(packages=packages)) if each.topic == "cuda-python"
    ]
    assert found == ([] if there else ["problem"])


def ran(*command: str, memlock: int | None = None) -> dict[str, list[str]]:
    """What `doctor --json` says in a process of its own, by topic."""

    def limit() -> None:
        if memlock is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

    flags = ["doctor", "--json", "--host-tier", "1GiB", "--device", "cpu"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "directory.cli.main", *flags],
        capture_output=True, text=True, cwd=ROOT, preexec_fn=limit, timeout=60, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    return {line[0]: line[1:] for line in found["lines"]}


def test_a_real_run_with_64_kib_of_locked_memory_names_the_limit_and_its_cure() -> None:
    state, text, cure = ran(memlock=64 * 1024)["locked memory"]
    assert text.startswith("64 KiB, the host tier is 1 GiB")
    gpu = "GPU 0" in ran()
    assert state == ("problem" if gpu else "note")
    assert "ulimit -l unlimited" in cure
    assert "--host-unpinned" in cure


def test_a_real_run_with_a_tiny_dev_shm_names_its_size_and_its_cure() -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    alone = ("unshare", "--mount") if os.getuid() == 0 else ("unshare", "--mount", "-r")
    tried = subprocess.run([*alone, "sh", "-c", mount], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.decode().strip()}")
    state, text, cure = ran(*alone, "sh", "-c", f'{mount} && exec "$@"', "sh")["/dev/shm"]
    assert state == "problem"
    assert "free of 1 MiB" in text
    assert "--shm-size" in cure
    assert ran()["/dev/shm"][1] != text


def test_a_real_run_where_no_tool_of_a_driver_is_says_that_no_gpu_is_there(
    tmp_path: Path,
) -> None:
    bare = f"PATH={tmp_path}"
    state, text, _ = ran("/usr/bin/env", bare)["GPU"]
    assert (state, text) == ("note", "none: nvidia-smi is not on the path")


def test_a_wrong_setting_is_a_problem_and_not_the_end(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--host-tier", "much"])
    assert done.exit_code == 1
    assert "host_tier" in done.output


def _as_dict(line: object) -> dict[str, object]:
    """A line as the JSON has it: a list in the order of its fields."""
    assert isinstance(line, list)
    return dict(zip(Line._fields, line, strict=True))
