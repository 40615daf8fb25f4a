"""Restores that are expected: who looks for them, for how long, and when that is given up."""

from collections.abc import Iterator

import pytest

from directory.core.actions import CopyPart, Done, Matched, SubmitCopy, Totals
from directory.core.ids import HOST
from directory.daemon import expecting as module
from directory.daemon.expecting import (
    AGAIN_NS,
    DEVICES_MAX,
    END_NS,
    RESTORE_NS,
    UNMET_MAX,
    Expecting,
)
from directory.daemon.loop import Loop
from directory.daemon.mover_words import BESIDE, CORES_MIN, may_look, options_of
from directory.daemon.movers import Movers
from directory.daemon.registration import Registration
from tests.unit.directory.daemon.mover_rig import (
    LAYOUT,
    REGISTRATION,
    SILENCE_MS,
    PretendMover,
    Rig,
    copy,
    pretended_movers,
)
from transfer.engine_limits import BESIDE_RANGES, EngineLimits
from transfer.ipc.memory import MEMFD, MemoryHandle
from transfer.messages import Ready

POOL = 7


class Scene:
    """Expectations of a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, heeds: bool = True) -> None:
        self.now = AGAIN_NS
        self.told: list[int] = []
        self.until: list[int] = []
        monkeypatch.setattr(module, "monotonic_ns", lambda: self.now)
        self.loop = Loop()
        monkeypatch.setattr(self.loop, "look_out", self.until.append)
        # Tens are of one device.
        self.expecting = Expecting(
            self.loop, self.told.append, lambda pool: pool // 10, heeds=heeds
        )

    def matched(self, restorable: int, pool: int = POOL) -> None:
        """A match was answered, and the turn is over."""
        body = Matched(0, b"", restorable, restorable, 0, 1, 1, Totals())
        self.expecting.answered(pool, body)
        self.loop.turn(0)
        self.now += AGAIN_NS


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A scene of movers that may spin."""
    made = Scene(monkeypatch)
    yield made
    made.loop.close()


def moved(kind: str, target: int = POOL) -> SubmitCopy:
    """A copy of a kind."""
    parts = (CopyPart(HOST, b"", target, b""),)
    return SubmitCopy(1, kind, parts, (), ())  # type: ignore[arg-type]


def test_who_is_told_of_pages_beyond_its_pool_is_expected_to_ask_for_them(scene: Scene) -> None:
    began = scene.now
    scene.matched(3)
    assert scene.told == [POOL]
    assert scene.until == [began + RESTORE_NS]


def test_the_mover_is_told_once_the_answer_has_gone(scene: Scene) -> None:
    scene.expecting.answered(POOL, Matched(0, b"", 3, 3, 0, 1, 1, Totals()))
    assert scene.told == []
    scene.loop.turn(0)
    assert scene.told == [POOL]
    scene.loop.turn(0)
    assert scene.told == [POOL], "once"


def test_where_nothing_lies_beyond_nothing_is_expected(scene: Scene) -> None:
    scene.matched(0)
    scene.expecting.answered(POOL, Done())
    scene.loop.turn(0)
    assert (scene.told, scene.until) == ([], [])


def test_movers_that_may_not_spin_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, heeds=False)
    scene.matched(3)
    scene.expecting.submitted(moved("peer_copy"))
    assert (scene.told, scene.until) == ([], [])
    scene.loop.close()


def test_many_that_wait_are_one_expectation(scene: Scene) -> None:
    for _ in range(16):
        scene.expecting.answered(POOL, Matched(0, b"", 3, 3, 0, 1, 1, Totals()))
    scene.loop.turn(0)
    assert scene.told == [POOL]


def test_where_restores_do_not_follow_none_is_expected_until_one_comes(scene: Scene) -> None:
    for _ in range(3 * UNMET_MAX):
        scene.matched(3)
    assert len(scene.told) == UNMET_MAX
    scene.expecting.submitted(moved("backup", HOST))
    scene.matched(3)
    assert len(scene.told) == UNMET_MAX, "a backup is nobody's restore"
    scene.expecting.submitted(moved("load_back"))
    scene.matched(3)
    assert len(scene.told) == UNMET_MAX + 1


def test_devices_are_told_each_for_itself(scene: Scene) -> None:
    for pool in (POOL, POOL + 10, POOL + 1):
        scene.expecting.answered(pool, Matched(0, b"", 3, 3, 0, 1, 1, Totals()))
    scene.loop.turn(0)
    assert sorted(scene.told) == [POOL, POOL + 10], "once each"


def test_where_no_restore_follows_nothing_is_expected_of_that_device_alone(scene: Scene) -> None:
    scene.now += AGAIN_NS
    for _ in range(2 * UNMET_MAX):
        scene.matched(3)
    assert scene.told == [POOL] * UNMET_MAX
    scene.expecting.submitted(moved("load_back", POOL + 10))
    scene.matched(3)
    assert len(scene.told) == UNMET_MAX, "a restore of another device is not its own"
    scene.matched(3, POOL + 10)
    assert scene.told[UNMET_MAX:] == [POOL + 10]
    scene.expecting.submitted(moved("peer_copy", POOL + 2))
    scene.matched(3)
    assert scene.told[UNMET_MAX + 1 :] == [POOL]


