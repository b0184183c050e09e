"""Modes of a real transformer: all-MiniLM-L6-v2."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.minilm import LAYERS, encoded, write_minilm
from tests.plain_models import WORDS, saved

from dskquant.cli import main
from dskquant.modes import PrecisionMode
from dskquant.plain.load import PLAIN_ENGINE_NAMES, load_plain_graph
from dskquant.plain.store import PlainManifest

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
"""Of these sentences, as the documentation of sentence-transformers has them for this model."""

LINEAR = 6 * LAYERS  # query, key, value, output, and two of the feed-forward network
FP32, FP16, INT8, INT4 = PrecisionMode.FP32, PrecisionMode.FP16, PrecisionMode.INT8, PrecisionMode.INT4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    random = np.random.default_rng(0)
    data = saved(directory / "sentences.npz", encoded([" ".join(random.choice(WORDS, 8)) for _ in range(8)]))
    path = write_minilm(directory / "minilm.onnx")
    assert main(["convert", str(path), "-o", str(directory / "store"), "--data", str(data), "--quiet"]) == 0
    return directory / "store"


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_the_graph_is_the_published_encoder(store: Path) -> None:
    embeddings = onnxruntime.InferenceSession(store / "fp32.onnx").run(None, encoded(SENTENCES))[0]
    np.testing.assert_allclose(embeddings @ embeddings.T, SIMILARITIES, atol=1e-4)


def test_a_transformer_has_dynamic_int8_and_blocks_of_int4(store: Path) -> None:
    manifest = PlainManifest.read(store)
    assert manifest.graphs.keys() == {FP32, FP16, INT8, INT4}
    assert manifest.batch_axis == 0
    assert manifest.graphs[INT8].method == "dynamic"
    assert operators(store / "int8.onnx")["MatMulInteger"] == LINEAR
    assert operators(store / "int4.onnx")["MatMulNBits"] == LINEAR
    noise = {mode: graph.noise.sqnr_db for mode, graph in manifest.graphs.items() if graph.noise}
    assert noise[FP16] > noise[INT8] > 15
    assert noise[INT4] > 10


@pytest.mark.parametrize("engine", PLAIN_ENGINE_NAMES)
@pytest.mark.parametrize("mode", [FP32, FP16, INT8, INT4])
def test_every_mode_on_every_engine_keeps_the_sentences_apart(store: Path, mode: PrecisionMode, engine: str) -> None:
    graph = load_plain_graph(engine, store / PlainManifest.read(store).graphs[mode].file, threads=1)
    embeddings = graph.run(encoded(SENTENCES))["embedding"]
    np.testing.assert_allclose(embeddings @ embeddings.T, SIMILARITIES, atol={FP32: 1e-4, FP16: 5e-3}.get(mode, 0.12))
