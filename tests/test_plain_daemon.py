"""A daemon as its users run it with real graphs: NVIDIA's client, switches under load, batches, noise, a crash."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.daemon_process import DaemonProcess, daemon_process
from tests.minilm import random_sentences, write_minilm
from tests.plain_daemon import label_of, outputs_of, raw_request
from tests.plain_models import CACHE, present
from tests.plain_stores import direct, with_damaged_int8

from dskapi.open_inference import service_pb2_grpc, statistics_pb2
from dskapi.v1 import common_pb2, control_pb2, control_pb2_grpc
from dskquant.modes import PrecisionMode
from dskquant.plain.convert import PlainOptions, convert_plain
from dskquant.plain.protocol import Tensors
from dskquant.plain.samples import DataOptions

DIRECTION = CACHE / "ppocr_cls.onnx"
SESSION = Path(__file__).with_name("plain_triton_session.py")
INT8, FP32 = PrecisionMode.INT8, PrecisionMode.FP32
MODES = {"int8": common_pb2.PRECISION_MODE_INT8, "fp32": common_pb2.PRECISION_MODE_FP32}

ROUNDING = 1e-4
"""Of probabilities and of the parts of embeddings, between two sessions with other numbers of threads."""

THREADS, SWITCHES = 16, 200
TOKENS = 8


@dataclass(frozen=True, slots=True)
class Served:
    """A real graph as a store, and inputs for it."""

    store: Path
    inputs: tuple[Tensors, ...]
    output: str

    def expected(self, mode: str) -> list[NDArray[Any]]:
        """What ONNX Runtime alone answers to each of the inputs."""
        return [direct(self.store / f"{mode}.onnx", inputs)[self.output] for inputs in self.inputs]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("encoder")
    source = write_minilm(folder / "encoder.onnx")
    inputs = tuple(random_sentences(1, TOKENS, seed) for seed in range(24))
    return Served(stored(source, folder, inputs), inputs, "embedding")


@pytest.fixture(scope="module")
def direction(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Whether a line of text stands on its head: images [rows, 3, 48, 192]."""
    inputs = tuple({"x": stripes(seed)} for seed in range(24))
    folder = tmp_path_factory.mktemp("direction")
    return Served(stored(present(DIRECTION), folder, inputs), inputs, "save_infer_model/scale_0.tmp_1")


def stripes(seed: int) -> NDArray[np.float32]:
    """Dark strokes on a light ground, in [-1, 1]."""
    strokes = np.random.default_rng(seed).random((1, 1, 6, 24), np.float32) > 0.6
    return np.repeat(1.0 - 2.0 * np.kron(strokes, np.ones((1, 1, 8, 8))), 3, axis=1).astype(np.float32)


def stored(source: Path, folder: Path, inputs: Sequence[Tensors]) -> Path:
    data = folder / "data.npz"
    np.savez(data, **{name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]})
    options = PlainOptions(DataOptions(data, rows=8), modes=(INT8,))
    convert_plain(source, folder / "store", options, lambda stage, done, total: None)
    return folder / "store"


def model(store: Path, **more: Any) -> dict[str, Any]:
    modes = {"resident": ["int8", "fp32"], "default_mode": "int8"}
    return {"path": str(store), "engine": "onnxruntime", **modes, **more}


@pytest.fixture(scope="module")
def daemon(encoder: Served, direction: Served) -> Iterator[DaemonProcess]:
    batching = {"max_size": 16, "max_delay_ms": 4.0}
    models = {
        "encoder": model(encoder.store),
        "direction": model(direction.store),
        "batched": model(encoder.store, batching=batching),
    }
    with daemon_process(models) as daemon:
        daemon.start()
        for name in models:
            daemon.wait_until_serving(name)
        yield daemon
        assert daemon.log("unexpected error") == []
        assert daemon.stop() == 0


