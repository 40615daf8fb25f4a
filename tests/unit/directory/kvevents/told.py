"""Records for the unit tests, written by hand."""

from array import array

from directory.core.ids import HOST, Place
from directory.kvevents.hashing import chain, published, seed
from directory.kvevents.records import Begin, Changed, Opened, SpaceNamed, Whole

PAGE = 2
A, B = 1, 2
START = (Begin(), Opened(A, "a", 1, PAGE), Opened(B, "b", 1, PAGE), Whole())
__all__ = ["A", "B", "HOST", "PAGE", "START", "changed", "hashes", "packed", "space"]


def packed(tokens: range) -> bytes:
    """Tokens as the tree has them."""
    return array("I", tokens).tobytes()


def hashes(tokens: range, cache_salt: str | None = None) -> list[int]:
    """Hashes of a prompt's pages."""
    return [published(d) for d in chain(seed(cache_salt), packed(tokens), 4 * PAGE)]


def space(number: int = 1, family: int = 1, cache_salt: str | None = None) -> SpaceNamed:
    """A namespace."""
    return SpaceNamed(number, family, PAGE, 4, False, cache_salt, None)


def changed(
    tokens: range,
    place: Place,
    *,
    here: bool = True,
    node: int = 1,
    base: int = 0,
    space: int = 1,
    above: tuple[tuple[int, bytes], ...] = (),
) -> Changed:
    """A node came or went; `tokens`: of its edge."""
    return Changed(space, place, here, node, base, above, packed(tokens))
