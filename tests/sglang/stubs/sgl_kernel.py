"""Stand-in for sgl_kernel, whose wheel is for CUDA only. Every name imports, calling one raises."""

import sys

from absent import Name, Package

__version__ = "99.0.0"


def _resolve(full: str) -> object:
    return Name(full, _resolve)


Package(__name__, _resolve).install(sys.modules[__name__])
