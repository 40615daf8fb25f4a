"""radixview, an unmodified viewer, shows our tree: one scheduler's, and that of all together."""

from pathlib import Path

import pytest

from tests.consumers.crowd import Prompts, Scheduler
from tests.consumers.programs import Viewer
from tests.integration.daemon.listening import Listener, streams
from tests.integration.daemon.support import DaemonProcess, wait_until
from tests.property.test_kv_events import hash_chain

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(300)]


def expected(scheduler: Scheduler, prompts: list[list[int]]) -> dict[int, set[str]]:
    """What the daemon itself says that a scheduler has, by block hash."""
    found: dict[int, set[str]] = {}
    page = scheduler.pool_memory.layout.page_size
    for tokens in prompts:
        held = scheduler.look(tokens)
        for at, block in enumerate(hash_chain(tokens, page)):
            if (at + 1) * page <= held.gpu:
                found.setdefault(block, set()).add("GPU")
            elif (at + 1) * page <= held.with_host:
                found.setdefault(block, set()).add("CPU_PINNED")
    return found


def test_a_viewer_shows_what_a_scheduler_has_and_can_load(
    python: Path, base: int, telling: DaemonProcess, tmp_path: Path
) -> None:
    prompts = Prompts(seed=2)
    with Scheduler(telling.runtime_dir, "a") as a:
        for _ in range(20):
            a.compute(prompts.next())
        a.at_rest()
        where = streams(telling, "a")["a"]
        with Viewer(python, base + 15, tmp_path / "viewer.log", where["http"]) as viewer:
            for _ in range(60):
                a.compute(prompts.next())
            a.at_rest()
            tree = expected(a, a.prompts)
            # It is told block by block, and shows what it was told last of a block.
            wait_until(lambda: viewer.blocks().keys() == tree.keys())
            shown = viewer.blocks()
            beyond = [block for block, media in tree.items() if media == {"CPU_PINNED"}]
            assert beyond
            assert {shown[block] for block in beyond} == {"CPU_PINNED"}
            assert set(shown.values()) == {"GPU", "CPU_PINNED"}


def test_a_viewer_of_the_union_shows_who_has_what(
    python: Path, base: int, telling: DaemonProcess, tmp_path: Path
) -> None:
    prompts = Prompts(seed=3)
    with Scheduler(telling.runtime_dir, "a") as a, Scheduler(telling.runtime_dir, "b") as b:
        for at in range(40):
            (a, b)[at % 2].compute(prompts.next())
        where = streams(telling, "a", "b", "")
        with (
            Viewer(python, base + 15, tmp_path / "viewer.log", where[""]["http"]) as viewer,
            Listener(where["a"]) as of_a,
            Listener(where["b"]) as of_b,
        ):
            last = prompts.documents[0]
            a.compute(last)
            a.at_rest()
            blocks = set(hash_chain(last, a.pool_memory.layout.page_size))
            of_a.until(lambda known: all(known.get(k) == {"GPU", "CPU_PINNED"} for k in blocks))
            of_b.until(lambda known: all("CPU_PINNED" in known.get(k, ()) for k in blocks))

            def labels() -> dict[int, str]:
                found: dict[int, str] = {}
                for block in of_a.blocks.keys() | of_b.blocks.keys():
                    media_a, media_b = (told.blocks.get(block, set()) for told in (of_a, of_b))
                    who = ["a:GPU"] if "GPU" in media_a else []
                    who += ["b:GPU"] if "GPU" in media_b else []
                    who += ["host:CPU_PINNED"] if "CPU_PINNED" in media_a | media_b else []
                    found[block] = " ".join(who)
                return found

            wait_until(lambda: viewer.blocks() == labels())
            assert {"a:GPU", "b:GPU"} <= {who.split()[0] for who in labels().values()}
