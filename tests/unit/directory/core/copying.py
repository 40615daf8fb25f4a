"""What a mover does with the bytes of a copy, in a world where a page holds the path it is for."""

from __future__ import annotations

from directory.core.actions import SubmitCopy
from directory.core.ids import HOST, Place
from directory.core.namespace import NamespaceKey
from directory.core.tokens import unpack_pages

Content = tuple[NamespaceKey, bytes]
"""What a page holds: the tokens from the root up to and including it, in their namespace."""

Memory = dict[Place, dict[int, Content]]


def move(copy: SubmitCopy, memory: Memory, *, copied: bool) -> None:
    """Write what is in the source pages now; `copied` False: the targets hold nothing usable."""
    # A host slot of a group holds one page a rank.
    shard = copy.shard_offset << 32
    for part in copy.parts:
        target = memory.get(part.target)
        if target is None:
            continue
        sources = [page + shard * (part.source == HOST) for page in unpack_pages(part.source_pages)]
        targets = [page + shard * (part.target == HOST) for page in unpack_pages(part.target_pages)]
        for source_page, target_page in zip(sources, targets, strict=True):
            target.pop(target_page, None)
            if copied:
                target[target_page] = memory[part.source][source_page]
