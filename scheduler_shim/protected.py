"""How many pages of a tree some paths have together: what a thin scheduler's leases protect.

Owns the paths, each as its packed pages, and the sum. A page has one place in a tree, so two paths
have in common what their page lists begin with; of all others the two neighbours in order have the
most in common with a path, so adding or removing one costs a look at those.
"""

from __future__ import annotations

from bisect import bisect_left

from directory.core.errors import InternalError


class ProtectedPaths:
    """Paths from the root on, the same one as often as it is added."""

    def __init__(self) -> None:
        self._paths: list[bytes] = []
        self.pages = 0
        """Pages that are in any of them."""

    def add(self, path: bytes) -> None:
        """Protect a path; nothing of an empty one."""
        if path:
            at = bisect_left(self._paths, path)
            self.pages += len(path) // 4 - self._shared(path, at)
            self._paths.insert(at, path)

    def remove(self, path: bytes) -> None:
        """Undo one `add`; raises `InternalError` where there was none."""
        if path:
            at = bisect_left(self._paths, path)
            if at == len(self._paths) or self._paths[at] != path:
                raise InternalError(f"a path of {len(path) // 4} pages was not protected")
            del self._paths[at]
            self.pages -= len(path) // 4 - self._shared(path, at)

    def clear(self) -> None:
        """Nothing is protected any more."""
        self._paths.clear()
        self.pages = 0

    def _shared(self, path: bytes, at: int) -> int:
        """Pages that a path has in common with others; `at`: its place among them."""
        beside = self._paths[max(at - 1, 0) : at + 1]
        return max((common_pages(path, other) for other in beside), default=0)

    def __repr__(self) -> str:
        return f"<ProtectedPaths {len(self._paths)} of {self.pages} pages>"


def common_pages(one: bytes, other: bytes) -> int:
    """Pages with which both packed lists begin."""
    low, high = 0, min(len(one), len(other)) // 4
    if one[: 4 * high] == other[: 4 * high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[: 4 * middle]):
            low = middle
        else:
            high = middle - 1
    return low
