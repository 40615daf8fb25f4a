"""Several movers as one: homes, reach, copies that nobody can carry, and common ends."""

import errno
import os
import select
from collections.abc import Iterator

import pytest

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from tests.descriptors import open_descriptors
from tests.unit.transfer.support import HOST, OwnedPool, copy, part, slot, small_layout, small_tier
from transfer.imports import STAGE_FDS
from transfer.ipc.channel import ChannelClosed
from transfer.ipc.memory import MEMFD, MemoryHandle
from transfer.messages import Imported, Pong, Ready, Released, Reply, TierOpened
from transfer.mover_handle import MoverHandle
from transfer.mover_set import MoverSet

LAYOUT = small_layout()
GPUS, ISLAND = 8, 4
"""Eight GPUs in two islands; the GPUs of one reach one another, and nobody else."""


class Pretended:
    """Stands for a `MoverHandle` of one GPU; answers imports as its island demands."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.device = f"cuda:GPU-{number}"
        self.pid = 100 + number
        self.fd, self.pidfd = os.eventfd(0), os.eventfd(0)
        self.want_write = False
        self.says: list[Reply] = []
        self.copies: list[SubmitCopy] = []
        self.released: list[int] = []
        self.imported: list[tuple[int, int, bool]] = []
        self.expected: list[int] = []
        self.pings = 0
        self.killed = self.gone = self.closed = self.refuses = False
        self.gives_back = True

    def fileno(self) -> int:
        return self.fd

    def flush(self) -> bool:
        return True

    def say(self, *replies: Reply) -> None:
        self.says += replies
        os.eventfd_write(self.fd, 1)

    def import_pool(
        self, pool: int, layout: object, handles: tuple[MemoryHandle, ...], fds: list[int],
        sync: object, page_table: bool, staging: bool,
    ) -> None:  # fmt: skip
        self.imported.append((pool, len(fds), staging))
        gpu = int(handles[0].device.rpartition("-")[2])
        ok = gpu // ISLAND == self.number // ISLAND and not self.refuses
        self.say(Imported(pool, ok, "" if ok else "no peer"))

    def release_pool(self, pool: int) -> None:
        self.released.append(pool)
        if self.gives_back:
            self.say(Released(pool))

    def submit(self, copy: SubmitCopy) -> None:
        self.copies.append(copy)

    def expect(self, pool: int) -> None:
        self.expected.append(pool)

    def ping(self, token: int) -> None:
        self.pings += 1

    def open_tier(self, tier: object) -> int:
        return 2

    def receive(self) -> list[Reply]:
        if self.gone and not self.says:
            raise ChannelClosed(f"{self.number} is gone")
        said, self.says = self.says, []
        return said

    def terminate(self, how: object) -> None:
        self.killed = True

    def kill(self) -> None:
        self.killed = True
        os.eventfd_write(self.pidfd, 1)

    def close(self) -> int:
        if not self.closed:
            self.closed = True
            os.close(self.fd)
            os.close(self.pidfd)
        return -9


class Scene:
    """The set over eight, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.movers = [Pretended(n) for n in range(GPUS)]
        self.set = MoverSet(self.movers, lambda: self.now, silence_s=1.0)  # type: ignore[arg-type]

    def offer(self, pool: int, gpu: int, *, staging: bool = False) -> list[Reply]:
        handles = (MemoryHandle(MEMFD, 1, f"GPU-{gpu}"),)
        self.set.import_pool(pool, LAYOUT, handles, list(range(9)), staging=staging)
        return self.set.receive()

    def carried_by(self, request: SubmitCopy) -> int | None:
        before = [len(mover.copies) for mover in self.movers]
        self.set.submit(request)
        after = [len(mover.copies) for mover in self.movers]
        return next((n for n in range(GPUS) if after[n] != before[n]), None)

    def readable(self) -> bool:
        return bool(select.select([self.set], [], [], 0)[0])


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.set.close()
    made.set.close()


def backup(op: int, pool: int) -> SubmitCopy:
    return copy(op, "backup", part(pool, [0], HOST, [slot(0)]))


def load(op: int, pool: int) -> SubmitCopy:
    return copy(op, "load_back", part(HOST, [slot(0)], pool, [0]))


def peer(op: int, source: int, target: int) -> SubmitCopy:
    words = [(source, 1, 0)]
    return copy(op, "peer_copy", part(source, [0], target, [1]), words=words)


def test_the_set_is_ready_when_all_are_and_the_tier_is_opened_by_each(scene: Scene) -> None:
    for mover in scene.movers[:-1]:
        mover.say(Ready(mover.pid, mover.device))
    assert scene.set.receive() == []
    scene.movers[-1].say(Ready(1, "x"))
    assert [type(reply) for reply in scene.set.receive()] == [Ready]
    assert scene.set.open_tier(None) == 2 * GPUS  # type: ignore[arg-type]
    scene.movers[3].say(TierOpened(True, 1))
    assert scene.set.receive() == [TierOpened(True, 1)]


