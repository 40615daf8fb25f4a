"""A scheduler process as it is timed: its collector leaves alone what was there at its start.

Owns the entry of such a process (tests/sglang/driver.py begins there when told to), the same one
for every system: without it, a full collection over all that SGLang has imported falls into some
request. SGLang has a command for that (`freeze_gc`). It says which process it is, because only its
main thread has the seat (cores.py). Runs in SGLang's environment.
"""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path
from typing import Any, Final

from tests.sglang.driver import SCHEDULER_VARIABLE

FILE_VARIABLE: Final = "TESTS_SCHEDULER_PID"


def environ(path: Path) -> dict[str, str]:
    """Variables of an engine whose scheduler begins here, and writes its number into a file."""
    return {SCHEDULER_VARIABLE: f"{__name__}:run", FILE_VARIABLE: str(path)}


def run(*args: Any, **kwargs: Any) -> Any:
    """A scheduler process from here on."""
    module = importlib.import_module("sglang.srt.managers.scheduler")
    begin = module.Scheduler.__init__

    def begun(scheduler: Any, *given: Any, **more: Any) -> None:
        begin(scheduler, *given, **more)
        gc.collect()
        gc.freeze()
        Path(os.environ[FILE_VARIABLE]).write_text(str(os.getpid()), encoding="utf-8")

    module.Scheduler.__init__ = begun
    return module.run_scheduler_process(*args, **kwargs)
