"""Names of packages that are not installed: all of them import, none of them does anything.

Owns the import machinery behind the stand-ins for packages that only work with a GPU. What a name
turns into depends on how SGLang and torch use such names at import: classes for `isinstance` and
`except`, everything else an object that decorates, subscripts and is called at import. Whatever
is reached when a request runs must raise: a stand-in must never compute something wrong.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class NotHere(Exception):
    """Stands for every class of an absent package."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(type(self).__name__)


class Name:
    """A function, decorator, constant or submodule of an absent package."""

    def __init__(self, full: str, resolve: "Resolve") -> None:
        self._full = full
        self._resolve = resolve
        self.__name__ = full.rsplit(".", 1)[-1]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._resolve(f"{self._full}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._full} is a stand-in and cannot be called")

    def __repr__(self) -> str:
        return f"<stand-in {self._full}>"


Resolve = Callable[[str], object]


class Package(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below a package and answers every attribute by `resolve(full name)`."""

    def __init__(self, package: str, resolve: Resolve) -> None:
        self.package = package
        self.resolve = resolve

    def install(self, module: types.ModuleType) -> None:
        """Make the module that calls this the package; its own names stay as they are."""
        module.__path__ = []
        module.__getattr__ = self._attributes(module.__name__)  # type: ignore[method-assign]
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Every name below the package is a package."""
        if name.startswith(self.package + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the new module its attributes."""
        module.__getattr__ = self._attributes(module.__name__)  # type: ignore[method-assign]

    def _attributes(self, module: str) -> Callable[[str], Any]:
        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return self.resolve(f"{module}.{name}")

        return attribute