def test_every_copy_to_and_from_the_host_goes_by_its_pools_own_gpu(scene: Scene) -> None:
    for gpu in range(GPUS):
        assert scene.offer(gpu + 1, gpu) == [Imported(gpu + 1, True)]
    for gpu in range(GPUS):
        assert scene.carried_by(backup(gpu, gpu + 1)) == gpu
        assert scene.carried_by(load(100 + gpu, gpu + 1)) == gpu


def test_what_is_expected_is_said_to_the_pools_own_gpu_unless_that_has_copies(
    scene: Scene,
) -> None:
    for gpu in range(GPUS):
        scene.offer(gpu + 1, gpu)
    scene.set.submit(backup(7, 1))
    for pool in (1, 2, 3, GPUS + 1):
        scene.set.expect(pool)
    assert [mover.expected for mover in scene.movers[:3]] == [[], [2], [3]]
    scene.movers[0].say(CopyDone(7, "ok"))
    scene.set.receive()
    scene.set.expect(1)
    assert scene.movers[0].expected == [1]


def test_peers_are_copied_by_the_targets_gpu_and_others_are_void_at_once(scene: Scene) -> None:
    for gpu in range(GPUS):
        scene.offer(gpu + 1, gpu)
    op = 0
    for source in range(GPUS):
        for target in range(GPUS):
            if source == target:
                continue
            op += 1
            if source // ISLAND == target // ISLAND:
                assert scene.carried_by(peer(op, source + 1, target + 1)) == target
                continue
            assert scene.carried_by(peer(op, source + 1, target + 1)) is None
            assert scene.readable(), "the loop has to come and hear it"
            (done,) = scene.set.receive()
            assert isinstance(done, CopyDone)
            assert (done.op, done.outcome) == (op, "void"), "then the host tier is the source"
            assert "reaches" in done.detail


def test_a_copy_waits_until_all_have_said_whether_they_have_its_pools(scene: Scene) -> None:
    late = scene.movers[3]
    late.import_pool = lambda *_: None  # type: ignore[method-assign]
    assert scene.offer(1, 0) == []
    assert scene.carried_by(backup(5, 1)) is None
    assert scene.set.receive() == []
    late.say(Imported(1, True))
    assert scene.set.receive() == [Imported(1, True)]
    assert [c.op for c in scene.movers[0].copies] == [5]
    assert scene.offer(2, 1) == []
    scene.carried_by(backup(6, 2))
    scene.set.release_pool(2)
    late.say(Imported(2, True), Released(2))
    assert Released(2) in scene.set.receive()
    copies = [c.op for mover in scene.movers for c in mover.copies]
    assert copies == [5, 6], "as one mover would, which then says that the pool is gone"


def test_a_pool_on_a_gpu_without_a_mover_lives_with_the_first_that_reaches_it(
    scene: Scene,
) -> None:
    scene.movers[5].device = "cuda:GPU-other"
    movers = scene.movers
    other = MoverSet(movers, lambda: 0.0)  # type: ignore[arg-type]
    other.import_pool(9, LAYOUT, (MemoryHandle(MEMFD, 1, "GPU-5"),), [])
    assert other.receive() == [Imported(9, True)]
    other.submit(backup(1, 9))
    assert [len(mover.copies) for mover in movers] == [0, 0, 0, 0, 1, 0, 0, 0]


def test_a_pool_that_its_home_refuses_is_refused_and_given_back_by_the_others(
    scene: Scene,
) -> None:
    home = scene.movers[2]
    home.import_pool = lambda pool, *_: home.say(Imported(pool, False, "odd"))  # type: ignore[method-assign]
    assert scene.offer(1, 2) == [Imported(1, False, "odd")]
    assert [mover.released for mover in scene.movers[:ISLAND]] == [[1], [1], [], [1]]
    assert scene.set.receive() == [], "nobody waits for these"
    assert scene.set.receive() == []


def test_a_pool_is_released_when_all_have_let_go(scene: Scene) -> None:
    scene.offer(1, 0)
    last = scene.movers[6]
    last.release_pool = last.released.append  # type: ignore[method-assign,assignment]
    scene.set.release_pool(1)
    assert scene.set.receive() == []
    last.say(Released(1, "busy"))
    assert scene.set.receive() == [Released(1, f"{last.device}: busy")]
    scene.set.release_pool(77)
    last.say(Released(77))
    assert scene.set.receive() == [Released(77)]


def test_only_the_home_is_given_a_pools_stage_ring(scene: Scene) -> None:
    scene.offer(1, 6, staging=True)
    assert [m.imported for m in scene.movers] == [
        [(1, 9, True)] if n == 6 else [(1, 9 - STAGE_FDS, False)] for n in range(GPUS)
    ]


def test_a_sign_of_life_is_one_of_all(scene: Scene) -> None:
    scene.set.ping(0)
    for mover in scene.movers[1:]:
        mover.say(Pong(0))
    assert scene.set.receive() == []
    scene.movers[0].say(Pong(0))
    assert scene.set.receive() == [Pong(0)]


