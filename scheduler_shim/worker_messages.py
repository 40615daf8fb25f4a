"""Messages between a driver (demo, replay, tests) and a reference-scheduler worker process.

Owns their shapes, nothing else. They travel as frames of an FdChannel, tagged msgspec maps.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """First message: become a scheduler. `bytes_per_token`: KV bytes over all layers.

    `private`: a cache salt of the instance's own, so that nothing is shared.
    `concurrency`: requests that the scheduler may have in progress at once. `settle`: a request
    counts as finished only when the daemon has carried out everything it reported (strict order).
    `named`: the pool speaks of its pages by name, as a GPU's scheduler does. `staging_bytes`: of
    a staging slab (0: none).
    """

    instance: str
    mode: Literal["mirrored", "thin"]
    runtime_dir: str
    page_size: int
    page_count: int
    bytes_per_token: int
    layers: int = 2
    private: bool = False
    concurrency: int = 1
    token_seed: int = 0
    settle: bool = False
    named: bool = False
    staging_bytes: int = 0


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    """Answer to Configure: registered (or degraded: the daemon is not there)."""

    ok: bool
    pool: int = 0
    generation: int = 0
    detail: str = ""


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """A request. Either `tokens` (packed u32) or `blocks` (packed u32 ids of `block_tokens`
    tokens each, `length` tokens in all; tokens are made from the ids deterministically).

    `output`: packed tokens that the request "generates" after its prompt (inserted too).
    """

    number: int
    tokens: bytes = b""
    blocks: bytes = b""
    block_tokens: int = 0
    length: int = 0
    output: bytes = b""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request's end. Page counts are of its prompt: hit in the own pool, restored from the host
    tier, restored from another scheduler's pool; `verified` pages were read back and compared.
    `accepted_tokens`: how much of prompt and output the tree took, always whole pages."""

    number: int
    prompt_tokens: int
    own_pages: int
    host_pages: int
    peer_pages: int
    verified: int
    wrong: int
    seconds: float
    error: str = ""
    accepted_tokens: int = 0


class AskSummary(msgspec.Struct, frozen=True, tag="ask_summary"):
    """Ask for a Summary; with `check` the daemon's and the mirror's invariants are walked."""

    check: bool = False


class Summary(msgspec.Struct, frozen=True, tag="summary"):
    """What a worker has seen. `rtt_us`: sampled round trips of synchronous calls, microseconds.

    `counters`: the shim's own; `daemon`: the daemon's counters; `violations`: of both.
    """

    instance: str
    mode: str
    rtt_us: tuple[float, ...]
    counters: dict[str, int]
    daemon: dict[str, int]
    violations: tuple[str, ...]


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Close the session with the daemon, as a fault would; the scheduler goes on and returns."""


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """End the worker after what is in progress."""


DAEMON_LOST: Final = "the daemon was lost: "
"""How a Summary's violations name a loss that the scheduler has come back from or not."""

ToWorker = Configure | Prompt | AskSummary | Cut | Quit
FromWorker = Configured | Finished | Summary
