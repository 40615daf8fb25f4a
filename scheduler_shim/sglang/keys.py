"""Keys: from SGLang's requests and radix keys to namespaces and packed tokens.

Owns the taking apart of what SGLang has glued together, and what each request's tokens looked like
when they were packed, so that a prompt is packed once. It must never let two prompts share that
SGLang keeps apart, and never share what only looks alike: a salt that is absent is not an empty
one, and an adapter is not a piece of somebody's extra key.

How SGLang glues (0.5.13 to 0.5.23): `extra_key = (extra_key or "") + lora_id`, then, with elastic
expert parallelism, `+ "|elastic_ep_size=N"`. From 0.5.18 on `cache_salt` is a field of its own;
before, the HTTP server glues it in front of `extra_key`, and nobody can tell them apart any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from directory.core import limits
from directory.core.errors import TreecoredError
from directory.core.namespace import Adapter, NamespaceKey
from scheduler_shim.sglang.media import Items, items_of, spelled_out

ELASTIC: Final = "|elastic_ep_size="
FEW_TOKENS: Final = 64
"""So many are packed without numpy: what a decoding request has added."""
GLUED_MAX: Final = 4_096
"""So many glued keys are remembered; beyond it the memory starts over."""


class Path(NamedTuple):
    """A namespace and packed units (tokens, or pairs of them) within it."""

    key: NamespaceKey
    tokens: bytes


class PackedRequest:
    """What a request's tokens are, packed. Lives on the request, so it goes when that goes.

    `origin`, `outputs`: the request's own arrays. Outputs are only ever appended to; whatever else
    happens to the tokens comes as another array (SGLang relies on the same). `count`: how many
    tokens are packed; `packed` stays empty where they do not say what is computed. `items`: ids
    that were replaced before they were packed. `path`, `path_count`: the last prefix that was asked
    for, so that whoever asks again gets the same object.
    """

    __slots__ = ("count", "items", "key", "origin", "outputs", "packed", "path", "path_count")

    def __init__(
        self, request: Any, key: NamespaceKey, packed: bytes, count: int, items: Items
    ) -> None:
        self.origin: array[int] = request.origin_input_ids
        self.outputs: array[int] = request.output_ids
        self.key = key
        self.packed = packed
        self.count = count
        self.items = items
        self.path: Path | None = None
        self.path_count = 0


class KeyMaker:
    """Makes the paths of one cache. `epoch`: the weights' number as it is now.

    `adapter_version`: what tells the weights of two adapters of one id apart.
    """

    ATTRIBUTE: Final = "_treecored_packed"

    def __init__(
        self,
        page_size: int,
        *,
        bigram: bool,
        epoch: Callable[[], int],
        adapter_version: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.page_size = page_size
        self._bigram = bigram
        self._epoch = epoch
        self._adapter_version = adapter_version
        self._keys: dict[tuple[object, ...], NamespaceKey] = {}
        self._adapters: dict[tuple[str | None, str | None], str | None] = {}

    def page_key(self, key: NamespaceKey) -> int:
        """Bytes of packed units a page."""
        return self.page_size * key.unit_bytes

    def of_request(self, request: Any) -> Path:
        """All tokens that a request has so far: prompt and output. Whole units, no whole pages."""
        count = len(request.origin_input_ids) + len(request.output_ids)
        packed = self._packed(request, None, count)
        return Path(packed.key, packed.packed[: self._bytes(count, packed.key)])

    def of_prefix(self, request: Any, tokens: array[int], count: int) -> Path:
        """Whole pages of the first `count` tokens of a request; `tokens`: where they stand."""
        packed = self._packed(request, tokens, count)
        if packed.path is None or packed.path_count != count:
            tokens_packed = self._whole_pages(packed.packed, count, packed.key)
            packed.path, packed.path_count = Path(packed.key, tokens_packed), count
        return packed.path

    def of_key(self, radix_key: Any, request: Any = None) -> Path:
        """Whole pages of a radix key of SGLang's, as far as its limit.

        Without a request it is not known whether the key names an adapter: what was seen under the
        same glued key decides, and where that was two things, the path is empty.
        """
        tokens = radix_key.token_ids
        count = len(tokens)
        limit = getattr(radix_key, "limit", None)
        if limit is not None and limit < count:
            count = limit
        if request is not None:
            return self.of_prefix(request, tokens, count)
        salt, extra = getattr(radix_key, "cache_salt", None), radix_key.extra_key
        adapter = self._adapters.get((salt, extra), "")
        if adapter is None:
            return Path(NamespaceKey(), b"")
        packed = pack(tokens, 0, count, bigram=self._bigram, wide=False)
        key = self._key(salt, extra, adapter or None, wide=packed is None)
        if packed is None:
            packed = pack(tokens, 0, count, bigram=self._bigram, wide=True) or b""
        return Path(key, self._whole_pages(packed, count, key))

    # Private.

    def _packed(self, request: Any, tokens: array[int] | None, count: int) -> PackedRequest:
        """The request's packed tokens, at least the first `count` of them.

        What is kept with a request is packed from its own arrays alone. Tokens that are given are
        compared with these when it is packed, and by their ends from then on; other ones are
        packed for this once.
        """
        known: PackedRequest | None = getattr(request, self.ATTRIBUTE, None)
        origin, outputs = request.origin_input_ids, request.output_ids
        parts = (getattr(request, "cache_salt", None), request.extra_key)
        adapter = getattr(request, "lora_id", None)
        if (
            known is not None
            and known.origin is origin
            and known.outputs is outputs
            and known.key is self._key(*parts, adapter, wide=known.key.wide)
        ):
            if count > known.count:
                self._extend(known, count)
            if tokens is None or _agree(known, tokens, count, self._bigram):
                return known
        own = origin + outputs if outputs else origin
        self._learn(parts, adapter or "")
        if tokens is not None and not _same(request, tokens, own, count):
            return self._pack_all(request, parts, adapter, tokens[:count])
        known = self._pack_all(request, parts, adapter, own)
        setattr(request, self.ATTRIBUTE, known)
        return known

    def _pack_all(
        self,
        request: Any,
        parts: tuple[str | None, str | None],
        adapter: str | None,
        tokens: array[int],
    ) -> PackedRequest:
        items = items_of(request)
        tokens = spelled_out(tokens, items or {})
        packed = pack(tokens, 0, len(tokens), bigram=self._bigram, wide=False)
        key = self._key(*parts, adapter, wide=packed is None)
        if packed is None:
            packed = pack(tokens, 0, len(tokens), bigram=self._bigram, wide=True) or b""
        if not _fits(key) or not _is_text(request) or items is None:
            packed = b""
        return PackedRequest(request, key, packed, len(tokens), items or {})

    def _extend(self, known: PackedRequest, count: int) -> None:
        """Pack the outputs that have come since. An id that does not fit any more ends what can be
        stored: the pages before it are in a namespace that has no place for it."""
        first = max(known.count - self._bigram, 0)
        begun = len(known.origin)
        source = known.outputs if first >= begun else known.origin + known.outputs
        skipped = begun if first >= begun else 0
        end = min(count - skipped, len(source))
        more = pack(source, first - skipped, end, bigram=self._bigram, wide=known.key.wide)
        if more is not None and known.packed:
            known.packed += more
            known.path = None
            known.count = end + skipped

    def _key(
        self, salt: str | None, extra: str | None, adapter: str | None, *, wide: bool
    ) -> NamespaceKey:
        epoch = self._epoch()
        parts = (epoch, salt, extra, adapter, wide)
        key = self._keys.get(parts)
        if key is None:
            if len(self._keys) >= GLUED_MAX:
                self._keys.clear()
                self._adapters.clear()
            key = NamespaceKey(
                epoch,
                salt,
                extra if adapter is None else unglue(extra, adapter),
                None if adapter is None else Adapter(adapter, self._adapter_version(adapter)),
                self._bigram,
                wide,
            )
            self._keys[parts] = key
        return key

    def _learn(self, glued: tuple[str | None, str | None], adapter: str) -> None:
        """A request has said whether its glued key names an adapter."""
        if self._adapters.setdefault(glued, adapter) != adapter:
            self._adapters[glued] = None

    def _bytes(self, count: int, key: NamespaceKey) -> int:
        """Bytes of the units of so many tokens."""
        return max(count - self._bigram, 0) * key.unit_bytes

    def _whole_pages(self, packed: bytes, count: int, key: NamespaceKey) -> bytes:
        """The whole pages of the first `count` tokens; no more of them than a message carries."""
        pages = max(min(count - self._bigram, len(packed) // key.unit_bytes), 0) // self.page_size
        return packed[: min(pages, limits.PROMPT_PAGES_MAX) * self.page_key(key)]

    def __repr__(self) -> str:
        return f"<KeyMaker {len(self._keys)} namespaces, bigram={self._bigram}>"


def unglue(glued: str | None, adapter: str) -> str | None:
    """The extra key as it was before SGLang glued an adapter's id to it; absent if it was empty.

    Where the id is not at the place where SGLang puts it, the glued key stays as it is: that keeps
    apart what is apart.
    """
    head, mark, size = (glued or "").rpartition(ELASTIC)
    if not mark:
        head, size = size, ""
    if head.endswith(adapter):
        head = head[: len(head) - len(adapter)]
    return head + mark + size or None


def pack(tokens: array[int], first: int, count: int, *, bigram: bool, wide: bool) -> bytes | None:
    """Pack tokens [first, count) as 32-bit units (64 with `wide`); None where one does not fit.

    With `bigram` a unit is a pair of neighbours, one fewer than there are tokens.
    """
    number = count - first
    if number - bigram < 1:
        return b""
    if number <= FEW_TOKENS and not bigram and not wide:
        try:
            return array("I", tokens[first:count]).tobytes()
        except OverflowError:
            return None
    if tokens.typecode != "q":
        tokens = array("q", tokens)
    source = np.frombuffer(tokens, dtype=np.int64, count=number, offset=8 * first)
    # An id below zero is a very large one without its sign.
    if not wide and int(source.view(np.uint64).max()) >> 32:
        return None
    if bigram:
        source = np.stack((source[:-1], source[1:]), axis=1)
    packed: bytes = (source if wide else source.astype(np.uint32)).tobytes()
    return packed


def _fits(key: NamespaceKey) -> bool:
    """Whether the key can travel; a prompt under one that cannot is served without the cache."""
    try:
        key.check()
    except TreecoredError:
        return False
    return True


def _is_text(request: Any) -> bool:
    """Whether the tokens alone say what is computed: not where vectors stand in for some."""
    vectors = ("positional_embed_overrides", "input_embeds")
    return all(getattr(request, name, None) is None for name in vectors)


def _same(request: Any, tokens: array[int], own: array[int], count: int) -> bool:
    """Whether the first `count` tokens are a request's own. Its fill ids are, as SGLang keeps
    them, so that a prompt is not compared in full before it is packed."""
    if count > len(own):
        return False
    fill_ids: object = getattr(request, "full_untruncated_fill_ids", None)
    if count and tokens is fill_ids:
        return tokens[0] == own[0] and tokens[count - 1] == own[count - 1]
    return tokens[:count] == own[:count]


def _agree(known: PackedRequest, tokens: array[int], count: int, bigram: bool) -> bool:
    """Whether the first `count` tokens are those that were packed, by the looks of both ends."""
    last = min(count, known.count) - 1
    if last < bigram or not known.packed:
        return True
    unit = known.key.unit_bytes
    size = unit // 2 if bigram else unit
    at = unit * (last - bigram) + (size if bigram else 0)
    head, tail = tokens[0], tokens[last]
    if known.items:
        head, tail = known.items.get(head, head), known.items.get(tail, tail)
    packed, mask = known.packed, (1 << 8 * size) - 1
    return (
        int.from_bytes(packed[:size], "little") == head & mask
        and int.from_bytes(packed[at : at + size], "little") == tail & mask
    )
