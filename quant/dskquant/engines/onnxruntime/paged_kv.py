"""Moves the cached tokens of one sequence between paged KV tensors of OpenVINO and slots, one vectorised pass a tensor.

A page tensor of a layer is [blocks, kv_heads, ...] and holds `block_size` tokens a block, as floats or as uint8 codes c
with float32 scale s and zero-point z: value = (c - z) * s. Seen in caches of the CPU plugin (executor_pa.cpp, 2026.4),
every (block, head) of 8-bit pages is one of
    by token    [block_size, 8 + head_dim]: each row begins with its s and z, then its codes
    by channel  [8 + block_size, head_dim]: the bytes of s [head_dim] and z [head_dim], then the rows of codes
and range / 255 is the scale. Keys are quantized by channel and values by token. Both engines keep keys rotated alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dskquant.engines.protocol import Int32

Pages = NDArray[Any]  # floats or uint8
KVTensor = NDArray[np.float32]
Float32 = NDArray[np.float32]

HEADER_BYTES = 8
"""Scale and zero-point, float32 each."""

LARGEST_CODE = np.float32(255)
SMALLEST_RANGE = np.float32(1e-6)
"""Of values that are all alike: a scale must not be 0."""


def read_pages(pages: Pages, blocks: Int32, length: int, slot: KVTensor) -> None:
    """Copies `length` tokens from `blocks` of a page tensor into `slot` [kv_heads, capacity, head_dim]."""
    for span in _spans(pages, blocks, length, slot):
        found = pages[span.blocks]
        if pages.dtype != np.uint8:
            span.tokens[...] = found[:, :, : span.length].swapaxes(0, 1)
            continue
        codes, scales, zero_points = _parts(found, span)
        tokens = span.tokens
        tokens[...] = codes.swapaxes(0, 1)  # a plain cast: arithmetic of mixed types is several times slower
        tokens -= zero_points.swapaxes(0, 1)
        tokens *= scales.swapaxes(0, 1)


def write_pages(slot: KVTensor, length: int, pages: Pages, blocks: Int32) -> None:
    """Copies the first `length` tokens of `slot` [kv_heads, capacity, head_dim] into `blocks` of a page tensor."""
    for span in _spans(pages, blocks, length, slot):
        tokens = span.tokens.swapaxes(0, 1)
        if pages.dtype != np.uint8:
            pages[span.blocks, :, : span.length] = tokens
            continue
        filled = np.zeros((len(span.blocks), *pages.shape[1:]), np.uint8)
        codes, scales, zero_points = _parts(filled, span)
        axis = -1 if scales.shape[-1] == 1 else -2
        low = tokens.min(axis=axis, keepdims=True)
        scales[...] = np.maximum(tokens.max(axis=axis, keepdims=True) - low, SMALLEST_RANGE) / LARGEST_CODE
        zero_points[...] = -low / scales
        above = tokens - low
        above *= np.float32(1) / scales
        above += np.float32(0.5)  # the cast to codes rounds down
        codes[...] = above
        pages[span.blocks] = filled


class _Span(NamedTuple):
    """Blocks that are filled alike, and their tokens in the slot: [kv_heads, blocks, length, head_dim]."""

    blocks: Int32
    length: int  # tokens in each of the blocks
    tokens: KVTensor


def _spans(pages: Pages, blocks: Int32, length: int, slot: KVTensor) -> Iterator[_Span]:
    """The full blocks, and the one that is not."""
    heads, _, width = slot.shape
    size = _block_size(pages, width)
    full, rest = divmod(length, size)
    if full:
        yield _Span(blocks[:full], size, slot[:, : full * size].reshape(heads, full, size, width))
    if rest:
        yield _Span(blocks[full : full + 1], rest, slot[:, None, full * size : length])


def _block_size(pages: Pages, head_dim: int) -> int:
    by_channel = pages.dtype == np.uint8 and pages.shape[3] == head_dim
    return int(pages.shape[2]) - (HEADER_BYTES if by_channel else 0)


def _parts(pages: Pages, span: _Span) -> tuple[Pages, Float32, Float32]:
    """Views of what 8-bit pages [n, kv_heads, ...] hold for the tokens of `span`.

    Codes [n, kv_heads, length, head_dim]; scales and zero-points [n, kv_heads, length, 1] by token and
    [n, kv_heads, 1, head_dim] by channel.
    """
    head_dim, length = span.tokens.shape[-1], span.length
    if pages.shape[3] != head_dim:
        header = pages[:, :, :length, :HEADER_BYTES].view(np.float32)
        return pages[:, :, :length, HEADER_BYTES:], header[..., :1], header[..., 1:]
    count, heads = pages.shape[:2]
    flat = pages.reshape(count, heads, -1)[..., : HEADER_BYTES * head_dim]
    header = flat.view(np.float32).reshape(count, heads, 2, 1, head_dim)
    return pages[:, :, HEADER_BYTES : HEADER_BYTES + length], header[:, :, 0], header[:, :, 1]
