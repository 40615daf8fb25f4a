"""The cache that both dialects of SGLang share: matches, locks, stores and evictions.

Owns SGLang's handles and, for each locked one, the request that protects its path in the own tree.
The tree itself is the room's and may change hands at any loss or return; pages beyond the tree are
SGLang's own. It must never free a page that a row still names: the row is rewritten to the pages
that are in the tree before a duplicate goes. And it must never let SGLang's sums be off by a page.

A request's life here: `match` finds what the pool has of its tokens and names it in a handle; a
lock turns the handle into a request of the room's, which holds the path whoever keeps the tree; a
checkpoint names the row's new pages, publishes them and moves the lock on to the longer path; the
end publishes what is left, frees what is nobody's, and lets go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
)

from directory.core.actions import Totals
from directory.core.errors import InternalError, TreecoredError
from directory.core.namespace import NamespaceKey
from scheduler_shim.own_tree import Found, OwnTree, Published
from scheduler_shim.pools import Pool
from scheduler_shim.request import Request
from scheduler_shim.room import Room
from scheduler_shim.sglang.handles import Handle, grow
from scheduler_shim.sglang.keys import KeyMaker, Path
from scheduler_shim.sglang.names import PageNames

logger = logging.getLogger(__name__)


class CacheShim(Protocol):
    """What the cache needs of the shim."""

    room: Room
    rows: Callable[[], Collection[Request]]
    key_of: Callable[..., tuple[NamespaceKey, bytes]]
    ended: list[Any]

    @property
    def pool(self) -> Pool:
        """The engine's own."""
        ...

    @property
    def tree(self) -> OwnTree:
        """Who keeps the tree now."""
        ...

    @property
    def key_epoch(self) -> int:
        """The weights' number."""
        ...

    @property
    def outside_pages(self) -> int:
        """Pages that are neither free nor SGLang's own nor in the tree."""
        ...

    def request(self, key: NamespaceKey, tokens: bytes) -> Request:
        """A request with a name of its own."""
        ...

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Publish the row's first pages, once more where the daemon was lost over it. The row has
        what is in the tree then."""
        ...

    def look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost; whether it was lost just now."""
        ...

    def in_force(self, request: Request) -> bool:
        """Whether the weights are those under which the request began."""
        ...

    def evict(self, pages: int) -> int:
        """Evict and free pages, as many as there are; returns how many went."""
        ...

    def flush(self) -> None:
        """Give up everything."""
        ...


