"""Compiled paged graphs and their KV cache on the OpenVINO CPU plugin."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from dskquant.engines.openvino.paged import LOGIT_ROWS
from dskquant.engines.openvino.plane_rewrite import RESIDUAL_ROWS, Source
from dskquant.engines.protocol import KVCache, Logits, StepBatch
from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode

BLOCK_SIZE = 32
"""Tokens in a cache block of the CPU plugin."""


class OpenVINOCache:
    """Key and value tensors of every layer, in blocks of `BLOCK_SIZE` tokens."""

    block_size = BLOCK_SIZE

    def __init__(self, layout: dict[str, tuple[ov.Type, list[int]]], num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensors = {name: ov.Tensor(kind, ov.Shape([num_blocks, *shape])) for name, (kind, shape) in layout.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.byte_size for tensor in self.tensors.values())

    @cached_property
    def key_pages(self) -> list[NDArray[Any]]:
        """Views of the keys, one a layer, [blocks, kv_heads, ...]. Raises EngineError for a type numpy lacks."""
        return self._pages("key_cache")

    @cached_property
    def value_pages(self) -> list[NDArray[Any]]:
        """Views of the values, as `key_pages`."""
        return self._pages("value_cache")

    def _pages(self, part: str) -> list[NDArray[Any]]:
        tensors = [self.tensors[f"{part}.{layer}"] for layer in range(len(self.tensors) // 2)]
        if tensors[0].element_type == ov.Type.bf16:  # numpy would be shown float16 without a warning
            raise EngineError("bf16 KV pages cannot be moved to another engine; use kv_precision u8, f16 or f32")
        return [tensor.data for tensor in tensors]


class OpenVINOGraph:
    """One compiled model and the request that runs it."""

    def __init__(
        self, compiled: ov.CompiledModel, modes: frozenset[PrecisionMode], resident_bytes: int, source: Source | None
    ) -> None:
        self.modes = modes
        self.resident_bytes = resident_bytes
        self._source = source
        self._request = compiled.create_infer_request()
        self._has_residual = any(RESIDUAL_ROWS in port.names for port in compiled.inputs)
        self._cache_layout = _cache_layout(compiled)

    @property
    def cache_block_bytes(self) -> int:
        return self.allocate_cache(1).nbytes

    def allocate_cache(self, num_blocks: int) -> OpenVINOCache:
        return OpenVINOCache(self._cache_layout, num_blocks)

    def bind(self, cache: KVCache) -> None:
        if not isinstance(cache, OpenVINOCache):
            raise TypeError(f"an OpenVINO graph cannot use a {type(cache).__name__}")
        if cache.layout != self._cache_layout:
            modes = "+".join(sorted(mode.value for mode in self.modes))
            raise EngineError(
                f"{modes} cannot use the KV cache of the other modes: on this CPU it takes another kv_precision; "
                "u8 suits all modes"
            )
        for name, tensor in cache.tensors.items():
            self._request.set_tensor(name, tensor)

    def run(self, batch: StepBatch) -> Logits:
        inputs = {
            "input_ids": batch.token_ids,
            "position_ids": batch.positions,
            "past_lens": batch.past_lens,
            "subsequence_begins": batch.subsequence_begins,
            "block_indices": batch.block_indices,
            "block_indices_begins": batch.block_indices_begins,
            "max_context_len": np.array(batch.max_context_len, np.int32),
            LOGIT_ROWS: batch.logit_rows,
        }
        if self._has_residual:
            inputs[RESIDUAL_ROWS] = batch.residual_rows
        for name, array in inputs.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        # on the calling thread, with its priority; `start_async` uses threads with that of whoever compiled
        self._request.infer(share_outputs=True)
        logits: Logits = self._request.get_output_tensor(0).data  # [S, 1, vocabulary]
        return logits.reshape(len(batch.logit_rows), logits.shape[-1])

    def release_source(self) -> None:
        if self._source is not None:
            self._source.release_pages()

    def close(self) -> None:
        del self._request
        self._source = None


def _cache_layout(compiled: ov.CompiledModel) -> dict[str, tuple[ov.Type, list[int]]]:
    """Type and shape of one block of every cache tensor, as the compiled ports tell them."""
    layout = {}
    for port in compiled.inputs:
        name = port.any_name
        if name.startswith(("key_cache.", "value_cache.")):
            layout[name] = (port.element_type, [dimension.get_length() for dimension in list(port.partial_shape)[1:]])
    return layout
