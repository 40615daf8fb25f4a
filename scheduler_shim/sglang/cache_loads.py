"""What both dialects of the cache need for loads that land layer by layer.

Owns the way from a match to a load: what is offered beyond the pool, and what SGLang then asks for
by `init_load_back`. The loads themselves are layerwise.py's. Without them a match offers nothing,
and nothing of this does anything.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any, Protocol

import torch

from scheduler_shim.own_tree import Published
from scheduler_shim.request import Request
from scheduler_shim.sglang.cache import CacheShim, TreecoredCache
from scheduler_shim.sglang.handles import Handle
from scheduler_shim.sglang.keys import KeyMaker, Path
from scheduler_shim.sglang.layerwise import Layerwise
from scheduler_shim.sglang.names import PageNames

logger = logging.getLogger(__name__)


class LoadingShim(CacheShim, Protocol):
    """What the cache needs of the shim for loads."""

    loads: Layerwise


class LoadingCache(TreecoredCache):
    """The cache of both dialects, with loads."""

    def __init__(self, params: Any, shim: LoadingShim, names: PageNames, keys: KeyMaker) -> None:
        super().__init__(params, shim, names, keys)
        self.loads = shim.loads
        self.loads.publish = self.publish_loaded

    def match(self, radix_key: Any, req: Any) -> tuple[Handle, int]:
        """As `find`, and how many tokens beyond it can be loaded when SGLang admits the request."""
        if req is None or not self.loads.enabled or self.disable or not len(radix_key):
            return self.find(radix_key, req), 0
        path = self.keys.of_key(radix_key, req)
        handle = self.find_path(path, req)
        try:
            pages = self.loads.pages(req.rid, path.key, path.tokens, handle.found.pages)
        except Exception as error:  # SGLang must not die of it; the next tick deals with it
            logger.exception("treecored: an offer failed")
            self.loads.defect = error
            pages = 0
        return handle, pages * self.page_size

    def load_back(self, params: Any) -> bytes:
        """Have what a match has offered loaded behind the locked pages: all of it or nothing.

        Returns the packed names of the targets, which are the request's own from here on.
        """
        req, count = params.req, params.host_hit_length // self.page_size
        return self.loads.begin(req, req.last_node.found.pages, count)

    def _publish(
        self, request: Request, path: Path, row: torch.Tensor, *, keep: bool
    ) -> Published | None:
        """As everywhere; checking mode is told what came of it."""
        first = request.tree_pages
        published = super()._publish(request, path, row, keep=keep)
        if published is not None:
            page_key = self.keys.page_key(path.key)
            tokens = path.tokens[: published.accepted_pages * page_key]
            self.loads.checks.computed(path.key, tokens, first, published)
        return published

    @abstractmethod
    def publish_loaded(self, req: Any, pages: int) -> None:
        """The first pages of a running request's row have landed: put them into the tree."""

    def tokens_of(self, pages: int, tokens: Any) -> int:
        """So many tokens name so many pages: one more where keys are pairs of tokens."""
        return min(pages * self.page_size + bool(self.is_eagle), len(tokens))
