"""The consumers as processes: started on a port, asked over HTTP, ended.

Owns the processes. Both listen on every interface, for they know no other way.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
from pathlib import Path
from typing import Any, Self

from tests.integration.daemon.listening import get
from tests.integration.daemon.support import PAGE_SIZE, wait_until

MODEL = "model"


class Program:
    """A program of the consumers' environment that answers on a port."""

    def __init__(self, python: Path, port: int, log: Path, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [python, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self, path: str) -> None:
        """Wait until it answers."""

        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                get(f"{self.url}{path}")
            except urllib.error.HTTPError:
                return True
            except OSError:
                return False
            return True

        wait_until(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Indexer(Program):
    """Dynamo's standalone indexer: a router's view of who has what."""

    def __init__(self, python: Path, port: int, log: Path) -> None:
        super().__init__(python, port, log, "dynamo.indexer", "--port", str(port))
        self.wait("/workers")

    def register(
        self,
        number: int,
        stream: dict[str, str],
        replay: bool = True,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """Have it listen to one scheduler's stream."""
        answer = self._post(
            "/register",
            instance_id=number,
            dp_rank=0,
            endpoint=stream["events"],
            replay_endpoint=stream["replay"] if replay else None,
            model_name=MODEL,
            block_size=page_size,
        )
        assert answer == {"status": "ok"}

    def longest(self, number: int, tokens: list[int], **namespace: str) -> tuple[int, int]:
        """Tokens of a prompt that a scheduler has: in its pool, and there or in the host tier."""
        answer = self._post("/query", model_name=MODEL, token_ids=tokens, **namespace)
        found = answer["instances"].get(str(number), {})
        return found.get("gpu", 0), found.get("cpu", 0)

    def _post(self, path: str, **fields: object) -> Any:
        return get(f"{self.url}{path}", json.dumps(fields).encode())


class Viewer(Program):
    """radixview: a page that shows the tree."""

    def __init__(self, python: Path, port: int, log: Path, server: str) -> None:
        super().__init__(
            python, port, log, "radixview", "--server", server, "--view-port", str(port)
        )
        self.wait("/api/tree")

    def blocks(self) -> dict[int, str]:
        """The medium of every block that it shows, by hash; nothing while one has no parent: who
        has just come is told what changes before it is told everything."""
        shown: dict[int, str] = {}
        for node in get(f"{self.url}/api/tree")["nodes"]:
            if node["missing"]:
                return {}
            for block in get(f"{self.url}/api/run?id={node['id']}")["blocks"]:
                shown[int(block["hash"])] = block["medium"]
        return shown
