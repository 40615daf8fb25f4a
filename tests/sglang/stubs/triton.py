"""Stand-in for triton (900 MB installed, and without a GPU it runs nothing).

Kernels are defined but cannot be launched, except for the few that SGLang launches on a CPU too:
those are in `kernels`. The host-side helpers that callers use on plain numbers are real.
"""

import sys

import kernels
from absent import Name, NotHere, Package

__version__ = "3.8.0"


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


class Kernel:
    """What a decorated function turns into: `kernel[grid](arguments)` launches it."""

    def __init__(self, fn: object) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")

    def __getitem__(self, grid: object) -> "Kernel":
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        return kernels.launch(self.__name__, args, kwargs)


class _Decorating(Name):
    """A name that is called at import: as a decorator, to make one, or for a value."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and (callable(args[0]) or isinstance(args[0], Kernel)):
            return args[0] if isinstance(args[0], Kernel) else Kernel(args[0])
        return _Decorating(f"{self._full}()", _resolve)

    def __getitem__(self, key: object) -> "_Decorating":
        return self

    def __or__(self, other: object) -> "_Decorating":
        return self

    __ror__ = __or__


def _resolve(full: str) -> object:
    name = full.rsplit(".", 1)[-1]
    if full == "triton.runtime.driver.active":
        raise RuntimeError("0 active drivers ([]). There should only be one.")
    if name[0].isupper() or name == "dtype":
        return type(name, (NotHere,), {})
    return _Decorating(full, _resolve)


Package(__name__, _resolve).install(sys.modules[__name__])
