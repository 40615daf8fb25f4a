"""The hooks of loads: an admission launches one, a refusal puts it back, results wait for it."""

from types import SimpleNamespace
from typing import Any

from scheduler_shim.sglang import hooks
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC, LoadingEngine, LoadRequest
from tests.unit.scheduler_shim.sglang.rig import KEY, prompt
from tests.unit.scheduler_shim.sglang.test_hooks import Adder, policy
from tests.unit.scheduler_shim.support import FakeDaemon

__all__ = ["policy"]


def offered(daemon: FakeDaemon) -> tuple[LoadingEngine, LoadRequest]:
    """An engine and a request for which a match has offered pages of the host tier."""
    engine = LoadingEngine(daemon, "loading", page_count=8)
    for number, tokens in enumerate((ABC, prompt(7, 8, 9), prompt(10, 11, 12))):
        engine.serve(f"cold{number}", tokens)
    engine.closed = True
    req = engine.submit("r", ABC)
    for _ in range(3):
        engine.step()
        daemon.run()
    found = engine.shim.tree.find(KEY, ABC[:-4])
    pages = engine.shim.loads.pages("r", KEY, ABC[:-4], found.pages)
    assert pages == 3 - len(found.pages) // 4 > 0
    req.own, req.offered = found.pages, pages
    return engine, req


class LoadingAdder(Adder):
    """An adder that has what was offered loaded, and then admits or not."""

    admits = True

    def add_one_req(self, req: Any, has_chunked_req: bool) -> str:
        assert self.tree_cache.shim.loads.begin(req, req.own, req.offered)
        if self.admits:
            self.can_run_list.append(req)
        return "added"


class CrowdedAdder(LoadingAdder):
    """What is free and evictable, less what was promised, is set by the test."""

    page_size = 1
    rem_total_tokens = 0


def test_a_load_waits_while_the_later_chunks_of_another_prompt_need_its_room(
    daemon: FakeDaemon,
) -> None:
    engine, found = offered(daemon)
    adder, loads = CrowdedAdder(engine), engine.shim.loads
    req: Any = found
    req.prefix_indices, req.origin_input_ids, req.output_ids = [], list(range(12)), []
    req.sampling_params = SimpleNamespace(max_new_tokens=4)
    assert loads.offers is not None
    chunks = [100]
    loads.offers.chunked = lambda: chunks[0]
    add = CrowdedAdder.add_one_req
    adder.rem_total_tokens = 12 + 4 + 1 + 99
    assert hooks.around_add_one_req(add, adder, req, True) == "other"
    assert not adder.can_run_list
    assert engine.shim.counters["loads_put_off"] == 1
    assert loads.offers.offered("r"), "it is loaded later"
    chunks[0] = 99
    assert hooks.around_add_one_req(add, adder, req, True) == "added"
    assert engine.shim.counters["loads"] == 1


def test_an_admission_launches_the_load_and_a_refusal_puts_it_back(daemon: FakeDaemon) -> None:
    engine, req = offered(daemon)
    adder, loads = LoadingAdder(engine), engine.shim.loads
    adder.admits = False
    hooks.around_add_one_req(LoadingAdder.add_one_req, adder, req, False)
    assert engine.shim.held("r")
    assert loads.counter.consumer_index == -1
    engine.abort("r")
    engine.settle()

    engine.shim.room.flush()
    engine.closed = True
    req = engine.submit("again", ABC)
    for _ in range(3):
        engine.step()
        daemon.run()
    req.offered = loads.pages("again", KEY, ABC[:-4], b"")
    adder.admits = True
    hooks.around_add_one_req(LoadingAdder.add_one_req, adder, req, False)
    assert loads.counter.consumer_index == 0
    scheduler = SimpleNamespace(tree_cache=adder.tree_cache)
    batch, result = SimpleNamespace(reqs=[req]), SimpleNamespace(copy_done=None)
    assert hooks.around_results(lambda *_: "used", scheduler, batch, result) == "used"
    assert loads.counter.consumer_index == -1, "nobody reads a result before it is known"
    assert req.failed == ""
    loads.release("again")
    engine.queue.clear()
    engine.shim.tick([], busy=False)
    engine.close()
