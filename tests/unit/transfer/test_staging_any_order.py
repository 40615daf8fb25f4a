"""Staged copies of any pages, device and scheduler in any order: a property test.

A model says what every page and slot holds; each copy is checked at the moment of its answer.
"""

from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from tests.unit.transfer.staged import PAGES, Scene, backup, layer_wise, load


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_the_order_bytes_are_right_and_every_part_comes_back(data: st.DataObject) -> None:
    landing_bytes = data.draw(st.sampled_from([0, 200, 5_000]))
    with closing(Scene(paged=data.draw(st.booleans()), landing_bytes=landing_bytes)) as scene:
        torture(scene, data)


def torture(scene: Scene, data: st.DataObject) -> None:
    """Copies of any pages and slots, device and scheduler in any order."""
    flag = st.booleans()
    model = {page: scene.pool.read_page(page) for page in range(PAGES)}
    host: dict[int, bytes] = {}
    under_way: dict[int, SubmitCopy] = {}
    busy_pages: set[int] = set()
    busy_slots: set[int] = set()
    expected: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
    held: dict[int, tuple[list[int], list[int]]] = {}
    for op in range(1, data.draw(st.integers(2, 8))):
        pages = [p for p in range(PAGES) if p not in busy_pages]
        slots = [s for s in range(32) if s not in busy_slots]
        count = data.draw(st.integers(1, 6))
        chosen = data.draw(st.permutations(pages))[:count]
        known = [s for s in slots if s in host]
        back = data.draw(flag)
        if known and back:
            places = data.draw(st.permutations(known))[: len(chosen)]
            chosen = chosen[: len(places)]
            request = load(op, places, chosen)
            if data.draw(flag) and not any(r.landing for r in under_way.values()):
                request = layer_wise(scene, request)
            new = {page: host[s] for page, s in zip(chosen, places, strict=True)}
            expected[op] = new, {}
        else:
            places = data.draw(st.permutations(slots))[: len(chosen)]
            chosen = chosen[: len(places)]
            request = backup(op, chosen, places)
            expected[op] = {}, {s: model[p] for p, s in zip(chosen, places, strict=True)}
            for place in places:
                host.pop(place, None)
        if not chosen:
            continue
        under_way[op] = request
        held[op] = chosen, places
        busy_pages |= set(chosen)
        busy_slots |= set(places)
        scene.submit(request)
        for _ in range(data.draw(st.integers(0, 6))):
            if data.draw(flag):
                scene.stage(1)
            else:
                scene.device.step(1, newest_first=data.draw(flag))
                scene.step()
        for done in [e for e in scene.events if isinstance(e, CopyDone) and e.op in under_way]:
            settle(scene, done, expected, model, host)
            del under_way[done.op]
            chosen, places = held[done.op]
            busy_pages -= set(chosen)
            busy_slots -= set(places)
    scene.finish()
    for done in [e for e in scene.events if isinstance(e, CopyDone) and e.op in under_way]:
        settle(scene, done, expected, model, host)
    for page, content in model.items():
        assert scene.pool.read_page(page) == content
    for index, content in host.items():
        assert scene.host_page(index) == content
    assert scene.parts_spare() == 8


def settle(
    scene: Scene,
    done: CopyDone,
    expected: dict[int, tuple[dict[int, bytes], dict[int, bytes]]],
    model: dict[int, bytes],
    host: dict[int, bytes],
) -> None:
    """Right bytes at the moment of the answer."""
    assert done.outcome == "ok", done
    pages, slots = expected[done.op]
    for page, content in pages.items():
        assert scene.pool.read_page(page) == content
    for index, content in slots.items():
        assert scene.host_page(index) == content
    model.update(pages)
    host.update(slots)
