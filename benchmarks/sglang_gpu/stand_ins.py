"""Becomes the site's `sitecustomize`: stand-ins for packages that SGLang only imports.

Any name of such a package can be imported, subclassed and called, and does nothing. What is really
used is in the site, or the run fails.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = frozenset(
    {
        "flashinfer", "xgrammar", "modelscope", "mistral_common", "datasets", "helion",
        "py_spy", "quack", "tilelang", "pycountry", "zstandard", "tml_renderers",
        "sgl_kernel",  # its modules for other models are not packed
    }
)  # fmt: skip


class _Anything:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Any:
        return _Anything()

    def __or__(self, other: Any) -> Any:
        return _Anything()

    __ror__ = __or__


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: Any = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(_Finder())
