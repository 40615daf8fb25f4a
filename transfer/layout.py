"""Pool layouts: where the bytes of a page lie in a pool, and what a host page looks like.

Owns the arithmetic from page number to byte ranges, its validation, and the digest of what two
pools must share before pages may be copied between them. Pure: it never opens memory, and it
never repairs a layout that it cannot address exactly (the client is told shape and strides).

A pool is a set of physical allocations. A *buffer* is one layer's part of one role in one of
them; its *chunk* of page p is `[offset + p * page_stride, ... + chunk_bytes)`. A host page is the
chunks of all buffers in order, back to back (page-first).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from directory.core.errors import LayoutError
from directory.core.limits import (
    BUFFERS_PER_POOL_MAX,
    PAGE_SIZE_MAX,
    POOL_PAGES_MAX,
)

Role = Literal["k", "v", "kv", "index"]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]

FORM_CHARS_MAX = 128


class BufferLayout(msgspec.Struct, frozen=True, array_like=True):
    """One buffer: chunk of page p = allocation's base + offset + p * page_stride.

    Offsets, strides and sizes are bytes. `form` says how the elements lie inside a chunk (for
    example "token64 head8 dim128 x2"): equal sizes with unequal forms are not the same bytes.
    """

    role: Role
    layer: Natural
    allocation: Natural
    offset: Natural
    page_stride: Positive
    chunk_bytes: Positive
    form: Annotated[str, msgspec.Meta(max_length=FORM_CHARS_MAX)] = ""

    def end(self, page_count: int) -> int:
        """First byte of the allocation behind the last chunk."""
        return self.offset + (page_count - 1) * self.page_stride + self.chunk_bytes


class PoolLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All buffers of a pool, in host page order. `page_size` is in tokens.

    `dict`: what every copy asks for is worked out once; it is no part of the layout.
    """

    page_size: Positive
    page_count: Positive
    buffers: Annotated[tuple[BufferLayout, ...], msgspec.Meta(max_length=BUFFERS_PER_POOL_MAX)]
    allocation_bytes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=BUFFERS_PER_POOL_MAX)]

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one host page."""
        return sum(buffer.chunk_bytes for buffer in self.buffers)

    def layers(self) -> list[int]:
        """Numbers of the layers, ascending; the n-th one lands n-th."""
        return sorted({buffer.layer for buffer in self.buffers})

    def page_form(self) -> tuple[tuple[str, int, int, str], ...]:
        """(role, layer, chunk bytes, form) of each buffer: what a host page is made of."""
        return tuple((b.role, b.layer, b.chunk_bytes, b.form) for b in self.buffers)

    def canonical(self) -> str:
        """A text that is equal exactly when two pools may read one another's pages.

        Page size and page form are in it. Page count, strides, offsets and the division into
        allocations are not: they say where pages lie, not what is in them.
        """
        return msgspec.json.encode((self.page_size, self.page_form())).decode()

    def check(self) -> None:
        """Raise `LayoutError` unless every chunk lies in its allocation and none overlap."""
        self._check_counts()
        clusters: dict[int, list[BufferLayout]] = {}
        for number, buffer in enumerate(self.buffers):
            self._check_buffer(number, buffer)
            clusters.setdefault(buffer.allocation, []).append(buffer)
        for allocation, buffers in clusters.items():
            _check_overlap(allocation, buffers, self.page_count)

    def _check_counts(self) -> None:
        if not 1 <= self.page_size <= PAGE_SIZE_MAX:
            raise LayoutError(f"page size {self.page_size} is not in 1..{PAGE_SIZE_MAX} tokens")
        if not 1 <= self.page_count <= POOL_PAGES_MAX:
            raise LayoutError(f"page count {self.page_count} is not in 1..{POOL_PAGES_MAX}")
        if not 1 <= len(self.buffers) <= BUFFERS_PER_POOL_MAX:
            raise LayoutError(
                f"a pool has 1..{BUFFERS_PER_POOL_MAX} buffers, not {len(self.buffers)}"
            )
        for number, nbytes in enumerate(self.allocation_bytes):
            if nbytes <= 0:
                raise LayoutError(f"allocation {number} has {nbytes} bytes; give its real size")

    def _check_buffer(self, number: int, buffer: BufferLayout) -> None:
        name = f"buffer {number} ({buffer.role}, layer {buffer.layer})"
        if not 0 <= buffer.allocation < len(self.allocation_bytes):
            raise LayoutError(
                f"{name}: allocation {buffer.allocation} is not one of the "
                f"{len(self.allocation_bytes)} listed"
            )
        if buffer.chunk_bytes <= 0 or buffer.offset < 0:
            raise LayoutError(
                f"{name}: offset {buffer.offset} and chunk of {buffer.chunk_bytes} bytes; "
                "the offset must not be negative and the chunk must not be empty"
            )
        if buffer.page_stride < buffer.chunk_bytes:
            raise LayoutError(
                f"{name}: pages overlap: stride {buffer.page_stride} is less than the chunk of "
                f"{buffer.chunk_bytes} bytes; export the buffer with dense pages"
            )
        available = self.allocation_bytes[buffer.allocation]
        if buffer.end(self.page_count) > available:
            raise LayoutError(
                f"{name}: page {self.page_count - 1} ends at byte {buffer.end(self.page_count)}, "
                f"but allocation {buffer.allocation} has {available}; check offset, stride and "
                "page count"
            )


def mha_layer_first(
    *,
    layers: int,
    page_size: int,
    page_count: int,
    heads: int,
    head_dim: int,
    itemsize: int,
    separate: bool = True,
) -> PoolLayout:
    """One K and one V buffer a layer, each `(page_count * page_size, heads, head_dim)`.

    `separate`: every buffer is an allocation of its own (SGLang's pools); otherwise all buffers
    lie one behind the other in one allocation. Buffers are ordered k0 v0 k1 v1 ..., so that the
    leading part of a host page is all that layer 0 needs.
    """
    chunk = page_size * heads * head_dim * itemsize
    form = _form((("token", page_size), ("head", heads), ("dim", head_dim)), itemsize)
    roles: tuple[Role, Role] = ("k", "v")
    specs = [(role, layer, chunk, form) for layer in range(layers) for role in roles]
    return _layer_first(specs, page_size, page_count, separate)


def mla(
    *,
    layers: int,
    page_size: int,
    page_count: int,
    latent_dim: int,
    itemsize: int,
    index_bytes_per_token: int = 0,
    separate: bool = True,
) -> PoolLayout:
    """One latent buffer a layer, and one index buffer a layer where the model has an indexer."""
    form = _form((("token", page_size), ("latent", latent_dim)), itemsize)
    specs: list[tuple[Role, int, int, str]] = []
    for layer in range(layers):
        specs.append(("kv", layer, page_size * latent_dim * itemsize, form))
        if index_bytes_per_token:
            index_form = _form((("token", page_size), ("byte", index_bytes_per_token)), 1)
            specs.append(("index", layer, page_size * index_bytes_per_token, index_form))
    return _layer_first(specs, page_size, page_count, separate)


def page_first(
    *, layers: int, page_size: int, page_count: int, heads: int, head_dim: int, itemsize: int
) -> PoolLayout:
    """One allocation `(page_count, layers, 2, page_size, heads, head_dim)`.

    Its page form is that of `mha_layer_first`, so the two may exchange pages.
    """
    chunk = page_size * heads * head_dim * itemsize
    form = _form((("token", page_size), ("head", heads), ("dim", head_dim)), itemsize)
    stride = chunk * 2 * layers
    roles: tuple[Role, Role] = ("k", "v")
    order = [(role, layer) for layer in range(layers) for role in roles]
    buffers = tuple(
        BufferLayout(role, layer, 0, number * chunk, stride, chunk, form)
        for number, (role, layer) in enumerate(order)
    )
    return PoolLayout(page_size, page_count, buffers, (stride * page_count,))


def buffer_from_tensor(
    *,
    role: Role,
    layer: int,
    allocation: int,
    offset: int,
    page_size: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    axes: Sequence[str],
) -> BufferLayout:
    """Describe a tensor as a buffer, or raise `LayoutError` with its shape and strides.

    `strides` are in elements, `offset` (of the first element, in its allocation) and `itemsize`
    in bytes. `axes` names each axis; exactly one is "slot" (a token position) or "page". Any
    order of the others is exact as long as a page is dense in memory: the order becomes part of
    the form. A page that is not dense is refused, because only a hidden copy could move it.
    """
    what = f"tensor of shape {tuple(shape)}, strides {tuple(strides)}, axes {tuple(axes)}"
    if not len(shape) == len(strides) == len(axes) or len(set(axes)) != len(axes):
        raise LayoutError(f"{what}: give one stride and one distinct name for each axis")
    if itemsize <= 0 or page_size <= 0 or any(extent <= 0 for extent in shape):
        raise LayoutError(f"{what}: sizes must be positive (item size {itemsize})")
    paging = [axis for axis, name in enumerate(axes) if name in ("slot", "page")]
    if len(paging) != 1:
        raise LayoutError(f'{what}: exactly one axis must be named "slot" or "page"')
    paged = paging[0]
    rows = page_size if axes[paged] == "slot" else 1
    # An axis of extent 1 has no say in where bytes lie, whatever its stride.
    inner = sorted(
        (a for a in range(len(shape)) if a != paged and shape[a] > 1), key=lambda a: -strides[a]
    )
    expected = 1
    for axis in reversed(inner):
        if strides[axis] != expected:
            raise LayoutError(
                f"{what}: axis {axes[axis]!r} has stride {strides[axis]} where a dense page has "
                f"{expected}; export the pool contiguous or permuted, never sliced or expanded"
            )
        expected *= shape[axis]
    if rows > 1 and strides[paged] != expected:
        raise LayoutError(
            f"{what}: slots lie {strides[paged]} elements apart but hold {expected}; "
            "a page of several slots must be dense"
        )
    if shape[paged] % rows:
        raise LayoutError(f"{what}: {shape[paged]} slots are not whole pages of {page_size}")
    if shape[paged] > rows and strides[paged] < expected:
        raise LayoutError(f"{what}: pages overlap; export the tensor itself, not a view of it")
    named = [("token", rows)] if rows > 1 else []
    named += [(axes[axis], shape[axis]) for axis in inner]
    chunk = rows * expected * itemsize
    # One page alone may have any stride; the arithmetic wants one that is at least the chunk.
    stride = max(rows * strides[paged] * itemsize, chunk)
    return BufferLayout(role, layer, allocation, offset, stride, chunk, _form(named, itemsize))


def _layer_first(
    specs: Sequence[tuple[Role, int, int, str]], page_size: int, page_count: int, separate: bool
) -> PoolLayout:
    buffers = []
    sizes = []
    offset = 0
    for number, (role, layer, chunk, form) in enumerate(specs):
        place = (number, 0) if separate else (0, offset)
        buffers.append(BufferLayout(role, layer, *place, chunk, chunk, form))
        sizes.append(chunk * page_count)
        offset += chunk * page_count
    allocations = tuple(sizes) if separate else (offset,)
    return PoolLayout(page_size, page_count, tuple(buffers), allocations)


def _form(axes: Sequence[tuple[str, int]], itemsize: int) -> str:
    words = [f"{name}{extent}" for name, extent in axes if extent > 1]
    return " ".join([*words, f"x{itemsize}"])


def _check_overlap(allocation: int, buffers: list[BufferLayout], page_count: int) -> None:
    """Refuse chunks of different buffers that share bytes of one allocation.

    Buffers whose spans are apart cannot overlap. Where spans do meet, the buffers must interleave
    at one stride, and then each chunk needs its own part of that stride.
    """
    buffers = sorted(buffers, key=lambda b: b.offset)
    cluster = buffers[:1]
    end = buffers[0].end(page_count)
    for buffer in buffers[1:]:
        if buffer.offset >= end:
            _check_cluster(allocation, cluster)
            cluster = []
        cluster.append(buffer)
        end = max(end, buffer.end(page_count))
    _check_cluster(allocation, cluster)


def _check_cluster(allocation: int, cluster: list[BufferLayout]) -> None:
    if len(cluster) == 1:
        return
    stride = cluster[0].page_stride
    if any(buffer.page_stride != stride for buffer in cluster):
        raise LayoutError(
            f"allocation {allocation}: buffers of different page strides lie between one another; "
            "give each its own range"
        )
    parts = sorted((b.offset % stride, b.chunk_bytes, b.role, b.layer) for b in cluster)
    for (start, nbytes, role, layer), following in zip(
        parts, [*parts[1:], (parts[0][0] + stride, 0, parts[0][2], parts[0][3])], strict=True
    ):
        if start + nbytes > following[0]:
            raise LayoutError(
                f"allocation {allocation}: chunks of buffer ({role}, layer {layer}) overlap those "
                f"of ({following[2]}, layer {following[3]}); check their offsets"
            )