@dataclass
class Client:
    """One connection."""

    channel: grpc.Channel

    @property
    def inference(self) -> Any:
        return service_pb2_grpc.GRPCInferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlStub(self.channel)  # type: ignore[no-untyped-call]

    def infer(self, name: str, inputs: Tensors, **parameters: str) -> tuple[str, Tensors]:
        """The mode that served, and the outputs."""
        response = self.inference.ModelInfer(raw_request(name, inputs, **parameters), timeout=60)
        return label_of(response)[0], outputs_of(response)

    def switch(self, name: str, mode: str) -> None:
        request = control_pb2.SwitchPrecisionRequest(model=name, mode=MODES[mode], wait=True)
        assert self.control.SwitchPrecision(request).done


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with grpc.insecure_channel(daemon.target) as channel:
        yield Client(channel)


@pytest.fixture(scope="module")
def triton(
    daemon: DaemonProcess, encoder: Served, direction: Served, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What NVIDIA's client got."""
    path = tmp_path_factory.mktemp("triton") / "inputs.npz"
    served = {"encoder": encoder.inputs[0], "direction": direction.inputs[0]}
    np.savez(path, **{f"{name}/{key}": array for name, inputs in served.items() for key, array in inputs.items()})
    command = [sys.executable, str(SESSION), daemon.target, str(path), *served]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("name", ["encoder", "direction"])
def test_tritons_client_gets_what_onnxruntime_alone_answers(
    triton: dict[str, Any], request: pytest.FixtureRequest, name: str
) -> None:
    served: Served = request.getfixturevalue(name)
    expected = {mode: served.expected(mode)[0] for mode in MODES}
    told = triton[name]
    answers = [told["single"], told["fp32"], told["asynchronous"], *told["streamed"]]
    modes = ["int8", "fp32", "int8", "int8", "fp32", "int8"]
    assert [answer["parameters"]["mode"] for answer in answers] == modes
    for answer in answers:
        (values,) = answer["outputs"].values()
        np.testing.assert_allclose(values, expected[answer["parameters"]["mode"]], atol=ROUNDING)
    assert np.abs(expected["int8"] - expected["fp32"]).max() > 5 * ROUNDING  # an exchange would show
    assert [answer["id"] for answer in told["streamed"]] == ["0", "1", "2"]


def test_tritons_client_sees_the_tensors_of_a_model(triton: dict[str, Any]) -> None:
    assert triton["encoder"]["ready"] == [True, True]
    metadata, config = triton["encoder"]["metadata"], triton["encoder"]["config"]["config"]
    shape = ["-1", "-1"]
    assert metadata["inputs"] == [
        {"name": name, "datatype": "INT64", "shape": shape} for name in ("input_ids", "attention_mask")
    ]
    assert metadata["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": ["-1", "384"]}]
    assert (config["platform"], config.get("max_batch_size", 0)) == ("dskd_plain_graph", 0)
    assert "inputs: attention_mask missing" in triton["encoder"]["refusal"]
    (statistics,) = triton["direction"]["statistics"]["model_stats"]
    assert (statistics["inference_count"], statistics["inference_stats"]["fail"]["count"]) == ("6", "1")


def on_threads(work: Callable[[int], None]) -> None:
    """Does `work` in as many threads as there are clients; raises what the first that fails raises."""
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(work, range(THREADS)):
            pass


