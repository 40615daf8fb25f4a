"""`launch_server` as a user starts it, with what `treecored sglang-env` prints, over HTTP."""

import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from directory.cli.sglang_env import CPU_ENVIRONMENT, FLAGS_VARIABLE
from directory.protocol.variables import PREFIX
from tests.ports import free_ports
from tests.sglang import model
from tests.sglang.engines import ARGUMENTS, END_S, Nursery, environ_of, session_of
from tests.sglang.environments import ROOT, python_of
from tests.sglang.node import PATIENT, Mode, Node, floor
from tests.sglang.oracle import Oracle
from tests.sglang.patience import Patience

# Two servers import SGLang anew, which takes minutes on two cores: not part of every run.
pytestmark = [pytest.mark.engines, pytest.mark.every_cell, pytest.mark.timeout(1500)]

ENGINE_TROUBLE = ("memory leak", "Scheduler hit an exception")
VERSION, PAGE, LENGTH = "0.5.23", 16, 300
START_CPU_S = 240.0
"""Three processes import SGLang with all of its models, 25 s each and thrice that when nothing is
compiled yet."""


class Process:
    """Something that serves HTTP, and its children."""

    ready = "/health"

    def __init__(
        self, node: Node, name: str, command: list[str], environ: Mapping[str, str]
    ) -> None:
        self.port = free_ports(1)
        self.log_path = node.folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], cwd=ROOT, env=dict(environ),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_up(self) -> None:
        """Wait until it answers that it is ready."""
        patience = Patience(self.process.pid, START_CPU_S)
        while True:
            try:
                if self.get(self.ready)[0] == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            assert self.process.poll() is None, self.log()[-4000:]
            assert not patience.lost(), f"{patience.lost()}:\n{self.log()[-4000:]}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)

    def generate(self, tokens: list[int]) -> dict[str, Any]:
        """`/generate` for token ids."""
        status, text = self.post("/generate", {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        })  # fmt: skip
        assert status == 200, text
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        return _ask(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"))

    def post(self, path: str, body: object = None) -> tuple[int, str]:
        """Status and text."""
        return _ask(
            urllib.request.Request(
                f"http://127.0.0.1:{self.port}{path}",
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
        )

    def log(self) -> str:
        """What it wrote."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End it and all that it started."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        for pid in session_of(self.process.pid):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        self.process.wait(END_S)


class Server(Process):
    """One `launch_server` in a shell that has evaluated what `treecored sglang-env` prints.

    What of `ARGUMENTS` is not printed makes the engine small.
    """

    def __init__(self, node: Node, name: str, mode: Mode, *flags: str) -> None:
        lines = sglang_env(node, "--cpu", "--instance", name, "--mode", mode)
        script = f'eval "$1"; shift; exec "$@" ${FLAGS_VARIABLE}'
        more = [*_small(lines), "--page-size", str(PAGE), "--model-path", str(node.model), *flags]
        command = ["bash", "-euc", script, "bash", lines,
                   str(python_of(VERSION)), "-m", "tests.sglang.tied", "sglang.launch_server",
                   *more]  # fmt: skip
        environ = environ_of(VERSION)
        for variable in CPU_ENVIRONMENT:  # it is printed, too
            del environ[variable]
        super().__init__(node, name, command, environ)


class Router(Process):
    """SGLang's router before two servers, which it serves by turns."""

    ready = "/readiness"  # it is healthy before it has found its servers

    def __init__(self, node: Node, servers: tuple[Server, Server]) -> None:
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        command = [str(python_of(VERSION)), "-m", "tests.sglang.tied",
                   "sglang_router.launch_router", "--worker-urls", *urls, "--host", "127.0.0.1",
                   "--policy", "round_robin", "--prometheus-port", str(free_ports(1))]  # fmt: skip
        super().__init__(node, "router", command, environ_of(VERSION))

    def __enter__(self) -> Self:
        self.wait_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sglang_env(node: Node, *options: str) -> str:
    """What the command prints for a node's daemon, with deadlines for a busy machine."""
    patient = [f"--set={name.removeprefix(PREFIX)}={value}" for name, value in PATIENT.items()]
    runtime_dir = ["--runtime-dir", str(node.daemon.runtime_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "directory.cli.main", "sglang-env", *runtime_dir, *patient,
         *options],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def _small(lines: str) -> list[str]:
    """Those of `ARGUMENTS` as flags that the lines do not have."""
    printed = " ".join(shlex.split(lines, comments=True)).replace("=", " ").split()
    flags = []
    for name, value in ARGUMENTS.items():
        flag = "--" + name.replace("_", "-")
        if flag not in printed:
            flags += [flag] if value is True else [flag, str(value)]
    return flags


def _ask(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def node(
    nursery: Callable[[str], Nursery], models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """One daemon for all tests here: servers take long to start."""
    with Node(tmp_path_factory.mktemp("http"), nursery, models / "one") as made:
        yield made


@pytest.fixture(scope="module")
def servers(node: Node) -> Iterator[tuple[Server, Server]]:
    """Two that serve."""
    pair = Server(node, "one", "mirrored", "--enable-metrics"), Server(node, "two", "thin")
    try:
        for server in pair:
            server.wait_up()
        yield pair
    finally:
        for server in pair:
            server.close()


def test_two_servers_share_over_http(
    servers: tuple[Server, Server], node: Node, oracle: Oracle
) -> None:
    one, two = servers
    prompt = model.prompt(1, LENGTH)
    cold = oracle.tokens(VERSION, prompt)
    whole = floor(LENGTH, PAGE)

    with node.backed_up(LENGTH // PAGE):
        answer = one.generate(prompt)
    assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (cold, 0)
    answer = two.generate(prompt)
    assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (cold, whole)

    # A flush empties the server's own pool; the daemon still has what it has backed up.
    assert one.post("/flush_cache")[0] == 200
    answer = one.generate(prompt)
    assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (cold, whole)

    assert one.get("/health")[0] == 200
    status, metrics = one.get("/metrics")
    assert status == 200
    assert _metric(metrics, "sglang:cached_tokens_total") == whole
    assert _metric(metrics, "sglang:num_requests_total") == 2
    for server in servers:
        assert not [word for word in ENGINE_TROUBLE if word in server.log()]
    assert node.wait_at_rest().violations == ()


def test_two_servers_behind_the_router_share(
    servers: tuple[Server, Server], node: Node, oracle: Oracle
) -> None:
    with Router(node, servers) as router:
        prompt = model.prompt(2, LENGTH)
        cold = oracle.tokens(VERSION, prompt)
        with node.backed_up(LENGTH // PAGE):
            answer = router.generate(prompt)
        assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (cold, 0)
        # By turns: the next one is the other server's.
        answer = router.generate(prompt)
        whole = floor(LENGTH, PAGE)
        assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (cold, whole)
    served = [server.log().count("Prefill batch") for server in servers]
    assert min(served) > 0, "one server got everything"


def _metric(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert lines, f"{name} is not among the metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
