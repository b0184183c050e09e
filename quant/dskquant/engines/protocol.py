"""What the rest of the project knows of engines.

An `Engine` makes graphs that run batches of steps over a paged KV cache, and serves everything. A `SlotEngine` beside
it decodes a few sequences faster, over a cache with a slot for each of them. `import openvino` stands in
`dskquant.engines.openvino` alone, `import onnxruntime` in `dskquant.engines.onnxruntime`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dskquant.modes import PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import Role

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One batched run of a graph: prefill chunks and decode tokens of B sequences laid end to end in T tokens.

    Sequence b has tokens `subsequence_begins[b]:subsequence_begins[b+1]`, `past_lens[b]` tokens already in the cache,
    and the cache blocks `block_indices[block_indices_begins[b]:block_indices_begins[b+1]]` for its past and new tokens.
    """

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    past_lens: Int32  # [B]
    subsequence_begins: Int32  # [B + 1]
    block_indices: Int32  # [total blocks]
    block_indices_begins: Int32  # [B + 1]
    residual_rows: Int32  # [R] tokens that also use the residual plane (INT8); ascending, in [0, T)
    logit_rows: Int32  # [S] tokens whose logits are wanted; ascending, in [0, T)

    @property
    def max_context_len(self) -> int:
        """Longest past plus new tokens of any sequence of the batch."""
        return int((self.past_lens + np.diff(self.subsequence_begins)).max())


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """One run of a slot graph for B neighbouring slots, S new tokens each, padded on the right.

    A decode step has S = 1; a prefill chunk B = 1 and its own S. A slot with `new_lens` 0 sits the step out: its cache
    is not touched, and its rows mean nothing.
    """

    first_slot: int
    token_ids: Int64  # [B, S]
    past_lens: Int32  # [B] tokens already in the slot
    new_lens: Int32  # [B] tokens of the row that are no padding
    residual_rows: Int64  # [R, 2] (b, s) of the tokens that also use the residual plane (INT8)
    logit_rows: Int64  # [L, 2] (b, s) of the tokens whose logits are wanted

    @property
    def longest(self) -> int:
        """Tokens that the fullest slot must have room for, padding included."""
        return int(self.past_lens.max() + self.token_ids.shape[1])


class WeightSource(Protocol):
    """A weight matrix [N, K] of a stored model that can be quantized."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """Its values, some whole rows at a time, so that a large matrix is never in memory as a whole."""
        ...


class KVCache(Protocol):
    """Cache tensors owned by the caller and shared by every graph of a model."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        ...

    @property
    def nbytes(self) -> int: ...