class TreecoredCache(BasePrefixCache):  # type: ignore[misc]  # SGLang has no types for mypy
    """What SGLang calls its tree cache. `params`: SGLang's `CacheInitParams`."""

    def __init__(self, params: Any, shim: CacheShim, names: PageNames, keys: KeyMaker) -> None:
        self.shim = shim
        self.names = names
        self.keys = keys
        self.disable: bool = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.device = names.device
        self.is_eagle: bool = params.is_eagle
        self.eviction_policy = "lru"
        self.sliding_window_size = None
        self.enable_kv_cache_events = False
        self.enable_session_radix_cache = False
        self._finished_insert = not getattr(params, "disable_finished_insert", False)
        self._root = Handle(NamespaceKey(), b"", Found(b""))
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.device)
        self._live: WeakValueDictionary[int, Handle] = WeakValueDictionary()
        self._grown = False
        self._locked: dict[int, Handle] = {}
        self._rows: dict[int, Request] = {}
        shim.rows = self._rows.values
        shim.key_of = self.key_of
        if params.enable_metrics:
            self.init_metrics_collector()

    # Matches.

    def key_of(self, req: Any) -> tuple[NamespaceKey, bytes]:
        """A waiting request's namespace and all its tokens so far, packed."""
        return self.keys.of_request(req)

    def find(self, radix_key: Any, req: Any = None) -> Handle:
        """The longest path of whole pages that the pool has of a key; protected by nobody."""
        if self.disable or (req is None and not len(radix_key)):
            return self._root
        # A request's empty path has a namespace, too: what it computes belongs to these weights.
        return self.find_path(self.keys.of_key(radix_key, req), req)

    def find_path(self, path: Path, req: Any = None) -> Handle:
        """As `find`, of a path that is made already."""
        last = getattr(req, "last_node", None)
        if not isinstance(last, Handle):
            last = None
        same = last is not None and last.asked is path.tokens and last.key is path.key
        found = self.shim.tree.find(path.key, path.tokens, last.found if last and same else None)
        if last is None or (
            last.found is not found and (found.node is None or last.found.node is not found.node)
        ):
            last = self._handle(path, found)
        last.found = found  # else nothing of it has moved: the node is the same one
        last.asked = path.tokens
        return last

    def _handle(self, path: Path, found: Found) -> Handle:
        pages = len(found.pages) // 4
        handle = Handle(path.key, path.tokens[: pages * self.keys.page_key(path.key)], found)
        self._live[id(handle)] = handle
        self._grown = False
        return handle

    def slots_of(self, handle: Handle) -> torch.Tensor:
        """Where a path's pages lie: int64 on the device, in token order."""
        if not handle.pages:
            return self._no_slots
        if handle.slots is None:
            handle.slots = self.names.path_slots(handle.found.pages)
        return handle.slots

    # Locks.

    def inc_lock_ref(self, node: Handle) -> Any:
        """Protect a handle's path once more. The empty path of no namespace needs nothing."""
        if node is not self._root:
            node.locks += 1
            if node.locks == 1:
                self._hold(node)
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Handle, params: Any = None, **_: Any) -> Any:  # noqa: ARG002
        """Undo one `inc_lock_ref`."""
        if node is not self._root:
            if node.locks < 1:
                raise InternalError(f"{node!r} is not locked")
            node.locks -= 1
            if not node.locks:
                self._let_go(node)
        return DecLockRefResult(delta=0)

    def _hold(self, handle: Handle) -> None:
        """Make the request that protects the path.

        It counts as a row before anybody is asked: where the daemon is lost in the asking, what
        comes in its place protects the row like all others.
        """
        request = self._begin(Path(handle.key, handle.tokens), handle)
        if self.shim.tree.hold(request, handle.found):
            return
        if self.shim.look_for_loss() and request.node is not None:
            return
        handle.locks = 0
        self._let_go(handle)
        raise InternalError(f"{handle!r} was given up between its match and its lock")

    def _begin(self, path: Path, handle: Handle) -> Request:
        """A new row of the room's that has a handle's pages; the handle is locked once by it."""
        request = self.shim.request(path.key, path.tokens)
        request.row.frombytes(handle.found.pages)
        request.tree_pages = handle.pages
        handle.request = request
        self._rows[request.number] = request
        self._locked[request.number] = handle
        return request

    def _let_go(self, handle: Handle) -> None:
        request, handle.request = handle.request, None
        if request is not None:
            self.shim.tree.release(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._rows[request.number]
        del self._locked[request.number]

    # Stores.

    def advance(self, anchor: Handle | None, path: Path, row: torch.Tensor) -> Handle:
        """Publish a running request's row as far as the path goes, and move its lock on.

        `anchor`: what it has locked; `row`: a view of its slots in SGLang's table, one a token,
        which names the pages in the tree afterwards. Returns the handle that is locked now: the
        anchor where nothing was published, and then all pages beyond it are the request's.
        """
        anchor = anchor or self._root
        if len(path.tokens) == len(anchor.tokens):
            self._touch(anchor)
            return anchor
        request = self._row_of(anchor, path)
        published = self._publish(request, path, row, keep=True)
        if published is None:
            if request is not anchor.request:
                self._forget(request)
            return anchor
        handle = self._handle(path, Found(published.canonical, request.node))
        handle.request, handle.locks = request, 1
        self._locked[request.number] = handle
        if request is anchor.request:
            anchor.request, anchor.locks = None, 0
        else:
            self.dec_lock_ref(anchor)
        return handle

    def store(self, anchor: Handle | None, path: Path, row: torch.Tensor) -> int:
        """Publish a finished request's row; returns how many of its tokens are the tree's now.

        The caller lets the anchor's lock go afterwards.
        """
        anchor = anchor or self._root
        if len(path.tokens) == len(anchor.tokens):
            self._touch(anchor)
            return anchor.pages * self.page_size
        if self.adds_nothing(anchor, path):
            return anchor.pages * self.page_size
        request = self._row_of(anchor, path)
        published = self._publish(request, path, row, keep=False)
        if request is not anchor.request:
            self._forget(request)
        return (published.accepted_pages if published else anchor.pages) * self.page_size

    def adds_nothing(self, anchor: Handle | None, path: Path) -> bool:
        """Whether the tree has every page of a finished request's path, beyond what it has locked,
        too. Its own pages, which never had names, are SGLang's to free then."""
        request = anchor.request if anchor is not None else None
        if anchor is None or request is None or len(path.tokens) <= len(anchor.tokens):
            return False
        same = request.key == path.key and path.tokens.startswith(anchor.tokens)
        if not (same and self.shim.in_force(request)):
            return False
        there = self.shim.tree.use_again(request, path.tokens)
        self.shim.look_for_loss()
        return there

    def _row_of(self, anchor: Handle, path: Path) -> Request:
        """The request that goes on to the longer path: the anchor's, unless it protects others."""
        if anchor.locks == 1 and anchor.request is not None:
            return anchor.request
        request = self.shim.request(path.key, path.tokens)
        request.row.frombytes(anchor.found.pages)
        request.tree_pages = anchor.pages
        self._rows[request.number] = request
        self._locked[request.number] = anchor
        return request

    def _publish(
        self, request: Request, path: Path, row: torch.Tensor, *, keep: bool
    ) -> Published | None:
        """Name the row's new pages and put them into the tree; None: all is as it was before."""
        page_key, size = self.keys.page_key(path.key), self.page_size
        first, pages = request.tree_pages, len(path.tokens) // page_key
        known = request.tokens[: first * page_key]
        if pages <= first or request.key != path.key or not path.tokens.startswith(known):
            return None
        if not self.shim.in_force(request):
            return None
        named = self.names.name(row[first * size : pages * size].to(torch.int64))
        request.row.extend(named)
        before, request.tokens = request.tokens, path.tokens
        try:
            # After the naming: whoever waits for this value finds the pages where they are.
            published = self.shim.publish(request, pages, self.shim.pool.advance(), keep=keep)
        except TreecoredError as error:
            logger.warning("treecored: a request's pages are not shared: %s", error)
            published = None
        if published is None:
            del request.row[first:]
            request.tokens = before
            self.names.forget(named)
            return None
        if published.duplicates:
            kept = self.names.slots(published.canonical[4 * first :])
            row[first * size : pages * size] = kept.to(row.dtype)
            self.shim.room.free(published.duplicates)
        self.shim.look_for_loss()
        return published

    def _touch(self, handle: Handle) -> None:
        """The path was used, and nothing of it is new."""
        if handle.pages:
            self.shim.tree.touch(handle.key, handle.tokens)

    # Room.

    def evict(self, params: Any) -> Any:
        """Give up as many tokens as are wanted, to the page, or all that nobody protects."""
        started = time.perf_counter()
        pages = -(-params.num_tokens // self.page_size)
        tokens = 0
        if pages > 0 and not self.disable:
            tokens = self.shim.evict(pages) * self.page_size
            self.update_eviction_metrics(tokens, started)
        return EvictResult(num_tokens_evicted=tokens)

    def reset(self) -> None:
        """Give everything up, locked or not: SGLang has nothing running."""
        for handle in list(self._locked.values()):
            handle.locks = 0
            self._let_go(handle)
        self.shim.flush()

    def _totals(self) -> Totals:
        return self.shim.room.totals

    def evictable_size(self) -> int:
        """Tokens that nobody protects: in the tree, or given up and not taken."""
        return self._totals().evictable * self.page_size

    def protected_size(self) -> int:
        """Tokens in the tree that somebody protects, and those that movers may still write."""
        return (self._totals().protected + self.shim.outside_pages) * self.page_size

    def full_evictable_size(self) -> int:
        """The same as without sliding windows."""
        return self.evictable_size()

    def full_protected_size(self) -> int:
        """The same as without sliding windows."""
        return self.protected_size()

    def total_size(self) -> int:
        """Tokens in the tree."""
        return self.shim.tree.pages * self.page_size

    # What SGLang's schedulers read and call besides.

    @property
    def root_node(self) -> Handle:
        """The empty path. Its children are all paths that SGLang knows of, as one tree: the order
        by depth and weight walks it, and must not miss a waiting request."""
        if not self._grown:
            grow(self._root, list(self._live.values()), self.keys.page_key)
            self._grown = True
        return self._root

    def pretty_print(self) -> None:
        """SGLang prints its tree when it runs out of memory; ours says where the pages are."""
        rows = len(self._rows)
        logger.warning("treecored: %r, %r, %d rows", self.shim.room, self._totals(), rows)

    def check_hicache_events(self) -> None:
        """Nothing of SGLang's own host tier happens here."""

    def ready_to_load_host_cache(self) -> int:
        """No layer counter is to be waited for."""
        return -1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._rows)} rows, {self.shim.room!r}>"