def test_however_many_devices_are_named_few_are_told_apart(scene: Scene) -> None:
    for number in range(3 * DEVICES_MAX):
        scene.matched(3, 10 * number)
    assert len(scene.expecting._devices) == DEVICES_MAX


@pytest.mark.parametrize(("kind", "looks"), [("peer_copy", True), ("load_back", False)])
def test_the_end_of_a_copy_is_looked_for_where_it_takes_no_longer_than_being_woken(
    scene: Scene, kind: str, looks: bool
) -> None:
    scene.expecting.submitted(moved(kind))
    assert scene.until == [scene.now + END_NS] * looks


def test_for_gpus_it_is_looked_where_there_are_cores_and_else_where_movers_are_told_to_spin() -> (
    None
):
    assert may_look("cuda:GPU-1", (), CORES_MIN)
    assert may_look("cuda:GPU-1,cuda:GPU-2", (), 64)
    assert not may_look("cuda:GPU-1", (), CORES_MIN - 1)
    assert may_look("cpu", ("--limit", "idle_spin_us=500"), 2)
    assert not may_look("cpu", ("--limit", "slice_bytes=500"), 64)


@pytest.mark.parametrize("device", ["cpu", "cuda:GPU-1"])
@pytest.mark.parametrize(
    ("said", "looks"), [(["0"], False), (["500", "0"], False), (["0", "7"], True), (["x"], False)]
)
def test_movers_that_are_told_not_to_spin_look_for_nothing(
    device: str, said: list[str], looks: bool
) -> None:
    options = [word for number in said for word in ("--limit", f"idle_spin_us={number}")]
    assert may_look(device, options, 64) is looks


@pytest.mark.parametrize(
    ("device", "cores", "beside"),
    [
        ("cuda:GPU-1", CORES_MIN, True),
        ("cuda:GPU-1", CORES_MIN - 1, False),
        ("cuda:GPU-1,cuda:GPU-2", CORES_MIN + 2, True),
        ("cuda:GPU-1,cuda:GPU-2", CORES_MIN + 1, False),
        ("cpu", 64, False),
    ],
)
def test_a_gpus_mover_has_long_lists_queued_by_a_thread_where_there_are_cores(
    device: str, cores: int, beside: bool
) -> None:
    said = ("--unpinned", "--limit", "submit_beside=0")
    options = options_of(device, said, cores)
    assert options[len(options) - len(said) :] == said, "what is said by hand comes last"
    limits = EngineLimits().changed([o for o in options if "=" in o])
    assert limits.submit_beside == 0, "and counts"
    assert (options != said) is beside
    by_itself = EngineLimits().changed([o for o in options_of(device, (), cores) if "=" in o])
    assert by_itself.submit_beside == BESIDE_RANGES * beside


def test_movers_are_started_with_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.loop, "cores", CORES_MIN)
    given = "cuda:GPU-1", None, SILENCE_MS, rig.counters
    Movers(rig.loop, rig, *given, options=("--unpinned",)).start()
    assert PretendMover.spawned[-1] == ("cuda:GPU-1", (*BESIDE, "--unpinned"))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Supervision over pretended movers of a GPU."""
    with pretended_movers(monkeypatch) as made:
        yield made


def test_a_mover_that_has_copies_or_does_not_serve_is_told_nothing(rig: Rig) -> None:
    rig.movers._expect(POOL)
    rig.movers.start()
    rig.movers._expect(POOL)
    assert rig.mover.told == []
    rig.mover.say(Ready(1, "cpu"))
    rig.loop.turn(0)
    rig.movers._expect(POOL)
    assert rig.mover.told == [("expect", POOL)]
    rig.movers.submit(copy(1))
    rig.movers._expect(POOL)
    assert rig.mover.told == [("expect", POOL), ("copy", 1)]


def test_what_is_expected_is_told_apart_by_the_devices_that_pools_lie_on(rig: Rig) -> None:
    for pool, device in ((1, "GPU-1"), (2, "GPU-1"), (3, "GPU-2")):
        handles = (MemoryHandle(MEMFD, 1, device),)
        rig.movers.import_pool(pool, Registration(REGISTRATION.message, LAYOUT, handles, ()))
    assert [rig.movers._device_of(pool) for pool in (1, 2, 3, 4)] == ["GPU-1", "GPU-1", "GPU-2", ""]
    assert rig.movers.expecting._device_of == rig.movers._device_of


def test_of_several_movers_each_is_told_for_itself(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.start_serving()
    rig.movers.submit(copy(1))
    rig.movers._expect(POOL)
    assert ("expect", POOL) not in rig.mover.told
    monkeypatch.setattr(rig.movers, "_device", "cuda:GPU-1,cuda:GPU-2")
    rig.movers._expect(POOL)
    assert ("expect", POOL) in rig.mover.told, "which has copies is for the set to know"
