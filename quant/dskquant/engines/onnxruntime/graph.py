"""A session of ONNX Runtime, bound to KV slots without copies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

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

MOST_BOUND_STEPS = 64
"""Shapes of steps whose tensors stay bound; beyond them all are bound anew."""


class _StepShape(NamedTuple):
    """What decides which tensors a step is bound to."""

    first_slot: int
    slots: int
    tokens: int  # of the longest row
    residual_rows: int
    logit_rows: int

    @classmethod
    def of(cls, batch: SlotBatch) -> _StepShape:
        slots, tokens = batch.token_ids.shape
        return cls(batch.first_slot, slots, tokens, len(batch.residual_rows), len(batch.logit_rows))


class _BoundStep:
    """The tensors of all steps of one shape, bound once: a step writes its values into them.

    Binding takes longer than anything else between two runs.
    """

    def __init__(self, session: ort.InferenceSession, cache: SlotCache, shape: _StepShape, logits: Logits) -> None:
        self.binding = session.io_binding()
        self.logits = logits
        self._bind_slots(cache, range(shape.first_slot, shape.first_slot + shape.slots))
        names = {port.name for port in session.get_inputs()}
        # alive with the binding, which does not own them
        self._inputs = {name: array for name, array in _step_inputs(shape).items() if name in names}
        for name, array in self._inputs.items():
            self.binding.bind_ortvalue_input(name, shared(array))
        self.binding.bind_ortvalue_output(emit.LOGITS, shared(logits))

    def fill(self, batch: SlotBatch) -> None:
        """Takes the values of `batch`, which has the shape."""
        inputs = self._inputs
        totals = np.maximum(batch.past_lens + batch.new_lens, 1)  # also an empty slot must claim a token
        inputs[emit.INPUT_IDS][...] = batch.token_ids
        inputs[emit.TOTAL_LENS][...] = totals - 1
        inputs[emit.NEW_LENS][...] = batch.new_lens
        inputs[emit.LONGEST][...] = max(totals.max(), batch.token_ids.shape[1])
        inputs[emit.LOGIT_ROWS][...] = batch.logit_rows
        if emit.RESIDUAL_ROWS in inputs:
            inputs[emit.RESIDUAL_ROWS][...] = batch.residual_rows
        if emit.POSITIONS in inputs:
            inputs[emit.POSITIONS][...] = batch.past_lens[:, None] + np.arange(batch.token_ids.shape[1])

    def _bind_slots(self, cache: SlotCache, slots: range) -> None:
        """Past and present of `slots` as views of the cache."""
        for part, tensors in (("key", cache.keys), ("value", cache.values)):
            for layer, tensor in enumerate(tensors):
                view = shared(tensor[slots.start : slots.stop])
                self.binding.bind_ortvalue_input(emit.past_name(part, layer), view)
                self.binding.bind_ortvalue_output(emit.present_name(part, layer), view)


def _step_inputs(shape: _StepShape) -> dict[str, NDArray[Any]]:
    return {
        emit.INPUT_IDS: np.empty((shape.slots, shape.tokens), np.int64),
        emit.TOTAL_LENS: np.empty(shape.slots, np.int32),
        emit.NEW_LENS: np.empty(shape.slots, np.int32),
        emit.LONGEST: np.empty((), np.int32),
        emit.LOGIT_ROWS: np.empty((shape.logit_rows, 2), np.int64),
        emit.RESIDUAL_ROWS: np.empty((shape.residual_rows, 2), np.int64),
        emit.POSITIONS: np.empty((shape.slots, shape.tokens), np.int64),
    }


class ONNXRuntimeGraph:
    """A session over the slots of a cache, which serves all its modes in one run (INT4 and INT8).

    A second one may stand in for it in runs without INT8.
    """

    def __init__(
        self,
        sessions: Sequence[ort.InferenceSession],
        layout: SlotLayout,
        modes: frozenset[PrecisionMode],
        resident_bytes: int,
    ) -> None:
        """The first of `sessions` serves every batch, the last one all without residual rows."""
        self.modes = modes
        self.resident_bytes = resident_bytes
        self.layout = layout
        self._sessions = sessions
        self._cache: SlotCache | None = None
        self._bound: dict[_StepShape, _BoundStep] = {}
        self._bound_generation = 0
        (vocabulary,) = (port.shape[1] for port in sessions[0].get_outputs() if port.name == emit.LOGITS)
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
        self._bound.clear()

    def run(self, batch: SlotBatch) -> Logits:
        """Runs one step and returns the logits [L, vocabulary] of `batch.logit_rows`.

        Grows the cache where it is too short. The array is only valid until the next run of this graph; runs of one
        graph must not overlap. Raises EngineError when a slot is full, or the session fails.
        """
        cache = self._cache
        if not self._sessions or cache is None:
            raise EngineError("the graph is closed, or has no cache")
        session = self._sessions[0 if len(batch.residual_rows) else -1]
        cache.reserve(batch.longest)
        step = self._bound_step(session, cache, batch)
        step.fill(batch)
        try:
            session.run_with_iobinding(step.binding)
        except Exception as error:  # the library has a dozen unrelated types for it
            raise EngineError(f"ONNX Runtime failed: {error}") from error
        return step.logits

    def close(self) -> None:
        """Gives its memory back to the system; the graph cannot run again."""
        self._bound.clear()
        self._sessions, self._cache = (), None
        _return_free_memory()

    def _bound_step(self, session: ort.InferenceSession, cache: SlotCache, batch: SlotBatch) -> _BoundStep:
        shape = _StepShape.of(batch)
        if cache.generation != self._bound_generation or shape.logit_rows > len(self._logits):
            self._bound.clear()
            self._bound_generation = cache.generation
        if shape not in self._bound:
            if len(self._bound) == MOST_BOUND_STEPS:
                self._bound.clear()
            self._bound[shape] = _BoundStep(session, cache, shape, self._logits_of(shape.logit_rows))
        return self._bound[shape]

    def _logits_of(self, rows: int) -> Logits:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        return self._logits[:rows]


def _return_free_memory() -> None:
    """glibc keeps what sessions have freed (microsoft/onnxruntime#26831); other C libraries return it by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