class SlotCache(Protocol):
    """Keys and values of a few sequences, each in a slot of its own: what slot graphs read and write.

    Sequences move between slots and the blocks of a paged cache of the same model.
    """

    @property
    def num_slots(self) -> int: ...
    @property
    def longest(self) -> int:
        """Tokens a slot can hold at most."""
        ...

    def load(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        """Copies the tokens `begin` (of whole blocks) to `end` of the sequence that lies in `blocks` into a slot."""
        ...

    def store(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        """Copies the tokens `begin` (of whole blocks) to `end` of a slot into the blocks of their sequence."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot to another one: so that those in use can be neighbours."""
        ...


class Graph(Protocol):
    """A compiled executable form of a model. One graph may serve several modes (INT4 and INT8 share one)."""

    @property
    def modes(self) -> frozenset[PrecisionMode]: ...
    @property
    def resident_bytes(self) -> int:
        """Memory its weights hold, in bytes (an estimate made from the tensors)."""
        ...

    @property
    def cache_block_bytes(self) -> int:
        """Bytes of one cache block over all layers, keys and values together."""
        ...

    def allocate_cache(self, num_blocks: int) -> KVCache:
        """A cache of the layout it was compiled for; pages are taken when they are first written."""
        ...

    def bind(self, cache: KVCache) -> None:
        """Makes `cache` the one that `run` reads and writes. Costs about a millisecond: do it before a flip."""
        ...

    def run(self, batch: StepBatch) -> Logits:
        """Runs one step and returns the logits [S, vocabulary] of `batch.logit_rows`.

        The array is only valid until the next run of this graph. Runs of one graph must not overlap.
        """
        ...

    def release_source(self) -> None:
        """Lets go of the mapped pages of its source files; for a graph that has run, and packed its weights, once."""
        ...

    def close(self) -> None:
        """Gives its memory back; the graph cannot run again."""
        ...


class SlotGraph(Protocol):
    """A compiled executable form of a model over slots. One graph may serve several modes."""

    @property
    def modes(self) -> frozenset[PrecisionMode]: ...
    @property
    def resident_bytes(self) -> int:
        """Memory its weights hold, in bytes (an estimate made from the tensors)."""
        ...

    def allocate_cache(self, num_slots: int) -> SlotCache:
        """A cache of `num_slots` slots as long as the context; pages are taken when they are first written."""
        ...

    def bind(self, cache: SlotCache) -> None:
        """Makes `cache` the one that `run` reads and writes."""
        ...

    def run(self, batch: SlotBatch) -> Logits:
        """Runs one step and returns the logits [L, vocabulary] of `batch.logit_rows`.

        The array is only valid until the next run of this graph. Runs of one graph must not overlap. Raises EngineError
        when a slot is full, or the engine fails.
        """
        ...

    def close(self) -> None:
        """Gives its memory back; the graph cannot run again."""
        ...


LinearUnit = tuple[str, ...]
"""Names of the linear layers that read the same tensor: q, k and v; gate and up; or one alone."""


class CalibrationGraph(Graph, Protocol):
    """A graph that can be looked into: it tells what its linear layers are fed with, and, where it computes with a
    parameter set, takes the precision of each unit of linear layers on its own.
    """

    @property
    def units(self) -> Sequence[LinearUnit]:
        """In the order of execution."""
        ...

    def use_residual(self, units: Collection[LinearUnit]) -> None:
        """From the next run on, `units` compute with base + residual and all others with the base alone, whatever the
        scheme says of them; `residual_rows` of a batch is not looked at.
        """
        ...

    def unit_inputs(self) -> Iterator[tuple[LinearUnit, NDArray[np.float32]]]:
        """What each unit read in the last run, [T, K]; an array is only valid until the next run."""
        ...


GRAPH_GROUPS = (
    frozenset({PrecisionMode.INT4, PrecisionMode.INT8}),
    frozenset({PrecisionMode.FP16}),
    frozenset({PrecisionMode.FP32}),
)
"""Modes that share one compiled graph while the weights are shared."""


def graph_key(mode: PrecisionMode) -> frozenset[PrecisionMode]:
    """The modes served by the graph that serves `mode`, while the weights are shared."""
    return next(group for group in GRAPH_GROUPS if mode in group)


class WeightLayout(enum.Enum):
    """How the weights of INT4 and INT8 lie in memory."""

    SHARED = "shared"  # one copy, base + residual, in one graph; an INT8 token costs two passes of 4 bits
    SEPARATE = "separate"  # a 4-bit and an 8-bit copy, each in a graph of its own; half as much memory again


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a graph is compiled. All graphs of one model that share a cache need the same `kv_precision`."""

    threads: int = 0  # 0: all cores
    kv_precision: str = "u8"  # u8, f16, f32 or bf16
    activation_group: int = 128  # INT4, INT8: dynamic INT8 activations per this many inputs; 0: float activations
    weights: WeightLayout = WeightLayout.SHARED

    def graph_key(self, mode: PrecisionMode) -> frozenset[PrecisionMode]:
        """The modes served by the graph that serves `mode`."""
        return graph_key(mode) if self.weights is WeightLayout.SHARED else frozenset({mode})


class Engine(Protocol):
    """Makes graphs and caches from a model store (see `dskquant.store`)."""

    name: str
    block_size: int  # tokens in one cache block

    def weights(self, store: Path) -> Sequence[WeightSource]:
        """The weight matrices of the stored model, in the order of execution."""
        ...

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> Graph:
        """Builds the graph that serves `modes`, which must be modes of one graph (see `CompileOptions.graph_key`).

        Quantized modes compute with `parameters`, whose codes must be stored; None: the default set of `store`.

        Raises `dskquant.errors.StoreError` when files of the store are missing or damaged, EngineError when the engine
        cannot compile what is in them.
        """
        ...

    def compile_for_calibration(
        self, store: Path, options: CompileOptions, parameters: ParameterSet | None = None
    ) -> CalibrationGraph:
        """Builds a graph of `parameters`, or, with None, of FP32. Raises what `compile` raises."""
        ...

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        """Peak memory that `compile` and the first run will take, in bytes, from the store's manifest alone."""
        ...


class SlotEngine(Protocol):
    """Makes graphs over slots from a model store. Their threads run at the priority of the thread that made it."""

    name: str
    modes: frozenset[PrecisionMode]  # that it can serve

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> SlotGraph:
        """Builds the graph that serves `modes`, which must be modes of one graph; see `Engine.compile`."""
        ...

    def allocate_cache(self, store: Path, num_slots: int, max_bytes: int) -> SlotCache:
        """A cache whose slots are as long as the context, or as `max_bytes` allow.

        Pages are taken when they are first written. Raises EngineError when not even short sequences fit.
        """
        ...

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        """Peak memory that `compile` and the first run will take, in bytes, from the store's manifest alone."""
        ...
