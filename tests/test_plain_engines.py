"""`engine = "auto"` of plain graphs: both engines are proven and timed, and the faster one that is exact serves."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from rich.console import Console
from tests.fake_host import Service, asynchronous
from tests.plain_daemon import label_of, outputs_of, raw_request, serving_plain, stub
from tests.plain_models import DETECTOR, MAGIKA, pages, present, saved
from tests.plain_models import files as small_files
from tests.plain_stores import FACTORS, direct, scaling_store, written

from dskapi.v1 import common_pb2, control_pb2
from dskctl.verbs import status as status_verb
from dskd.config import BatchingConfig, EngineUse, ModelConfig
from dskd.errors import EXPECTED_ERRORS
from dskd.manager.parts import Overtaking
from dskd.manager.proof import Proof
from dskd.plain import engines
from dskd.plain.build import PlainBuilder, PlainProver
from dskd.plain.engines import Candidate, EngineChoice, exact_enough
from dskd.plain.generation import PlainGeneration, PlainSet
from dskd.plain.served_graph import ServedGraph
from dskd.priority import at_once
from dskquant.divergence import Divergence
from dskquant.engines.onnxruntime.prepare import prepare, read_onnx
from dskquant.modes import PrecisionMode
from dskquant.plain.convert import PlainOptions, convert_plain
from dskquant.plain.protocol import Tensors
from dskquant.plain.samples import DataOptions

INT8, FP32 = PrecisionMode.INT8, PrecisionMode.FP32
BOTH = ["onnxruntime", "openvino"]
ROUNDING = 3e-3
"""Of a probability of magika, between the two engines and between a row and a batch: see docs/plain-graphs.md."""


def config(store: Path, **changes: Any) -> ModelConfig:
    defaults = {"engine": EngineUse.AUTO, "resident": (INT8, FP32), "default_mode": INT8, "threads": 1}
    return ModelConfig(path=store, **{**defaults, **changes})


async def modes_of(service: Service) -> dict[int, control_pb2.ModeStatus]:
    (model,) = (await service.control.GetStatus(control_pb2.GetStatusRequest())).models
    return {mode.mode: mode for mode in model.modes if mode.resident}


def wire(mode: PrecisionMode) -> int:
    return common_pb2.PrecisionMode.Value(f"PRECISION_MODE_{mode.name}")


class Samples(CalibrationDataReader):  # type: ignore[misc]  # untyped
    def __init__(self, inputs: Tensors) -> None:
        self._left: Iterator[Tensors] = iter([inputs])

    def get_next(self) -> Tensors | None:
        return next(self._left, None)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The detector with signed activations, which OpenVINO computes as nothing but noise, without an error."""
    folder, inputs = tmp_path_factory.mktemp("signed"), pages(1)
    store = folder / "store"
    store.mkdir()
    (store / "fp32.onnx").write_bytes(present(DETECTOR).read_bytes())
    prepare(read_onnx(DETECTOR), DETECTOR, folder / "prepared.onnx")
    quantize_static(
        folder / "prepared.onnx",
        store / "int8.onnx",
        Samples(inputs),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["Conv"],
    )
    return written(store, inputs)


@asynchronous
async def test_an_engine_that_computes_noise_never_serves(tmp_path: Path, signed: Path) -> None:
    inputs = pages(1)
    async with serving_plain(tmp_path, {"detector": config(signed)}) as service:
        modes = await modes_of(service)
        response = await stub(service).ModelInfer(raw_request("detector", inputs))
    assert modes[wire(INT8)].engine == "onnxruntime"
    alone, noisy = modes[wire(INT8)].engines
    assert (alone.name, alone.reason, noisy.name) == ("onnxruntime", "", "openvino")
    assert noisy.reason.startswith("int8 failed its proof: on the golden inputs its noise is 0.0 dB below the signal")
    assert label_of(response)[::2] == ("int8", "onnxruntime")
    for name, values in direct(signed / "int8.onnx", inputs).items():
        np.testing.assert_allclose(outputs_of(response)[name], values, atol=0.05)  # a level of INT8 may tip over
    assert [engine.reason for engine in modes[wire(FP32)].engines] == ["", ""]


@asynchronous
async def test_without_a_choice_noise_is_not_loaded(tmp_path: Path, signed: Path) -> None:
    with pytest.raises(EXPECTED_ERRORS, match=r"int8 failed its proof: on the golden inputs its noise is 0.0 dB"):
        async with serving_plain(tmp_path, {"detector": config(signed, engine=EngineUse.OPENVINO)}):
            pass


