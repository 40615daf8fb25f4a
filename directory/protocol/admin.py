"""What people ask a daemon over the session socket, and what it says: figures, tree, explanations.

Owns these messages; nothing here changes the daemon's state. Counters only ever grow while an
epoch lasts; whoever wants a rate takes the difference of two reports. A report carries no token of
a prompt: pages are named by chained digests (directory/analytics/record.py).
"""

from __future__ import annotations

import msgspec

from directory.core.ids import PoolId
from directory.core.namespace import NamespaceKey


class AdminCheck(msgspec.Struct, frozen=True, tag="admin_check"):
    """After Hello: ask for the state of the daemon, without registering anything. Repeatable."""


class AdminStats(msgspec.Struct, frozen=True, tag="admin_stats"):
    """After Hello: ask for figures. `hottest`: how many of the hottest prefixes to name."""

    hottest: int = 0


class AdminTree(msgspec.Struct, frozen=True, tag="admin_tree"):
    """After Hello: ask for the upper part of the tree, hottest first. `nodes_max`: nodes to name at
    most; `pages_min`: leave subtrees out that have fewer pages; `depth_max`: generations of nodes
    (0: all); `instance`, `namespace` (hex digest): only what these have."""

    nodes_max: int = 1_000
    pages_min: int = 0
    depth_max: int = 0
    instance: str = ""
    namespace: str = ""


class AdminExplain(msgspec.Struct, frozen=True, tag="admin_explain"):
    """After Hello: ask how far a prompt would match now, from where, and why no further. `tokens`:
    packed; `instance`: for whose pool ("": for one that has nothing)."""

    tokens: bytes
    namespace: NamespaceKey = NamespaceKey()
    instance: str = ""


class PoolReport(msgspec.Struct, frozen=True):
    """One registration in an `AdminReport`. `ranks`: registered ones; pages are of the tree."""

    pool: PoolId
    instance: str
    generation: int
    mode: str
    phase: str
    ranks: int
    world_size: int
    page_count: int
    pages: int
    protected_pages: int
    leases: int
    copies: int

    @property
    def name(self) -> str:
        """For people: beside one that has ended, its instance may have a live one again."""
        return self.instance if self.phase == "live" else f"{self.instance} ({self.phase})"


class AdminReport(msgspec.Struct, frozen=True, tag="admin_report"):
    """Answer to AdminCheck: the daemon has walked its state. `violations_left_out`: how many more
    there are than are listed."""

    epoch: int
    counters: dict[str, int]
    violations: tuple[str, ...]
    pools: tuple[PoolReport, ...]
    violations_left_out: int = 0


class ServedReport(msgspec.Struct, frozen=True):
    """Sums over the ended requests of one instance since the daemon began. Only `requests` are in
    the token sums; the others stand beside them. `hit`: own pool, host tier, other pool, store."""

    instance: str
    requests: int = 0
    retries: int = 0
    recomputations: int = 0
    probes: int = 0
    lookups: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit: tuple[int, int, int, int] = (0, 0, 0, 0)
    blocks: int = 0
    hit_blocks: int = 0
    restored_tokens: int = 0
    inserted_tokens: int = 0
    not_restorable_tokens: int = 0


class HistogramReport(msgspec.Struct, frozen=True):
    """Durations in microseconds: `counts[i]` were at most `bounds_us[i]` and more than the bound
    before; the last count is of all longer ones."""

    name: str
    bounds_us: tuple[int, ...]
    counts: tuple[int, ...]
    sum_us: int


class EvictedReport(msgspec.Struct, frozen=True):
    """Pages given up at a tier for a reason, since the daemon began."""

    tier: str
    reason: str
    pages: int


class CauseReport(msgspec.Struct, frozen=True):
    """Why tokens were computed: requests whose first computed token has this cause, and tokens.
    Counted as requests are written to the access log, so a little later than the other sums."""

    instance: str
    cause: str
    requests: int
    tokens: int


class TierReport(msgspec.Struct, frozen=True):
    """The host tier: bytes that it may have, and of what it holds pages by page size."""

    total_bytes: int
    pages: int
    leased_pages: int
    sizes: tuple[tuple[int, int, int], ...] = ()
    """(bytes of a page, slots, free slots) of each page size that has segments."""


class LogReport(msgspec.Struct, frozen=True):
    """The access log: where it is, what stands in it, what is lost and what waits."""

    folder: str
    frames_written: int
    bytes_written: int
    records_lost: int
    waiting: int
    last_error: str = ""


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix that many requests hit: its digest (hex), pages, and how many hits of late."""

    digest: str
    namespace: str
    pages: int
    hits: int


class StatsReport(msgspec.Struct, frozen=True, tag="stats_report", kw_only=True):
    """Answer to AdminStats. `at_us`, `started_us`: microseconds since 1970. `counters` only grow
    while `epoch` lasts, `gauges` are of this moment."""

    at_us: int
    started_us: int
    epoch: int
    version: str
    counters: dict[str, int]
    gauges: dict[str, int]
    served: tuple[ServedReport, ...]
    pools: tuple[PoolReport, ...]
    host: TierReport
    evicted: tuple[EvictedReport, ...] = ()
    histograms: tuple[HistogramReport, ...] = ()
    log: LogReport | None = None
    hottest: tuple[HotPrefix, ...] = ()
    causes: tuple[CauseReport, ...] = ()


class NodeReport(msgspec.Struct, frozen=True):
    """A node. `parent`: 0 for the first of a namespace; `depth`: nodes above it; `start`: pages
    above it; `places`: (place, state, locks, age) with the host tier as "host", age in uses of that
    place since it was last used; `below`: pages of its subtree without its own."""

    node: int
    parent: int
    depth: int
    start: int
    pages: int
    digest: str
    places: tuple[tuple[str, str, int, int], ...]
    below: int = 0
    children: int = 0


class SpaceReport(msgspec.Struct, frozen=True):
    """A namespace with its nodes, each after its parent."""

    namespace: str
    fields: dict[str, str]
    page_tokens: int
    page_bytes: int
    pages: int
    nodes: tuple[NodeReport, ...]


class TreeReport(msgspec.Struct, frozen=True, tag="tree_report"):
    """Answer to AdminTree. `nodes_left_out`: looked at and not named."""

    spaces: tuple[SpaceReport, ...]
    nodes: int
    nodes_left_out: int


class Stretch(msgspec.Struct, frozen=True):
    """Neighbouring tokens of a prompt and what becomes of them: `verdict` is "own", "host", "peer"
    or a cause of docs/analytics.md; `detail` says more in words."""

    verdict: str
    first_token: int
    tokens: int
    detail: str = ""


class ExplainReport(msgspec.Struct, frozen=True, tag="explain_report"):
    """Answer to AdminExplain. `stretches` cover the prompt from its first token to its last."""

    namespace: str
    page_tokens: int
    tokens: int
    matched_tokens: int
    stretches: tuple[Stretch, ...]


AdminRequest = AdminCheck | AdminStats | AdminTree | AdminExplain
AdminReply = AdminReport | StatsReport | TreeReport | ExplainReport
