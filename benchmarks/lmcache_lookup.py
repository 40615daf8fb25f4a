"""LMCache's own server and client as a contestant: runs in an environment that has LMCache.

    PYTHON -m benchmarks.lmcache_lookup

Reads one JSON list a line (`["build", tokens]`, `["run", case, times]`) and answers each with one
line: null, or microseconds, so that rounds of several processes can be interleaved. Starts
`lmcache server` on this machine's loopback and ends it. What is timed is what SGLang does before it
knows how much of a prompt is there: the key, the look-up, and the answer that it waits for. The
release of what was found is not. Made for 0.5.6, which runs without a GPU. It never imports
treecored.
"""

from __future__ import annotations

import importlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.answering import answer

CHUNK, LAYERS, HIDDEN, MODEL = 256, 1, 8, "bench"
ANSWER_S, START_S = 60.0, 90.0
clock = time.perf_counter_ns


class Server:
    """`lmcache server`, and a client of it that has a prompt stored."""

    def __init__(self) -> None:
        port, http = _free_port(), _free_port()
        program = Path(sys.executable).with_name("lmcache")
        command = [str(program), "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", "2"]
        command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_for(port)
        self.types = importlib.import_module("lmcache.v1.multiprocess.custom_types")
        factory = importlib.import_module("lmcache.v1.multiprocess.transport.factory")
        self.client: Any = factory.RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        chunk = self.client.get_chunk_size().result(timeout=START_S)
        assert chunk == CHUNK, chunk
        payload = self.types.RegisterEngineDrivenContextPayload(
            instance_id=os.getpid(),
            model_name=MODEL,
            world_size=1,
            block_size=64,
            num_layers=LAYERS,
            hidden_dim_size=HIDDEN,
            dtype_str="float16",
            use_mla=False,
            num_physical_slots=CHUNK,
        )
        registered = self.client.register_kv_cache_engine_driven_context(payload)
        registered.result(timeout=ANSWER_S)
        self.numbers = 0
        self.tokens: list[int] = []

    def build(self, count: int) -> None:
        """Store a prompt of so many tokens."""
        import torch

        self.tokens = random.Random(0).choices(range(128_000), k=count)
        key = self._key(worker=0)
        # LMCache's own way of handing pages over, on a machine without a GPU.
        transfer = importlib.import_module("lmcache.v1.multiprocess.transfer_context.pickle")
        context = transfer.EngineDrivenContextPickle.__new__(transfer.EngineDrivenContextPickle)
        context.req_client, context.mq_timeout = self.client, ANSWER_S
        shape = (2, LAYERS, CHUNK, HIDDEN)
        chunks = [torch.zeros(*shape, dtype=torch.float16) for _ in range(count // CHUNK)]
        context.prepare_store(key, os.getpid())
        assert context.commit_store(key, os.getpid(), chunks)
        self.client.end_session(key.request_id).result(timeout=ANSWER_S)

    def case_lookup(self, times: int) -> list[float]:
        """Look the prompt up, all of which is there, and hold what was found."""
        taken: list[float] = []
        for _ in range(times):
            begin = clock()
            key = self._key()
            self.client.lookup(key, 1).result(timeout=ANSWER_S)
            waited = self.client.wait_prefetch_status(key.request_id, 10.0)
            found = waited.result(timeout=ANSWER_S)
            taken.append((clock() - begin) / 1e3)
            assert found == len(self.tokens) // CHUNK, found
            self.client.free_lookup_locks(key, 1).result(timeout=ANSWER_S)
            self.client.end_session(key.request_id).result(timeout=ANSWER_S)
        return taken

    def _key(self, worker: int | None = None) -> Any:
        self.numbers += 1
        return self.types.IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=worker,
            token_ids=tuple(self.tokens),
            start=0,
            end=len(self.tokens) // CHUNK * CHUNK,
            request_id=f"r{self.numbers}",
            cache_salt="",
            num_kv_readers=1,
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError("LMCache's server did not start")


def main() -> None:
    """Do what the lines say until they end."""
    server = Server()

    def carry_out(verb: str, arguments: list[Any]) -> list[float] | None:
        if verb == "build":
            server.build(*arguments)
            return None
        case, times = arguments
        taken: list[float] = getattr(server, f"case_{case}")(times)
        return taken

    try:
        answer(carry_out)
    finally:
        server.process.terminate()
        server.process.wait(10)
    os._exit(0)  # its client's threads do not end


if __name__ == "__main__":
    main()
