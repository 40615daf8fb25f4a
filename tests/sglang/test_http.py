"""`launch_server` as a user starts it, with `--radix-cache-backend treecored`, over HTTP."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.sglang import model
from tests.sglang.engines import ARGUMENTS, END_S, IMPORT_S, Nursery, environ_of, session_of
from tests.sglang.environments import ROOT, python_of
from tests.sglang.node import PATIENT, Node, floor
from tests.sglang.oracle import Oracle

# Two servers import SGLang anew, which takes minutes on two cores: not part of every run.
pytestmark = [pytest.mark.engines, pytest.mark.every_cell, pytest.mark.timeout(400)]

ENGINE_TROUBLE = ("memory leak", "Scheduler hit an exception")
VERSION, PAGE, LENGTH = "0.5.23", 16, 300


class Process:
    """Something that serves HTTP, and its children."""

    ready = "/health"

    def __init__(
        self, node: Node, name: str, command: list[str], variables: Mapping[str, str]
    ) -> None:
        self.port = _free_port()
        self.log_path = node.folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [str(python_of(VERSION)), "-m", "tests.sglang.tied", *command,
                 "--port", str(self.port)],
                cwd=ROOT, env=environ_of(VERSION, **variables), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_up(self) -> None:
        """Wait until it answers that it is ready."""
        give_up = time.monotonic() + IMPORT_S
        while True:
            try:
                if self.get(self.ready)[0] == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            assert self.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < give_up, self.log()[-4000:]
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
    """One `launch_server`."""

    def __init__(self, node: Node, name: str, *flags: str) -> None:
        variables = {
            **PATIENT,
            "TREECORED_RUNTIME_DIR": str(node.daemon.runtime_dir),
            "TREECORED_INSTANCE": name,
        }
        command = ["sglang.launch_server", "--model-path", str(node.model),
                   "--page-size", str(PAGE), "--radix-cache-backend", "treecored",
                   *_flags(), *flags]  # fmt: skip
        super().__init__(node, name, command, variables)


class Router(Process):
    """SGLang's router before two servers, which it serves by turns."""

    ready = "/readiness"  # it is healthy before it has found its servers

    def __init__(self, node: Node, servers: tuple[Server, Server]) -> None:
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        command = ["sglang_router.launch_router", "--worker-urls", *urls, "--host", "127.0.0.1",
                   "--policy", "round_robin", "--prometheus-port", str(_free_port())]  # fmt: skip
        super().__init__(node, "router", command, {})

    def __enter__(self) -> Self:
        self.wait_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flags() -> list[str]:
    """`ARGUMENTS` as flags."""
    flags = []
    for name, value in ARGUMENTS.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


def _ask(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert isinstance(port, int)
        return port


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
    pair = Server(node, "one", "--enable-metrics"), Server(node, "two")
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