@pytest.fixture(scope="module")
def magika(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("magika")
    data = DataOptions(saved(folder / "data.npz", small_files(8)))
    convert_plain(present(MAGIKA), folder / "store", PlainOptions(data, modes=(INT8,)), lambda *_: None)
    return folder / "store"


@asynchronous
async def test_the_engine_that_was_measured_to_be_faster_serves_and_signs_its_answers(
    tmp_path: Path, magika: Path
) -> None:
    model = config(magika, batching=BatchingConfig(max_size=4))
    row = {name: values[:1] for name, values in small_files(2).items()}
    async with serving_plain(tmp_path, {"magika": model}) as service:
        modes = await modes_of(service)
        for mode in (INT8, FP32):
            told = modes[wire(mode)]
            assert [(engine.name, sorted(engine.ms), engine.reason) for engine in told.engines] == [
                (name, [1, 4], "") for name in BOTH
            ]
            fastest = min(told.engines, key=lambda engine: engine.ms[1] * engine.ms[4])
            assert told.engine == fastest.name
            response = await stub(service).ModelInfer(raw_request("magika", row, precision=mode.value))
            assert label_of(response) == (mode.value, 1, fastest.name)
            (values,), (expected,) = outputs_of(response).values(), direct(magika / f"{mode.value}.onnx", row).values()
            np.testing.assert_allclose(values, expected, atol=ROUNDING if mode is FP32 else 0.05)
        status = await service.control.GetStatus(control_pb2.GetStatusRequest())
        assert status.models[0].engine == modes[wire(INT8)].engine
        assert "1 ROW 4 ROWS SERVES" in rendered(status)


def rendered(status: control_pb2.GetStatusResponse) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(status_verb.as_text(status))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> Iterator[list[str]]:
    """Engines take these times instead of their own; yields those that were asked for theirs."""
    asked: list[str] = []

    def fastest(graphs: dict[str, Any], inputs: Tensors, in_turn: object) -> list[tuple[str, float]]:
        asked.extend(graphs)
        return [(engine, seconds[engine]) for engine in graphs]

    with monkeypatch.context() as patched:
        patched.setattr(engines, "_fastest", fastest)
        yield asked


def built(store: Path, state: Path, mode: PrecisionMode) -> ServedGraph:
    """What a daemon that starts with this state builds."""
    found, model = PlainSet.read(store), config(store)
    builder = PlainBuilder(EngineChoice(model, True, state), model.threads, found, PlainProver(model.proof))
    generation = PlainGeneration.of(1, found, model.engine.value)
    try:
        graph = builder.build(generation, frozenset({mode}), None, Overtaking(), at_once).graph
    finally:
        builder.close()
    assert isinstance(graph, ServedGraph)
    return graph


def test_times_are_measured_once_for_a_graph_and_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = scaling_store(tmp_path / "store", {mode: FACTORS[mode] for mode in (INT8, FP32)})
    with measured(monkeypatch, {"onnxruntime": 1.0, "openvino": 2.0}) as asked:
        assert [built(store, tmp_path / "state", mode).engine for mode in (INT8, FP32)] == ["onnxruntime"] * 2
    assert asked == BOTH * 2
    with measured(monkeypatch, {"onnxruntime": 2.0, "openvino": 1.0}) as asked:
        graph = built(store, tmp_path / "state", INT8)
    assert (asked, graph.engine) == ([], "onnxruntime")
    assert [(engine.name, engine.seconds) for engine in graph.engines] == [
        ("onnxruntime", {1: 1}),
        ("openvino", {1: 2}),
    ]
    kept = tmp_path / "state" / "timings.int8.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "fingerprint": "another machine"}))
    with measured(monkeypatch, {"onnxruntime": 2.0, "openvino": 1.0}) as asked:
        assert [built(store, tmp_path / "state", mode).engine for mode in (INT8, FP32)] == ["openvino", "onnxruntime"]
    assert asked == BOTH


def candidate(engine: str, noise: float) -> Candidate:
    return Candidate(engine, proof=Proof(INT8, Divergence(1, noise, noise, 1.0, finite=True)))


@pytest.mark.parametrize(
    ("noises", "able"),
    [((0.01, 0.019), BOTH), ((0.01, 0.021), BOTH[:1]), ((0.3, 0.01), BOTH[1:]), ((1e-9, 9e-5), BOTH)],
)
def test_an_engine_that_is_much_noisier_than_the_other_does_not_serve(
    noises: tuple[float, float], able: list[str]
) -> None:
    found = exact_enough([candidate(engine, noise) for engine, noise in zip(BOTH, noises, strict=True)])
    assert [each.engine for each in found if not each.reason] == able
    assert all("below the signal" in each.reason for each in found if each.engine not in able)
