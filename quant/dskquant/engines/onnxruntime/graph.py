"""A session of ONNX Runtime, bound to KV slots without copies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from dskquant.engines import protocol
from dskquant.engines.onnxruntime import emit
from dskquant.engines.onnxruntime.session import shared
from dskquant.engines.onnxruntime.slots import SlotCache, SlotLayout
from dskquant.engines.protocol import Logits, SlotBatch
from dskquant.errors import EngineError
from dskquant.modes import PrecisionMode

INT32 = np.dtype(np.int32)


class ONNXRuntimeGraph:
    """One session over the slots of a cache. Serves all its modes in one run (INT4 and INT8)."""

    def __init__(
        self, session: ort.InferenceSession, layout: SlotLayout, modes: frozenset[PrecisionMode], resident_bytes: int
    ) -> None:
        self.modes = modes
        self.resident_bytes = resident_bytes
        self.layout = layout
        self._session: ort.InferenceSession | None = session
        self._inputs = {port.name for port in session.get_inputs()}
        self._cache: SlotCache | None = None
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}  # first slot, slots
        self._bound_generation = 0
        (vocabulary,) = (port.shape[1] for port in session.get_outputs() if port.name == emit.LOGITS)
        self._logits = np.empty((0, vocabulary), np.float32)

    def allocate_cache(self, num_slots: int) -> SlotCache:
        """A cache of `num_slots` slots as long as the context; pages are taken when they are first written."""
        return SlotCache(self.layout, num_slots, self.layout.context_length)

    def bind(self, cache: protocol.SlotCache) -> None:
        """Makes `cache` the one that `run` reads and writes. Raises EngineError for that of another model."""
        if not isinstance(cache, SlotCache):
            raise TypeError(f"an ONNX Runtime graph cannot use a {type(cache).__name__}")
        if cache.layout != self.layout:
            raise EngineError(f"KV slots of {cache.layout} cannot be used by a graph of {self.layout}")
        self._cache = cache
        self._bindings.clear()

    def run(self, batch: SlotBatch) -> Logits:
        """Runs one step and returns the logits [L, vocabulary] of `batch.logit_rows`.

        Grows the cache where it is too short. The array is only valid until the next run of this graph; runs of one
        graph must not overlap. Raises EngineError when a slot is full, or the session fails.
        """
        session, cache = self._session, self._cache
        if session is None or cache is None:
            raise EngineError("the graph is closed, or has no cache")
        cache.reserve(batch.longest)
        binding = self._binding(session, cache, batch)
        inputs = self._step_inputs(batch)  # alive until the run is over: the binding does not own them
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, shared(array))
        logits = self._logits_of(len(batch.logit_rows))
        binding.bind_ortvalue_output(emit.LOGITS, shared(logits))
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # the library has a dozen unrelated types for it
            raise EngineError(f"ONNX Runtime failed: {error}") from error
        return logits

    def close(self) -> None:
        """Gives its memory back to the system; the graph cannot run again."""
        self._bindings.clear()
        self._session = self._cache = None
        _return_free_memory()

    def _step_inputs(self, batch: SlotBatch) -> dict[str, NDArray[Any]]:
        totals = batch.past_lens + batch.new_lens
        inputs: dict[str, NDArray[Any]] = {
            emit.INPUT_IDS: np.ascontiguousarray(batch.token_ids),
            emit.TOTAL_LENS: np.maximum(totals, 1) - INT32.type(1),  # also an empty slot must claim a token
            emit.NEW_LENS: np.ascontiguousarray(batch.new_lens),
            emit.LONGEST: np.array(max(totals.max(), 1, batch.token_ids.shape[1]), np.int32),
            emit.LOGIT_ROWS: np.ascontiguousarray(batch.logit_rows),
            emit.RESIDUAL_ROWS: np.ascontiguousarray(batch.residual_rows),
            emit.POSITIONS: batch.past_lens[:, None] + np.arange(batch.token_ids.shape[1], dtype=np.int64),
        }
        return {name: array for name, array in inputs.items() if name in self._inputs}

    def _logits_of(self, rows: int) -> Logits:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        return self._logits[:rows]

    def _binding(self, session: ort.InferenceSession, cache: SlotCache, batch: SlotBatch) -> ort.IOBinding:
        """Past and present of the slots as views of the cache; made once for each range of slots."""
        first, slots = batch.first_slot, len(batch.past_lens)
        if cache.generation != self._bound_generation:
            self._bindings.clear()
            self._bound_generation = cache.generation
        if (first, slots) not in self._bindings:
            binding = session.io_binding()
            for part, tensors in (("key", cache.keys), ("value", cache.values)):
                for layer, tensor in enumerate(tensors):
                    view = shared(tensor[first : first + slots])
                    binding.bind_ortvalue_input(emit.past_name(part, layer), view)
                    binding.bind_ortvalue_output(emit.present_name(part, layer), view)
            self._bindings[first, slots] = binding
        return self._bindings[first, slots]


def _return_free_memory() -> None:
    """glibc keeps what sessions have freed (microsoft/onnxruntime#26831); other C libraries return it by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
