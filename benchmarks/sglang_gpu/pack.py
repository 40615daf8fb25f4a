"""Pack SGLang, what treecored needs, and treecored's entry point for a bare GPU machine.

    python -m benchmarks.sglang_gpu.pack FOLDER [--wheels FOLDER]

There Python 3.12, torch 2.11 with CUDA, triton, nvcc, NVML's and CUDA's bindings are installed, and
nothing can be fetched. Owns what is packed: wheels from the package index, less what a Llama with
the Triton attention backend never touches, stand-ins for packages that are only imported
(stand_ins.py), and treecored's metadata with its plugin; the source itself travels beside, as an
archive of the working tree. It must stay under 64 MiB in all. `site/unpack.sh` there sets it up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePath
from typing import Final

ROOT = Path(__file__).resolve().parents[2]

PLATFORMS: Final = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
OURS: Final = ["click", "pydantic-settings", "python-dotenv", "sortedcontainers", "structlog"]
DROPPED: Final = (
    "sgl_kernel/flash_ops*", "sgl_kernel/sm100", "sgl_kernel/infllm*", "sgl_kernel/flashmla_ops*",
    "sglang/multimodal_gen", "torchao/_C_cutlass*",
)  # fmt: skip
ENTRY_POINTS: Final = "[sglang.srt.plugins]\ntreecored = scheduler_shim.sglang.plugin:register\n"
UNPACK: Final = """\
# Source this: `. FOLDER/unpack.sh`. Unpacks into /tmp/treecored-site and goes to the source.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p /tmp/treecored-site
tar xJf "$here/site.tar.xz" -C /tmp/treecored-site
tar xJf "$here/source.tar.xz" -C /tmp/treecored-site
cp /tmp/treecored-site/source/benchmarks/sglang_gpu/stand_ins.py \\
    /tmp/treecored-site/site/sitecustomize.py
python3 -m compileall -q -j 16 /tmp/treecored-site > /dev/null 2>&1
export PYTHONPATH=/tmp/treecored-site/site:/tmp/treecored-site/source
cd /tmp/treecored-site/source
"""


def main() -> None:
    """Write `site.tar.xz`, `source.tar.xz` and `unpack.sh` into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, help="where wheels are kept, and found again")
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree to take the source of")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (options.out / "site.tar.xz").exists():
            build_site(folder / "site", options.wheels or folder / "wheels")
            _pack(options.out / "site.tar.xz", folder, ["site"])
        source = folder / "source"
        for part in ("directory", "transfer", "scheduler_shim", "tests", "benchmarks"):
            shutil.copytree(
                options.source / part, source / part,
                ignore=shutil.ignore_patterns("__pycache__", "results"),
            )  # fmt: skip
        shutil.copy(options.source / "pyproject.toml", source)
        _pack(options.out / "source.tar.xz", folder, ["source"])
    (options.out / "unpack.sh").write_text(UNPACK, encoding="utf-8")
    for path in sorted(options.out.iterdir()):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def build_site(site: Path, wheels: Path) -> None:
    """Fill a new folder with everything but the source."""
    wheels.mkdir(parents=True, exist_ok=True)
    if not any(wheels.glob("sglang-*.whl")):
        _download(_wanted(), wheels)
        _download([_pydantic_core(wheels)], wheels)
    _download([name for name in OURS if not any(wheels.glob(f"{_file(name)}-*.whl"))], wheels)
    site.mkdir()
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not _dropped(name)]
            archive.extractall(site, names)
    for name in ("elementwise.py", "sampling.py"):  # SGLang's own kernels, without flashinfer
        path = site / "sgl_kernel" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(
            text.replace("_has_flashinfer = True", "_has_flashinfer = False"), encoding="utf-8"
        )
    metadata = site / "treecored-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: treecored\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def _download(names: list[str], folder: Path) -> None:
    base = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    base += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        base += ["--platform", platform]
    for name in names:
        subprocess.run([*base, name], check=True)


def _wanted() -> list[str]:
    lines = Path(__file__).with_name("site.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pydantic_core(wheels: Path) -> str:
    """pydantic pins its core exactly."""
    with zipfile.ZipFile(next(wheels.glob("pydantic-2*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = "Requires-Dist: pydantic-core=="
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(wanted))


def _file(name: str) -> str:
    return name.replace("-", "_")


def _dropped(name: str) -> bool:
    path = PurePath(name)
    return any(path.match(part) or name.startswith(part.rstrip("*")) for part in DROPPED)


def _pack(target: Path, folder: Path, names: list[str]) -> None:
    environ = {**os.environ, "XZ_OPT": "-2 -T2"}
    subprocess.run(["tar", "-C", str(folder), "-cJf", str(target), *names], check=True, env=environ)


if __name__ == "__main__":
    main()
