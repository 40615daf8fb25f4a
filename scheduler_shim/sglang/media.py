"""Pictures and sounds in a prompt: which token ids stand for them, and what those should say.

Owns nothing. Up to 0.5.16 (the newest one read with it) SGLang writes 30 bits of an item's hash
into the prompt, one id for all of the item's tokens, so that two items in a billion are one to
whoever compares tokens. That may do within one engine; many engines and a host tier that outlives
them see far more items, and whoever wants such a pair finds one in minutes. So the ids are replaced
by the item's whole hash before they are packed. Newer versions (0.5.23) write 62-bit ids, which say
all that is known of an item: they are left alone. Nothing is ever matched that SGLang keeps apart.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

HASH_BITS: Final = 62
MARK: Final = 1 << HASH_BITS
"""No id of a vocabulary and no id of SGLang's for an item is as large."""

Items = dict[int, int]
"""Ids of SGLang's, and what is packed for each."""


def items_of(request: Any) -> Items | None:
    """The ids of a request that say too little of an item. None: two items share one, or nobody
    has hashed an item; the request's tokens do not say what it computes."""
    items = getattr(getattr(request, "multimodal_inputs", None), "mm_items", None) or ()
    found: Items = {}
    for item in items:
        if getattr(item, "pad_values", None) is not None:
            continue
        if item.pad_value is None or item.hash is None:
            return None
        whole = MARK | (int(item.hash) & (MARK - 1))
        if found.setdefault(int(item.pad_value), whole) != whole:
            return None
    return found


def spelled_out(tokens: array[int], items: Items) -> array[int]:
    """Tokens with the ids of items replaced."""
    return array("q", (items.get(token, token) for token in tokens)) if items else tokens