def test_one_that_is_silent_over_its_copies_is_killed_though_others_speak(scene: Scene) -> None:
    scene.offer(1, 0)
    scene.offer(2, 1)
    scene.set.submit(backup(1, 1))
    scene.now = 0.6
    scene.movers[1].say(Pong(0))
    scene.set.receive()
    assert (scene.movers[0].pings, scene.movers[0].killed) == (1, False)
    scene.now = 1.0
    scene.movers[1].say(Pong(0))
    scene.set.receive()
    assert scene.movers[0].killed
    assert select.select([scene.set.pidfd], [], [], 0)[0], "and the set is lost with it"


def test_one_that_is_silent_over_its_copies_is_killed_though_it_is_to_give_a_pool_back(
    scene: Scene,
) -> None:
    scene.offer(1, 0)
    scene.offer(2, 1)
    scene.set.submit(backup(1, 1))
    scene.movers[0].gives_back = False
    scene.set.release_pool(2)
    for scene.now, killed in ((29.0, False), (31.0, True)):
        scene.movers[1].say(Pong(0))
        scene.set.receive()
        assert scene.movers[0].killed is killed


def test_a_release_is_answered_though_the_pool_was_refused_and_is_being_dropped(
    scene: Scene,
) -> None:
    scene.movers[0].refuses = True
    for mover in scene.movers:
        mover.gives_back = False
    (refused,) = scene.offer(1, 0)
    assert refused == Imported(1, False, "no peer")
    scene.set.release_pool(1)
    for mover in scene.movers:
        mover.say(*(Released(1) for _ in mover.released))
    assert scene.set.receive() == [Released(1)]
    assert scene.set.receive() == []


def test_what_was_said_before_an_end_is_heard_before_it(scene: Scene) -> None:
    scene.offer(1, 0)
    scene.set.submit(backup(1, 1))
    scene.movers[0].say(CopyDone(1, "ok"))
    scene.movers[3].gone = True
    assert scene.set.receive() == [CopyDone(1, "ok")]
    with pytest.raises(ChannelClosed):
        scene.set.receive()


def test_two_real_movers_share_a_tier_and_copy_between_their_pools() -> None:
    movers = MoverSet.spawn("cpu,cpu:other")
    tier = small_tier(LAYOUT)
    pools = {1: OwnedPool(LAYOUT), 2: OwnedPool(LAYOUT)}

    def until(kind: type[Reply], count: int = 1) -> list[Reply]:
        heard: list[Reply] = []
        while sum(isinstance(reply, kind) for reply in heard) < count:
            assert select.select([movers], [], [], 20)[0]
            heard += movers.receive()
        return heard

    try:
        until(Ready)
        until(TierOpened, movers.open_tier(tier))
        for number, pool in pools.items():
            pool.fill(number)
            device = "cpu" if number == 1 else "cpu:other"
            handles = [MemoryHandle(h.kind, h.nbytes, device) for h in pool.handles]
            movers.import_pool(number, LAYOUT, handles, pool.fds)
            assert until(Imported) == [Imported(number, True)]
        movers.submit(copy(1, "backup", part(1, [3], HOST, [slot(5)])))
        assert [r.outcome for r in until(CopyDone) if isinstance(r, CopyDone)] == ["ok"]
        movers.submit(copy(2, "load_back", part(HOST, [slot(5)], 2, [7])))
        movers.submit(copy(3, "peer_copy", part(1, [4], 2, [8])))
        assert [r.outcome for r in until(CopyDone, 2) if isinstance(r, CopyDone)] == ["ok", "ok"]
        assert pools[2].read_page(7) == pools[1].pattern(1, 3)
        assert pools[2].read_page(8) == pools[1].pattern(1, 4)
        movers.release_pool(1)
        assert until(Released) == [Released(1)]
        assert not select.select([movers.pidfd], [], [], 0)[0]
        movers.kill()
        assert select.select([movers.pidfd], [], [], 20)[0]
    finally:
        movers.close()
        for pool in pools.values():
            pool.close()
        tier.close()


@pytest.mark.parametrize("at", ["event", "watch"])
def test_a_set_that_cannot_be_made_leaves_nothing_open_and_nobody_running(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def no_more(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    movers = [Pretended(n) for n in range(2)]
    before = open_descriptors()
    with monkeypatch.context() as patched:
        if at == "event":
            patched.setattr(os, "eventfd", no_more)
        else:
            patched.setattr(Pretended, "fileno", no_more)
        left = iter(movers)
        patched.setattr(MoverHandle, "spawn", lambda *_, **__: next(left))
        with pytest.raises(OSError, match="Too many"):
            MoverSet(movers)  # type: ignore[arg-type]
        assert not any(mover.closed for mover in movers), "they are the caller's still"
        assert open_descriptors() == before
        with pytest.raises(OSError, match="Too many"):
            MoverSet.spawn("cuda:GPU-0,cuda:GPU-1")
    assert all(mover.closed for mover in movers)
    assert open_descriptors() == before - 4
