"""Chaos over two real engines: daemon, mover and engines are killed and stopped in a storm.

Every answer is compared with a cold one; at the end the engines share again and nothing is held.
One short run is for every change, the long ones are for `make engines`.
"""

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.sglang.engines import Engine
from tests.sglang.node import Mode, Node
from tests.sglang.oracle import Oracle
from tests.sglang.storm import TIGHT, Storm, workload
from tests.sglang.test_kills import PAGE, assert_they_share, start

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

REQUESTS = 300
BETWEEN = 12
"""Questions from one fault to the next; what was stopped goes on after half of them."""
REQUESTS_SHORT = 140
"""So many that every kind comes about once."""
CELLS = [
    pytest.param("0.5.23", "mirrored", REQUESTS_SHORT, id="short"),
    *(
        pytest.param(version, mode, REQUESTS, id=f"{version}-{mode}", marks=pytest.mark.every_cell)
        for version in ("0.5.23", "0.5.16")
        for mode in ("mirrored", "thin")
    ),
]


class Chaos:
    """What can be done to a node, each kind as often as another."""

    def __init__(self, node: Node, storm: Storm, version: str, mode: Mode) -> None:
        self.node = node
        self.storm = storm
        self.done: list[str] = []
        self._version = version
        self._mode = mode
        self._engines = 2

    def daemon_kill(self) -> None:
        """Kill the daemon and start the next one when half of the time is over."""
        self.node.daemon.kill()
        self._wait_a_little()
        self.node.restart_daemon()

    def daemon_stop(self) -> None:
        """Stop the daemon for a while."""
        self._stop(self.node.daemon.process.pid)

    def mover_kill(self) -> None:
        """Kill the mover."""
        os.kill(self._mover(), signal.SIGKILL)

    def mover_stop(self) -> None:
        """Stop the mover; the daemon may have replaced it when it is to go on."""
        pidfd = os.pidfd_open(self._mover())
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            self._wait_a_little()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        finally:
            os.close(pidfd)

    def engine_kill(self) -> None:
        """Kill an engine; another one takes its place."""
        doomed = self.storm.engines[0]
        doomed.kill()
        self.storm.lose(doomed)
        self._engines += 1
        fresh = self.node.engine(
            f"e{self._engines}", self._version, self._mode, page_size=PAGE, environ={}, **TIGHT
        )
        self._wait_a_little()
        self.storm.engines.append(fresh.wait_up())

    @property
    def kinds(self) -> list[Callable[[], None]]:
        """All of them."""
        return [
            self.daemon_kill,
            self.daemon_stop,
            self.mover_kill,
            self.mover_stop,
            self.engine_kill,
        ]

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            self._wait_a_little()
        finally:
            os.kill(pid, signal.SIGCONT)

    def _mover(self) -> int:
        """The mover, once there is one."""
        report = self.node.wait_for(lambda report: report.counters["daemon_mover_pid"] > 0)
        return report.counters["daemon_mover_pid"]

    def _wait_a_little(self) -> None:
        self.storm.run(until=max(1, self.storm.left - BETWEEN // 2))


@pytest.mark.parametrize(("version", "mode", "requests"), CELLS)
def test_chaos_over_real_engines_fails_no_request(
    version: str, mode: Mode, requests: int, node: Node, oracle: Oracle
) -> None:
    engines: list[Engine] = start(node, version, mode)
    storm = Storm(engines, workload(oracle, version, requests, seed=8), seed=8)
    chaos = Chaos(node, storm, version, mode)
    draw = random.Random(8)
    bag: list[Callable[[], None]] = []
    while storm.left > 3 * BETWEEN:
        storm.run(until=storm.left - BETWEEN)
        if not bag:
            bag = chaos.kinds
            draw.shuffle(bag)
        fault = bag.pop()
        fault()
        chaos.done.append(fault.__name__)
    tally = storm.run()
    assert set(chaos.done) == {kind.__name__ for kind in chaos.kinds}
    assert tally.wrong == []
    assert tally.hit > 0
    assert_they_share(node, storm.engines, oracle, 8_000)
    node.assert_clean()
