"""Run groups of rows with a real pair of engines, and print what came of them.

    python -m benchmarks.sglang_gpu run --device cpu --scale tiny --out FOLDER [GROUP ...]
    python -m benchmarks.sglang_gpu table FOLDER
    python -m benchmarks.sglang_gpu plot ROWS.json PICTURE.svg

Owns the processes of the groups: each has a time limit, writes its result as one JSON file, and is
not run again where that file is there. On a GPU machine it runs inside the packed site (pack.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from pathlib import Path

import click

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.groups import GROUPS
from benchmarks.sglang_gpu.places import VERSION, Place, gpus
from benchmarks.sglang_gpu.plot import svg
from benchmarks.sglang_gpu.scales import SCALES
from benchmarks.sglang_gpu.show import show
from tests.sglang.environments import python_of
from tests.sglang.tied import die_with_parent

FIRST_PORT = 21_000
TIMED = ("ttft", "rows", "profile", "loaded", "turns", "gaps", "busy-wait", "own")
"""How groups begin that save what there is as they go, and that have a model of their own."""
WEIGHTED = ("rows", "rows-checked", "loaded-checked")
"""Those of them that may run at a time and want real weights, which are written once."""
PORTS = 16
"""Of each group's engines."""


@click.group()
def app() -> None:
    """One real pair of SGLang engines: exactness, ids, deaths, time to first token."""


@app.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--scale", type=click.Choice(sorted(SCALES)), default="tiny")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="For the results.")
@click.option("--work", type=click.Path(path_type=Path), help="For everything else. [OUT/work]")
@click.option("--parallel", type=click.IntRange(1), default=1, help="Groups at a time.")
@click.option("--limit", type=float, default=240.0, help="Seconds a group may take.")
@click.option("--until", type=float, default=3600.0, help="Seconds after which no group starts.")
@click.argument("names", nargs=-1)
def run(
    device: str,
    scale: str,
    out: Path,
    work: Path | None,
    parallel: int,
    limit: float,
    until: float,
    names: tuple[str, ...],
) -> None:
    """Run groups (all that have no result in OUT yet), several at a time."""
    out.mkdir(parents=True, exist_ok=True)
    work = (work or out / "work").absolute()
    work.mkdir(parents=True, exist_ok=True)
    if unknown := [name for name in names if name not in GROUPS]:
        raise click.UsageError(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    wanted = deque(name for name in names or GROUPS if not (out / f"{name}.json").exists())
    chosen = SCALES[scale]
    python = sys.executable if device == "cuda" else str(python_of(VERSION))
    if not all(name.startswith(TIMED) for name in wanted):
        for model in {chosen.model, chosen.kills_model}:
            models.make(model, work / f"model-{model}", python)
    if device == "cuda" and parallel > 1 and len(set(WEIGHTED) & set(wanted)) > 1:
        models.make(chosen.ttft_model, work / f"model-{chosen.ttft_model}", python)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    began = time.monotonic()
    while wanted or running:
        while wanted and len(running) < parallel and time.monotonic() - began < until:
            name = wanted.popleft()
            command = [sys.executable, "-m", "benchmarks.sglang_gpu", "group", name]
            command += ["--device", device, "--scale", scale]
            command += ["--out", str(out.absolute()), "--work", str(work)]
            running[name] = (subprocess.Popen(command, start_new_session=True), time.monotonic())
        if time.monotonic() - began >= until:
            wanted.clear()
        for name, (process, started) in list(running.items()):
            late = time.monotonic() - started > limit
            if late and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                late_result = {"ok": False, "error": f"not done after {limit:.0f} s"}
                _save(out, name, _saved(out, name) | late_result)
            if process.poll() is not None:
                took = time.monotonic() - started
                click.echo(f"{name}: exit status {process.returncode} after {took:.0f} s")
                del running[name]
        time.sleep(0.2)
    click.echo(show(out))


@app.command(hidden=True)
@click.option("--device", required=True)
@click.option("--scale", required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.argument("name")
def group(device: str, scale: str, out: Path, work: Path, name: str) -> None:
    """One group, in this process."""
    die_with_parent()
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    port = FIRST_PORT + PORTS * list(GROUPS).index(name)
    found = gpus() if device == "cuda" else ()
    place = Place(folder, found, port, list(GROUPS).index(name) % max(1, len(found)))
    python = sys.executable if device == "cuda" else str(python_of(VERSION))
    chosen = GROUPS[name]
    if name.startswith(TIMED):
        chosen = _saving(chosen, out, name)
    began = time.monotonic()
    try:
        result = chosen(place, SCALES[scale], python)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the group's result
        result = _saved(out, name) if name.startswith(TIMED) else {}
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:6000]}
        result["traceback"] = traceback.format_exc()[-3000:]
    finally:
        place.close()
    result["whole_seconds"] = round(time.monotonic() - began, 1)
    _save(out, name, {"scale": scale, "device": device, **result})
    sys.exit(not result["ok"])


def _saving(chosen, out: Path, name: str):  # type: ignore[no-untyped-def]
    return lambda place, scale, python: chosen(
        place, scale, python, save=lambda found: _save(out, name, found)
    )


def _saved(out: Path, name: str) -> dict[str, object]:
    """What a group has saved so far."""
    try:
        found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    assert isinstance(found, dict)
    return found


def _save(out: Path, name: str, result: dict[str, object]) -> None:
    path = out / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


@app.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
def table(folder: Path) -> None:
    """Print the results in a folder."""
    click.echo(show(folder))


@app.command()
@click.argument("rows", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", type=click.Path(path_type=Path))
def plot(rows: Path, picture: Path) -> None:
    """Draw the result of the group `rows` as an SVG."""
    picture.write_text(svg(json.loads(rows.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    app()
