"""A real quantized model against transformers' own reading of the same file (tests/golden/make_golden.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN

from dskquant.engines.onnxruntime import ONNXRuntimeEngine
from dskquant.engines.openvino.stateful import StatefulModel
from dskquant.engines.protocol import CompileOptions
from dskquant.forward import slot_batch_of
from dskquant.modes import PrecisionMode
from dskquant.store import IR_XML, StoreManifest

TOLERANCE = 1e-3
FP32 = PrecisionMode.FP32


@pytest.fixture(scope="module")
def model(smollm2_store: Path) -> StatefulModel:
    return StatefulModel(smollm2_store / IR_XML)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "smollm2.npz"))


def test_logits_are_those_of_transformers(model: StatefulModel, golden: dict[str, np.ndarray]) -> None:
    model.reset()
    assert_logits(model.run(golden["prompt"].tolist()), golden)


def test_logits_of_the_second_engine_are_those_of_transformers(
    smollm2_store: Path, golden: dict[str, np.ndarray]
) -> None:
    graph = ONNXRuntimeEngine().compile(smollm2_store, {FP32}, CompileOptions())
    graph.bind(graph.allocate_cache(1))
    tokens = golden["prompt"].tolist()
    batch = slot_batch_of([tuple(tokens)], 0, len(tokens), [range(len(tokens))], FP32)
    assert_logits(graph.run(batch), golden)
    graph.close()


def assert_logits(found: np.ndarray, golden: dict[str, np.ndarray]) -> None:
    """Every 192nd column, and through the sum over all of them the rest too."""
    logits = found.astype(np.float64)
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() <= TOLERANCE
    assert np.array_equal(logits.argmax(axis=1), golden["argmax"])
    assert np.abs(np.log(np.exp(logits).sum(axis=1)) - golden["logsumexp"]).max() <= TOLERANCE


@pytest.mark.parametrize("chat", [0, 1])
def test_greedy_answers_are_those_of_transformers(
    model: StatefulModel, golden: dict[str, np.ndarray], chat: int
) -> None:
    model.reset()
    wanted = golden[f"answer{chat}"].tolist()
    answer: list[int] = []
    tokens = golden[f"chat{chat}"].tolist()
    while len(answer) < len(wanted):
        answer.append(int(model.run(tokens)[-1].argmax()))
        tokens = answer[-1:]
    assert len(wanted) == 64
    assert answer == wanted


def test_the_manifest_tells_what_the_model_is(smollm2_store: Path) -> None:
    """Sizes as published for SmolLM2-135M."""
    manifest = StoreManifest.read(smollm2_store)
    assert manifest.model_id == "SmolLM2-135M-Instruct.Q4_1"
    assert (manifest.architecture, manifest.dtype) == ("llama", "f32")
    assert (manifest.num_layers, manifest.hidden_size, manifest.intermediate_size) == (30, 576, 1536)
    assert (manifest.num_heads, manifest.num_kv_heads, manifest.head_dim) == (9, 3, 64)
    assert (manifest.vocab_size, manifest.context_length, manifest.parameters) == (49152, 8192, 134_515_008)
    assert manifest.bos_token_id == 1
    assert manifest.end_token_ids[0] == 2
