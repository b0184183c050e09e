"""The ONNX Runtime CPU engine, over KV slots. The only package that imports onnxruntime and onnx."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

import onnxruntime as ort

from dskquant import parameter_set
from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.engines.onnxruntime.emit import KernelsFor, emit_decoder
from dskquant.engines.onnxruntime.graph import ONNXRuntimeGraph
from dskquant.engines.onnxruntime.kernels import FLOAT_ACTIVATIONS, INT8_ACTIVATIONS, FloatKernels, PlaneKernels
from dskquant.engines.onnxruntime.session import SessionMaker
from dskquant.engines.onnxruntime.slots import SlotCache, SlotLayout, longest_slot
from dskquant.engines.onnxruntime.stored_weights import StoredWeights
from dskquant.engines.protocol import CompileOptions
from dskquant.errors import EngineError, StoreError
from dskquant.modes import QUANTIZED, PrecisionMode
from dskquant.parameter_set import ParameterSet
from dskquant.store import CONFIG, DEFAULT_PARAMETER_SET, StoreManifest

WORKSPACE_BYTES = 256 << 20
"""Room for activations and for what packing the weights needs beside them."""

FOUR_BIT_BYTES = 0.57 + 0.5
EIGHT_BIT_BYTES = 1.07 + 1
FLOAT_BYTES = 8
"""Bytes a weight at the peak: codes with float32 scales, of groups of 64, and codes of layers that are joined; floats
are copied once."""

LEAN_BYTES = 256 << 20
"""A graph of INT4 and INT8 whose base plane takes no more than this has a session for batches without INT8 beside it:
half of the nodes are for the residual plane, and to run them for nothing takes a tenth of the step of a small model."""


class ONNXRuntimeEngine:
    """Makes graphs over KV slots for the CPU provider of ONNX Runtime. Slots are float32, whatever `kv_precision`.

    The threads of its graphs run at the priority of the thread that makes the engine.
    """

    name = "onnxruntime"
    modes = frozenset(PrecisionMode) - {PrecisionMode.FP16}

    def __init__(self) -> None:
        self._sessions = SessionMaker()

    def compile(
        self,
        store: Path,
        modes: Collection[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None = None,
    ) -> ONNXRuntimeGraph:
        """Builds the graph that serves `modes`, which must be modes of one graph (see `CompileOptions.graph_key`).

        `options.activation_group` 0 keeps activations in float; any other quantizes them per block of the weights.
        Raises StoreError when files of the store are missing or damaged, EngineError for FP16 and for what the engine
        cannot load.
        """
        served = _served(frozenset(modes), options)
        decoder = _read_decoder(store)
        made = [self._session(store, decoder, modes, options, parameters) for modes in _sessions_of(store, served)]
        sessions, sizes = zip(*made, strict=True)
        return ONNXRuntimeGraph(sessions, _layout(decoder), served, sum(sizes))

    def allocate_cache(self, store: Path, num_slots: int, max_bytes: int) -> SlotCache:
        """A cache whose slots are as long as the context, or as `max_bytes` allow.

        Raises EngineError when not even short sequences fit, StoreError when the store cannot be read.
        """
        layout = _layout(_read_decoder(store))
        return SlotCache(layout, num_slots, longest_slot(layout, num_slots, max_bytes))

    def estimate_bytes(self, store: Path, modes: Collection[PrecisionMode], options: CompileOptions) -> int:
        """Peak memory that `compile` and the first run will take, in bytes, from the store's manifest alone."""
        manifest = StoreManifest.read(store)
        served = _served(frozenset(modes), options)
        if not served <= QUANTIZED:
            return manifest.parameters * FLOAT_BYTES + WORKSPACE_BYTES
        return sum(_session_bytes(manifest, modes) for modes in _sessions_of(store, served)) + WORKSPACE_BYTES

    def _session(
        self,
        store: Path,
        decoder: DecoderConfig,
        modes: frozenset[PrecisionMode],
        options: CompileOptions,
        parameters: ParameterSet | None,
    ) -> tuple[ort.InferenceSession, int]:
        """A session that serves `modes`, and the bytes of its constants."""
        weights = StoredWeights(store)
        writer = emit_decoder(decoder, weights, _kernels(store, decoder, weights, modes, options, parameters))
        session = self._sessions.make(writer, options.threads or len(os.sched_getaffinity(0)))
        return session, sum(constant.nbytes for constant in writer.beside.values())


def _sessions_of(store: Path, served: frozenset[PrecisionMode]) -> list[frozenset[PrecisionMode]]:
    """The modes of each session of a graph that serves `served`; the first one is able to serve them all."""
    lean = frozenset({PrecisionMode.INT4})
    if lean < served and _session_bytes(StoreManifest.read(store), lean) <= LEAN_BYTES:
        return [served, lean]
    return [served]


def _session_bytes(manifest: StoreManifest, modes: frozenset[PrecisionMode]) -> int:
    """Of a session of quantized `modes`, at the peak."""
    vocabulary = manifest.vocab_size * manifest.hidden_size
    linear = max(manifest.parameters - vocabulary, 0)
    planes = EIGHT_BIT_BYTES if modes == {PrecisionMode.INT8} else FOUR_BIT_BYTES * len(modes)
    return int(linear * planes + 2 * vocabulary)  # embedding and lm_head are two copies


def _served(modes: frozenset[PrecisionMode], options: CompileOptions) -> frozenset[PrecisionMode]:
    if not modes or modes - options.graph_key(next(iter(modes))):
        raise ValueError(f"no single graph serves {sorted(mode.value for mode in modes)}")
    if PrecisionMode.FP16 in modes:
        raise EngineError("the CPU provider of ONNX Runtime has no 16-bit matrix product: serve fp16 with OpenVINO")
    return options.graph_key(next(iter(modes)))


def _kernels(
    store: Path,
    decoder: DecoderConfig,
    weights: StoredWeights,
    served: frozenset[PrecisionMode],
    options: CompileOptions,
    parameters: ParameterSet | None,
) -> KernelsFor:
    if not served <= QUANTIZED:
        return lambda writer: FloatKernels(decoder, weights, writer)
    planes = parameters or parameter_set.read(store / DEFAULT_PARAMETER_SET)
    level = INT8_ACTIVATIONS if options.activation_group else FLOAT_ACTIVATIONS
    return lambda writer: PlaneKernels(decoder, planes, served, level, writer)


def _layout(decoder: DecoderConfig) -> SlotLayout:
    return SlotLayout(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, decoder.context_length)


def _read_decoder(store: Path) -> DecoderConfig:
    path = store / CONFIG
    try:
        return read_decoder(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
