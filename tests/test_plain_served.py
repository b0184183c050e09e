"""A plain graph as a model of the daemon: served, switched, applied, proven, watched; a tiny graph in this process."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from rich.console import Console, RenderableType
from tests.daemon_process import refusal
from tests.fake_host import Service, asynchronous
from tests.plain_daemon import label_of, outputs_of, raw_request, serving_plain, stub
from tests.plain_stores import FACTORS, scaling_inputs, scaling_store

from dskapi.open_inference import model_config_pb2, service_pb2, statistics_pb2
from dskapi.v1 import common_pb2, control_pb2, inference_pb2
from dskctl import noise_view
from dskctl.verbs import status as status_verb
from dskd import doctor
from dskd.config import BatchingConfig, EngineUse, ModelConfig, ProofConfig
from dskd.errors import EXPECTED_ERRORS
from dskd.monitor.config import MonitorConfig
from dskquant.errors import StoreError
from dskquant.modes import PrecisionMode

INT4, INT8, FP16, FP32 = PrecisionMode
WIRE = {mode: common_pb2.PrecisionMode.Value(f"PRECISION_MODE_{mode.name}") for mode in PrecisionMode}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
X = scaling_inputs(2)["x"]

WATCHFUL = MonitorConfig(share=1.0, time_share=1.0, false_trip_samples=100.0)
LENIENT = ProofConfig(min_sqnr_db=-200.0)


def config(store: Path, **changes: Any) -> ModelConfig:
    defaults = {"engine": EngineUse.ONNXRUNTIME, "resident": (INT4, INT8, FP32), "default_mode": INT8, "threads": 1}
    return ModelConfig(path=store, **{**defaults, **changes})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaling_store(tmp_path_factory.mktemp("stores") / "scaling")


async def asked(service: Service, rows: int = 2, seed: int = 0, **parameters: str) -> tuple[str, float]:
    """The mode that a request was told it was served in, and what the graph really multiplied with."""
    inputs = scaling_inputs(rows, seed)
    response = await stub(service).ModelInfer(raw_request("tiny", inputs, **parameters))
    outputs = outputs_of(response)
    np.testing.assert_array_equal(outputs["z"], 10 * inputs["index"])
    ratios = outputs["y"] / inputs["x"]
    np.testing.assert_allclose(ratios, ratios[0, 0], rtol=1e-6)
    return label_of(response)[0], float(ratios[0, 0])


async def switched(service: Service, mode: PrecisionMode, **options: Any) -> control_pb2.SwitchPrecisionResponse:
    request = control_pb2.SwitchPrecisionRequest(model="tiny", mode=WIRE[mode], wait=True, **options)
    response: control_pb2.SwitchPrecisionResponse = await service.control.SwitchPrecision(request)
    return response


async def applied(service: Service, text: str) -> control_pb2.ChangeResponse:
    request = control_pb2.ApplyConfigRequest(config=f'model = "tiny"\n{text}', wait=True)
    response: control_pb2.ChangeResponse = await service.control.ApplyConfig(request)
    return response


async def history(service: Service) -> list[control_pb2.HistoryEntry]:
    """Newest first."""
    return list((await service.control.GetHistory(control_pb2.GetHistoryRequest())).entries)


def as_people_see(shown: RenderableType) -> str:
    """What `dskctl` prints."""
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    return cast(io.StringIO, console.file).getvalue()


def is_by(mode: PrecisionMode, answer: tuple[str, float], factor: float | None = None) -> None:
    assert answer[0] == mode.value
    assert answer[1] == pytest.approx(FACTORS[mode] if factor is None else factor, rel=1e-6)


@pytest.mark.parametrize("engine", [EngineUse.ONNXRUNTIME, EngineUse.OPENVINO])
@asynchronous
async def test_an_answer_comes_from_the_graph_that_it_names(tmp_path: Path, store: Path, engine: EngineUse) -> None:
    async with serving_plain(tmp_path, {"tiny": config(store, engine=engine)}) as service:
        is_by(INT8, await asked(service))
        is_by(FP32, await asked(service, precision="fp32"))
        assert (await switched(service, INT4)).resident
        is_by(INT4, await asked(service))
        response = await stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1)))
        assert label_of(response) == ("int4", 1, engine.value)
        assert (response.id, response.model_version) == ("seven", "1")


@asynchronous
async def test_typed_contents_are_answered_with_typed_contents(tmp_path: Path, store: Path) -> None:
    inputs = scaling_inputs(2)
    request = raw_request("tiny", inputs)
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(inputs["x"].ravel().tolist())
    request.inputs[1].contents.int64_contents.extend(inputs["index"].ravel().tolist())
    request.outputs.add(name="z")
    async with serving_plain(tmp_path, {"tiny": config(store)}) as service:
        response = await stub(service).ModelInfer(request)
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("z", "INT64", [2, 1])
    assert list(output.contents.int64_contents) == (10 * inputs["index"]).ravel().tolist()
    assert not response.raw_output_contents


@asynchronous
async def test_a_model_tells_its_tensors_its_batches_and_its_requests(tmp_path: Path, store: Path) -> None:
    batching = BatchingConfig(max_size=16)
    async with serving_plain(tmp_path, {"tiny": config(store, batching=batching)}) as service:
        metadata = await stub(service).ModelMetadata(service_pb2.ModelMetadataRequest(name="tiny"))
        told = await stub(service).ModelConfig(model_config_pb2.ModelConfigRequest(name="tiny"))
        await asked(service)
        response = await stub(service).ModelStatistics(statistics_pb2.ModelStatisticsRequest(name="tiny"))
        status = (await service.control.GetStatus(control_pb2.GetStatusRequest())).models[0]
        (listed,) = (await service.control.ListModels(control_pb2.ListModelsRequest())).models
        whole = await service.control.GetStatus(control_pb2.GetStatusRequest())
    assert "int4 26.0 dB, int8 46.0 dB, fp32 200.0 dB" in as_people_see(status_verb.as_text(whole))
    assert [(item.name, item.datatype, list(item.shape)) for item in metadata.inputs] == [
        ("x", "FP32", [-1, 3]),
        ("index", "INT64", [-1, 1]),
    ]
    assert metadata.properties["modes"] == "int4,int8,fp32"
    assert (told.config.max_batch_size, list(told.config.input[0].dims)) == (16, [3])
    assert told.config.output[1].data_type == model_config_pb2.TYPE_INT64
    (statistics,) = response.model_stats
    assert (statistics.inference_count, statistics.execution_count) == (1, 1)
    assert (status.engine, status.architecture, status.measure) == ("onnxruntime", "plain graph", 1)
    assert [mode.tokens for mode in status.modes] == [0, 1, 0, 0]
    assert status.generations[0].kl["int4"] == pytest.approx(0.05**2, rel=1e-3)
    assert (listed.architecture, list(listed.resident)) == ("plain graph", [WIRE[INT4], WIRE[INT8], WIRE[FP32]])


@asynchronous
async def test_a_mode_that_is_not_resident_is_loaded_when_asked_for_and_let_go(tmp_path: Path, store: Path) -> None:
    model = config(store, resident=(INT8,), on_demand_ttl_s=0.1)
    async with serving_plain(tmp_path, {"tiny": model}) as service, service.watching() as events:
        is_by(INT4, await asked(service, precision="int4"))
        seen = [event.kind async for event in _until(events, "mode.released")]
    assert seen == ["mode.preparing", "mode.resident", "mode.released"]


async def _until(events: Any, kind: str) -> Any:
    async for event in events:
        yield event
        if event.kind == kind:
            return


@asynchronous
async def test_where_nothing_is_configured_int8_serves_beside_the_reference(tmp_path: Path, store: Path) -> None:
    async with serving_plain(tmp_path, {"tiny": ModelConfig(path=store)}) as service:
        (listed,) = (await service.control.ListModels(control_pb2.ListModelsRequest())).models
        assert (listed.mode, list(listed.resident)) == (WIRE[INT8], [WIRE[INT8], WIRE[FP32]])


@asynchronous
async def test_text_is_refused_and_so_are_modes_that_the_store_lacks(tmp_path: Path, store: Path) -> None:
    async with serving_plain(tmp_path, {"tiny": config(store)}) as service:
        call = service.inference.Generate(inference_pb2.GenerateRequest(model="tiny", prompt="hello"))
        code, message, _ = await refusal(call)
        assert (code, "it takes tensors (ModelInfer)" in message) == (PRECONDITION, True)
        code, message, _ = await service.refusal(control_pb2.SwitchPrecisionRequest(mode=WIRE[FP16], wait=True))
        assert (code, message.endswith("has no fp16 graph; it has: int4, int8, fp32")) == (PRECONDITION, True), message
        call = stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1), precision="fp16"))
        code, message, _ = await refusal(call)
        assert (code, message.startswith("parameters.precision: the model has no fp16")) == (INVALID, True)


@asynchronous
async def test_tensors_for_a_model_that_is_not_there_are_told_so(tmp_path: Path, store: Path) -> None:
    async with serving_plain(tmp_path, {"tiny": config(store)}) as service:
        call = stub(service).ModelInfer(raw_request("tinny", scaling_inputs(1)))
        assert (await refusal(call))[:2] == (grpc.StatusCode.NOT_FOUND, "no model 'tinny'; known: tiny")
        await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="tiny"))
        call = stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1)))
        code, message, _ = await refusal(call)
        assert (code, message) == (PRECONDITION, "model 'tiny' is unloaded; load it first")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"resident": (FP16, FP32), "default_mode": FP16}, "has no fp16; it has: int4, int8, fp32"),
        ({"proof": ProofConfig(min_sqnr_db=30.0)}, "int4 failed its proof: on the golden inputs its noise is 26.0 dB"),
    ],
)
@asynchronous
async def test_what_cannot_serve_is_not_loaded_and_says_why(
    tmp_path: Path, store: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EXPECTED_ERRORS, match=re.escape(reason)):
        async with serving_plain(tmp_path, {"tiny": config(store, **changes)}):
            pass


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"no graph"), lambda path: path.unlink()])
@asynchronous
async def test_a_damaged_store_is_not_loaded(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    damaged = scaling_store(tmp_path / "store")
    damage(damaged / "int8.onnx")
    with pytest.raises(StoreError, match=r"int8.onnx: (damaged|missing)"):
        async with serving_plain(tmp_path, {"tiny": config(damaged)}):
            pass


@asynchronous
async def test_another_store_is_applied_kept_and_rolled_back(tmp_path: Path, store: Path) -> None:
    other = scaling_store(tmp_path / "other", {**FACTORS, INT8: 1.995})
    async with serving_plain(tmp_path, {"tiny": config(store)}) as service:
        change = await applied(service, f'[params]\nfile = "{other}"')
        assert (change.from_generation, change.to_generation, change.changed, change.done) == (1, 2, True, True)
        assert [(proof.mode, proof.measure) for proof in change.proofs] == [(WIRE[INT4], 1), (WIRE[INT8], 1)]
        assert change.proofs[1].kl_before == pytest.approx(0.005**2, rel=1e-3)
        assert change.proofs[1].kl_after == pytest.approx(0.0025**2, rel=1e-3)
        is_by(INT8, await asked(service), 1.995)
        (other / "int8.onnx").unlink()  # the daemon has a copy of its own
        await service.control.Rollback(control_pb2.RollbackRequest(model="tiny", wait=True))
        is_by(INT8, await asked(service))
        await service.control.Rollback(control_pb2.RollbackRequest(model="tiny", wait=True))
        is_by(INT8, await asked(service), 1.995)
        assert [entry.kind for entry in await history(service)] == ["rollback", "rollback", "apply", "load"]


@asynchronous
async def test_a_store_of_another_graph_or_too_noisy_a_one_is_refused_and_changes_nothing(
    tmp_path: Path, store: Path
) -> None:
    noisy = scaling_store(tmp_path / "noisy", {**FACTORS, INT8: 1.0})
    foreign = scaling_store(tmp_path / "foreign")
    manifest = json.loads((foreign / "manifest.json").read_text())
    (foreign / "manifest.json").write_text(json.dumps(manifest | {"source_sha256": "6" * 64}))
    async with serving_plain(tmp_path, {"tiny": config(store, proof=LENIENT)}) as service:
        for path, reason in ((noisy, "limit: 4 times the power"), (foreign, "made of another graph than")):
            request = control_pb2.ApplyConfigRequest(config=f'model = "tiny"\n[params]\nfile = "{path}"', wait=True)
            code, message, _ = await service.refusal(request)
            assert (code, reason in message) == (PRECONDITION, True), message
        is_by(INT8, await asked(service))
        assert [entry.outcome for entry in await history(service)] == ["rejected", "rejected", "committed"]


@asynchronous
async def test_rules_for_layers_are_refused(tmp_path: Path, store: Path) -> None:
    async with serving_plain(tmp_path, {"tiny": config(store)}) as service:
        text = 'model = "tiny"\n[[layers]]\nmatch = "a"\nprecision = "int8"'
        code, message, _ = await service.refusal(control_pb2.ApplyConfigRequest(config=text, wait=True))
        assert (code, message) == (PRECONDITION, "a plain graph has no layers that take rules; convert it anew")


@asynchronous
async def test_noise_is_caught_and_the_reference_serves_until_another_set_comes(tmp_path: Path, store: Path) -> None:
    """A set whose noise on live inputs is not that of its manifest; the proof lets it pass."""
    damaged = scaling_store(tmp_path / "damaged", {**FACTORS, INT8: 1.0})
    manifest = json.loads((damaged / "manifest.json").read_text())
    manifest["graphs"]["int8"]["noise"]["sqnr_db"] = 46.0
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    model = config(damaged, proof=LENIENT, monitor=WATCHFUL)
    async with serving_plain(tmp_path, {"tiny": model}) as service, service.watching() as events:
        served = await _ask_until_served_in(service, FP32)
        assert served[0] == "int8"
        event = await _next(events, "fallback.committed")
        assert "int8 healthy -> tripped: noise; mean noise-to-signal ratio 0.25" in event.message
        noise = await service.control.GetNoise(control_pb2.GetNoiseRequest(model="tiny"))
        assert (noise.measure, noise.fallback) == (control_pb2.NOISE_MEASURE_NOISE_TO_SIGNAL, WIRE[FP32])
        shown = as_people_see(noise_view.as_text(noise))
        assert "signal to noise to fp32 · fallback: fp32 serves" in shown
        assert "6.0 dB–6.0 dB" in shown or "int8  tripped" in shown
        (newest, *_) = await history(service)
        assert (newest.kind, newest.actor, newest.from_mode, newest.to_mode) == (
            "fallback",
            "monitor",
            WIRE[INT8],
            WIRE[FP32],
        )
        is_by(INT8, await asked(service, precision="int8"), 1.0)  # who asks for it still gets it


async def _ask_until_served_in(service: Service, mode: PrecisionMode) -> list[str]:
    """The modes that served until `mode` did."""
    served: list[str] = []
    while not served or served[-1] != mode.value:
        served.append((await asked(service, seed=len(served)))[0])
    return served


async def _next(events: Any, kind: str) -> control_pb2.Event:
    async for event in events:
        if event.kind == kind:
            return event  # type: ignore[no-any-return]
    raise AssertionError(kind)


@asynchronous
async def test_requests_of_a_stream_are_answered_in_their_order(tmp_path: Path, store: Path) -> None:
    """Different modes share no batch, so that later requests are computed before earlier ones."""
    batching = BatchingConfig(max_size=4, max_delay_ms=30)
    modes = ["int8", "fp32", "int4", "fp32", "fp32", "fp32", "int8"]
    async with serving_plain(tmp_path, {"tiny": config(store, batching=batching)}) as service:
        call = stub(service).ModelStreamInfer()
        for number, mode in enumerate(modes):
            request = raw_request("tiny", scaling_inputs(1, seed=number), precision=mode)
            request.id = str(number)
            await call.write(request)
        wrong = raw_request("tiny", {"x": X})
        wrong.id = "wrong"
        await call.write(wrong)
        await call.done_writing()
        answers = [answer async for answer in call]
    *good, bad = answers
    assert [answer.infer_response.id for answer in answers] == [*map(str, range(len(modes))), "wrong"]
    assert [answer.infer_response.parameters["mode"].string_param for answer in good] == modes
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in good)
    assert bad.error_message == "INVALID_ARGUMENT: inputs: index missing; needed: x, index"


@asynchronous
async def test_a_cancelled_request_leaves_the_line(tmp_path: Path, store: Path) -> None:
    batching = BatchingConfig(max_size=4, max_delay_ms=60_000)
    async with serving_plain(tmp_path, {"tiny": config(store, batching=batching)}) as service:
        calls = [stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1))) for _ in range(3)]
        await _wait_for(service, waiting=3)
        calls[0].cancel()
        await _wait_for(service, waiting=2)
        calls += [stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1, seed))) for seed in (1, 2)]
        answers = await asyncio.gather(*calls[1:])
        assert len(answers) == 4
        (status,) = (await service.control.GetStatus(control_pb2.GetStatusRequest())).models
        assert [mode.tokens for mode in status.modes] == [0, 4, 0, 0]


async def _wait_for(service: Service, waiting: int) -> None:
    while (await service.control.GetStatus(control_pb2.GetStatusRequest())).models[0].waiting_requests != waiting:
        pass


@asynchronous
async def test_an_unload_waits_for_open_requests_within_its_grace(tmp_path: Path, store: Path) -> None:
    batching = BatchingConfig(max_size=4, max_delay_ms=300)
    async with serving_plain(tmp_path, {"tiny": config(store, batching=batching)}) as service:
        call = stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1)))
        await _wait_for(service, waiting=1)
        response = await service.control.UnloadModel(control_pb2.UnloadModelRequest(model="tiny"))
        assert response.aborted_requests == 0
        assert outputs_of(await call)["y"].shape == (1, 3)
        code, _, _ = await refusal(stub(service).ModelInfer(raw_request("tiny", scaling_inputs(1))))
        assert code is not grpc.StatusCode.OK


@asynchronous
async def test_inputs_that_the_engine_cannot_compute_are_the_clients_fault(tmp_path: Path, store: Path) -> None:
    """An index outside of the table: the graph takes any INT64."""
    batching = BatchingConfig(max_size=4, max_delay_ms=20)
    async with serving_plain(tmp_path, {"tiny": config(store, batching=batching)}) as service:
        bad = scaling_inputs(1) | {"index": np.array([[1000]])}
        refused = refusal(stub(service).ModelInfer(raw_request("tiny", bad)))
        (code, message, details), answer = await asyncio.gather(refused, asked(service, rows=1))
        assert (code, message.startswith("inputs: ONNX Runtime")) == (INVALID, True)
        assert isinstance(details[0], error_details_pb2.BadRequest)
        is_by(INT8, answer)


def test_the_doctor_names_damaged_graphs(tmp_path: Path) -> None:
    damaged = scaling_store(tmp_path / "store")
    (tmp_path / "dskd.toml").write_text('[models.tiny]\npath = "store"\n')
    assert doctored(tmp_path) == [f"{damaged} is whole"]
    (damaged / "int8.onnx").write_bytes(b"no graph")
    (told,) = doctored(tmp_path)
    assert told.startswith(f"{damaged / 'int8.onnx'}: damaged")
    assert told.endswith("convert the model again")


def doctored(folder: Path) -> list[str]:
    """What the doctor says of the model."""
    return [found.detail for found in doctor.examine(folder / "dskd.toml") if found.subject == "models.tiny"]
