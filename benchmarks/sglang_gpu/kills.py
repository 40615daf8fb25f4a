"""Rows `kills`: the daemon and an engine are killed under load, and nobody else pays for it.

Owns two deaths. Held-back requests never fail; of layer-wise ones exactly those fail whose load was
in flight, with SGLang's status 503, as many as the shim has counted. A killed engine's GPU memory
is back within a second, although the mover had it mapped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import models
from benchmarks.sglang_gpu.compare import compare
from benchmarks.sglang_gpu.exact import _stats
from benchmarks.sglang_gpu.pair import Pair
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import Drive, prompt, questions, visits
from tests.sglang.engines import Engine, session_of

MEMORY_S: Final = 1.0
WATCH_S: Final = 5.0
CONTEXT_BYTES: Final = 1_000_000_000
"""What an engine has besides its pool, at least: its CUDA context, weights, buffers."""
RETURN_S: Final = 30.0
STANDSTILL_S: Final = 0.5
LOST: Final = "the load of a cached prefix was lost"


def run(
    place: Place, scale: Scale, python: Path | str, *, loads: str, page: int = 16, seed: int = 3
) -> dict[str, Any]:
    """Run the group; returns its result."""
    model = models.make(
        scale.kills_model, place.folder.parent / f"model-{scale.kills_model}", python
    )
    given: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": scale.kills_pool,
        "max_running_requests": scale.running,
        "chunked_prefill_size": scale.chunk,
        "context_length": scale.longest + 200,
        "schedule_conservativeness": 0.3,
    }
    with Pair(place, model, scale.host_tier, given, {"TREECORED_LOADS": loads}) as pair:
        engines = [pair.start(name) for name in "ab"]
        for engine in engines:
            engine.wait_up()
        return _rows(pair, engines, scale, loads=loads, seed=seed)


def _rows(
    pair: Pair, engines: list[Engine], scale: Scale, *, loads: str, seed: int
) -> dict[str, Any]:
    each = max(4, scale.kills_requests // 4)
    asked = questions(each, scale.shortest, scale.longest, seed, 4)
    drive = Drive(engines, visits(asked, 4, seed), seed, scale.under_way)
    total = len(drive.left)

    drive.run(lambda: len(drive.left) <= total * 2 // 3)
    lock = (pair.place.folder.parent / "kills.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # a group beside this one measures memory
    pair.at_rest()
    # What was asked before lies in the host tier alone now, and is asked for next.
    for engine in engines:
        engine.flush()
    drive.left.sort(key=lambda question: question.number in drive.visited)
    # A mover that stands still has loads in flight when the daemon dies, and dies with it.
    os.kill(pair.report().counters["daemon_mover_pid"], signal.SIGSTOP)
    drive.fill()
    time.sleep(STANDSTILL_S)
    pair.daemon.kill()
    drive.run(lambda: len(drive.left) <= total // 2, drain=False)
    pair.restart_daemon()
    lock.close()
    returned_s = _shares_again(engines, seed)
    drive.run(lambda: len(drive.left) <= total // 3)

    lock = (pair.place.folder.parent / "kills.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    drive.fill()
    before_kill = pair.place.gpu_bytes_used()
    pool_bytes = models.kv_bytes(scale.kills_model) * scale.kills_pool
    memory = kill(pair.place, engines[1], before_kill, pool_bytes + CONTEXT_BYTES)
    lock.close()
    again = drive.lose(engines[1])
    answers = drive.run()
    pair.settle_digests()
    at_rest = pair.at_rest()
    survivor = engines[0].stats()
    counted = int(survivor.get("loads_lost_in_flight", 0)) + int(
        engines[1].stats().get("loads_lost_in_flight", 0)
    )
    lost = [text for text in answers.failed if LOST in text]
    digests = compare(pair.digests)
    right = len(lost) == len(answers.failed) and (not lost or loads != "held")
    clean = not at_rest.violations and not pair.complaints() and digests.wrong == 0
    in_time = not pair.place.cuda or 0 <= memory["back_s"] <= MEMORY_S
    return {
        "ok": right and clean and in_time and len(lost) == counted,
        "requests": answers.answered,
        "failed_count": len(answers.failed),
        "failed_with_503": len(lost),
        "loads_lost_in_flight": counted,
        "asked_again_of_the_survivor": again,
        "shares_again_after_s": round(returned_s, 2),
        "engine_memory": memory,
        "pool_bytes": pool_bytes,
        "digests": digests.as_json(),
        "failed": answers.failed[:5],
        "violations": list(at_rest.violations)[:5],
        "complaints": pair.complaints(),
        "engines": {engine.name: _stats(engine) for engine in engines},
    }


def kill(place: Place, engine: Engine, before: int, wanted: int) -> dict[str, Any]:
    """SIGKILL an engine; when its GPU memory is back, and how much in the end.

    `before`: bytes of the GPU that were taken; `wanted`: those that count as its memory. Never
    back: -1.
    """
    processes = session_of(engine.pid)
    began = time.monotonic()
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    readings: list[tuple[float, int]] = []
    while place.cuda and time.monotonic() - began < WATCH_S:
        readings.append((time.monotonic() - began, place.gpu_bytes_used()))
        time.sleep(0.005)
    engine.kill()
    if not readings:
        return {"back_s": 0.0, "bytes": 0}
    back_s = next((at for at, used in readings if before - used >= wanted), -1.0)
    return {
        "back_s": round(back_s, 3),
        "bytes": before - min(used for _, used in readings),
        "wanted_bytes": wanted,
    }


def _shares_again(engines: list[Engine], seed: int) -> float:
    """Seconds until a prompt that one engine has computed is a hit of the other's."""
    began = time.monotonic()
    turn = 0
    while time.monotonic() - began < RETURN_S:
        turn += 1
        tokens = list(prompt(seed * 7919 + turn, 200))
        engines[0].generate(tokens, 2)
        if engines[1].generate(tokens, 2).cached:
            return time.monotonic() - began
    raise AssertionError("the engines do not share again")