def test_every_answer_is_that_of_the_graph_it_names_while_modes_are_switched(
    daemon: DaemonProcess, client: Client, encoder: Served
) -> None:
    expected = {mode: encoder.expected(mode) for mode in MODES}
    is_over, seen = threading.Event(), {mode: [0] * THREADS for mode in MODES}

    def ask(thread: int) -> None:
        choice = random.Random(thread)
        with grpc.insecure_channel(daemon.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            while not is_over.is_set():
                number = choice.randrange(len(encoder.inputs))
                mode, outputs = Client(channel).infer("encoder", encoder.inputs[number])
                np.testing.assert_allclose(outputs["embedding"], expected[mode][number], atol=ROUNDING)
                seen[mode][thread] += 1

    def switch() -> None:
        try:
            for number in range(SWITCHES):
                client.switch("encoder", ("fp32", "int8")[number % 2])
        finally:
            is_over.set()

    switching = threading.Thread(target=switch)
    switching.start()
    on_threads(ask)
    switching.join()
    assert all(sum(counts) > THREADS for counts in seen.values()), seen
    history = client.control.GetHistory(control_pb2.GetHistoryRequest(model="encoder", limit=SWITCHES)).entries
    assert {(entry.kind, entry.outcome) for entry in history} == {("switch", "committed")}


def test_a_batch_mixes_up_no_answers(daemon: DaemonProcess, client: Client, encoder: Served) -> None:
    """The scales of dynamic INT8 are of a whole batch, so that answers differ from those to single requests a little:
    each must be nearer to its own than to that of any other input.
    """
    expected = {mode: np.concatenate(encoder.expected(mode)) for mode in MODES}
    before = client.control.GetStatus(control_pb2.GetStatusRequest(model="batched")).models[0]

    def ask(thread: int) -> None:
        choice = random.Random(thread)
        for _ in range(12):
            number, mode = choice.randrange(len(encoder.inputs)), choice.choice(list(MODES))
            served, outputs = client.infer("batched", encoder.inputs[number], precision=mode)
            assert served == mode
            distances = np.linalg.norm(expected[mode] - outputs["embedding"], axis=1)
            assert distances.argmin() == number
            if mode == "fp32":
                assert distances[number] < ROUNDING

    on_threads(ask)
    after = client.control.GetStatus(control_pb2.GetStatusRequest(model="batched")).models[0]
    assert sum(mode.tokens for mode in after.modes) - sum(mode.tokens for mode in before.modes) == 12 * THREADS
    (statistics,) = client.inference.ModelStatistics(statistics_pb2.ModelStatisticsRequest(name="batched")).model_stats
    assert statistics.execution_count < 12 * THREADS / 2


def test_a_damaged_int8_set_is_caught_and_served_in_fp32(encoder: Served, tmp_path: Path) -> None:
    damaged = with_damaged_int8(encoder.store, tmp_path / "damaged")
    monitor = {"share": 1.0, "time_share": 1.0}
    table = model(damaged, monitor=monitor, proof={"min_sqnr_db": -200.0, "min_agreement": 0.0})
    expected = encoder.expected("fp32")
    with daemon_process({"encoder": table}) as daemon, grpc.insecure_channel(daemon.start().target) as channel:
        client, served = Client(channel), [""]
        events = client.control.WatchEvents(control_pb2.WatchEventsRequest(), timeout=60)
        events.initial_metadata()
        while served[-1] != "fp32":
            assert len(served) < 2000
            number = len(served) % len(encoder.inputs)
            mode, outputs = client.infer("encoder", encoder.inputs[number])
            served.append(mode)
        np.testing.assert_allclose(outputs["embedding"], expected[number], atol=ROUNDING)
        assert any(event.kind == "fallback.committed" for event in events)
        events.cancel()
        (newest, *_) = client.control.GetHistory(control_pb2.GetHistoryRequest()).entries
        assert (newest.kind, newest.actor, newest.outcome) == ("fallback", "monitor", "committed")
        assert newest.reason.startswith("int8 healthy -> tripped: "), newest.reason
        assert "mean noise-to-signal ratio" in newest.reason


def test_the_last_committed_mode_serves_after_a_crash(encoder: Served) -> None:
    with daemon_process({"encoder": model(encoder.store)}) as daemon:
        with grpc.insecure_channel(daemon.start().target) as channel:
            assert Client(channel).infer("encoder", encoder.inputs[0])[0] == "int8"
            Client(channel).switch("encoder", "fp32")
        daemon.kill()
        daemon.socket.unlink(missing_ok=True)
        with grpc.insecure_channel(daemon.start().target) as channel:
            assert Client(channel).infer("encoder", encoder.inputs[0])[0] == "fp32"
            status = Client(channel).control.GetStatus(control_pb2.GetStatusRequest()).models[0]
            assert (status.generation, status.mode) == (1, MODES["fp32"])
