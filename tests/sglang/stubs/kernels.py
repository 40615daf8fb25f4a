"""The triton kernels that SGLang launches on a CPU, in plain Python.

SGLang 0.5.16 allocates pages with two kernels on every device (later versions have a path without
them). Everything else that is launched here is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def alloc_extend_kernel(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _upper: int,
    page_size: int,
) -> None:
    """Slots for the tokens [prefix, seq) of each request: first the rest of its last page.

    The caller looks only afterwards whether there were enough free pages, so too few are no error.
    """
    pages = iter(free_pages.tolist())
    slots: list[int] = []
    for prefix, length, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        here = last
        for position in range(prefix, length):
            here = here + 1 if position % page_size else next(pages, 0) * page_size
            slots.append(here)
    out.copy_(torch.tensor(slots, dtype=out.dtype))


def alloc_decode_kernel(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _upper: int,
    page_size: int,
) -> None:
    """One slot a request, for its token number seq - 1."""
    pages = iter(free_pages.tolist())
    slots = [
        last + 1 if (length - 1) % page_size else next(pages, 0) * page_size
        for length, last in zip(seq_lens.tolist(), last_loc.tolist(), strict=True)
    ]
    out.copy_(torch.tensor(slots, dtype=out.dtype))


_KERNELS: Mapping[str, Callable[..., None]] = {
    kernel.__name__: kernel for kernel in (alloc_extend_kernel, alloc_decode_kernel)
}


def launch(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the kernel of that name. Raises NotImplementedError where there is none."""
    kernel = _KERNELS.get(name)
    if kernel is None:
        raise NotImplementedError(f"the triton kernel {name} has no counterpart on a CPU")
    kernel(*args, **kwargs)
