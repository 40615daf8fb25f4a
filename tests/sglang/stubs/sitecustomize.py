"""Lets torchvision's wheel be imported beside a torch without CUDA. Read by Python at its start.

The wheel's own library is linked against CUDA and does not load, so that operators are missing
which its Python part names at import. They are declared first; nothing here uses them.
"""

import importlib.abc
import sys
import types
from collections.abc import Sequence


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Acts once, when torchvision is looked for, and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        # The declarations last as long as this object.
        self.library = torch.library.Library("torchvision", "FRAGMENT")
        _kept.append(self)
        for operator in ("nms", "qnms"):
            try:
                self.library.define(f"{operator}(Tensor a, Tensor b, float threshold) -> Tensor")
            except RuntimeError:
                pass  # this torchvision has brought it


_kept: list[_DeclareOperators] = []
sys.meta_path.insert(0, _DeclareOperators())
