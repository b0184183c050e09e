"""`dskquant calibrate`: from a store and a text to a parameter set."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, HEAD_DIM, HEADS, KV_HEADS, PROMPT, weights_of
from safetensors.numpy import load_file

from dskquant import parameter_set, set_writer
from dskquant.bits import mean_bits
from dskquant.calibration.calibrate import CalibrationOptions, calibrate
from dskquant.calibration.layers import Method
from dskquant.calibration.moments import START_WEIGHT, passes, second_moments
from dskquant.calibration.selection import Sensitivity, residual_bits, with_residual, within_budget, within_noise
from dskquant.calibration.windows import read_text
from dskquant.cli import main
from dskquant.convert import ConvertOptions, convert
from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions, LinearUnit
from dskquant.errors import QuantError
from dskquant.forward import blocks_for, forward
from dskquant.modes import PrecisionMode
from dskquant.parameter_set import Codes, ParameterSet
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest
from dskquant.validation import validate

INT4, INT8, FP16, FP32 = PrecisionMode
ENGINE = load_engine("openvino")
EXACT = CompileOptions(kv_precision="f32", activation_group=0)
WINDOW = 128  # the context of the tiny models
WORDS = ("lake", "still", "and", "clear", "when", "old", "trees", "stood", "like", "people", "waiting", "for", "boat")


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration") / "store"
    convert(GOLDEN / "llama", directory, ConvertOptions(scheme=Scheme(group_size=32), golden=False), no_progress)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(" ".join(np.random.default_rng(5).choice(WORDS, 800)), encoding="utf-8")
    return path


def options(**changes: Any) -> CalibrationOptions:
    return CalibrationOptions(**({"scheme": Scheme(group_size=32), "tokens": 1024} | changes))


def calibrated(store: Path, text: Path, directory: Path, **changes: Any) -> ParameterSet:
    return calibrate(store, text, directory, options(**changes), ENGINE, no_progress).parameters


def bytes_of(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


# -- what is gathered ----------------------------------------------------------------------------------------------


def rms_norm(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6) * weight


def rotate(heads: np.ndarray) -> np.ndarray:
    """Rotary embedding in the half-rotated form (Su et al. 2021; transformers' modeling_llama.py)."""
    angles = np.arange(len(heads))[:, None] / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cosines, sines = (np.tile(part(angles), 2)[:, None] for part in (np.cos, np.sin))
    low, high = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
    return heads * cosines + np.concatenate([-high, low], axis=-1) * sines


def inputs_of_linears(tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """What every linear layer of the golden Llama reads, by a plain forward pass in float64."""
    weights = {name: values.astype(np.float64) for name, values in weights_of("llama").items()}
    read: dict[str, np.ndarray] = {}

    def linear(name: str, inputs: np.ndarray) -> np.ndarray:
        read[f"{name}.weight"] = inputs
        return inputs @ weights[f"{name}.weight"].T

    hidden = weights["model.embed_tokens.weight"][list(tokens)]
    hidden_mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in ("model.layers.0", "model.layers.1"):
        normed = rms_norm(hidden, weights[f"{layer}.input_layernorm.weight"])
        queries = rotate(linear(f"{layer}.self_attn.q_proj", normed).reshape(-1, HEADS, HEAD_DIM))
        keys = rotate(linear(f"{layer}.self_attn.k_proj", normed).reshape(-1, KV_HEADS, HEAD_DIM))
        values = linear(f"{layer}.self_attn.v_proj", normed).reshape(-1, KV_HEADS, HEAD_DIM)
        keys, values = (part.repeat(HEADS // KV_HEADS, axis=1) for part in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(HEAD_DIM) + hidden_mask
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, values).reshape(len(tokens), -1)
        hidden = hidden + linear(f"{layer}.self_attn.o_proj", attended)
        normed = rms_norm(hidden, weights[f"{layer}.post_attention_layernorm.weight"])
        gate = linear(f"{layer}.mlp.gate_proj", normed)
        gated = gate / (1 + np.exp(-gate)) * linear(f"{layer}.mlp.up_proj", normed)
        hidden = hidden + linear(f"{layer}.mlp.down_proj", gated)
    return read


def test_second_moments_are_those_of_a_plain_forward_pass(store: Path) -> None:
    windows = [tuple(PROMPT), tuple(reversed(PROMPT))]
    graph = ENGINE.compile_for_calibration(store, EXACT)
    graph.bind(graph.allocate_cache(blocks_for(len(PROMPT), ENGINE.block_size)))
    moments = second_moments(graph, windows, graph.units, ENGINE.block_size, no_progress)
    squares = second_moments(graph, windows, graph.units, ENGINE.block_size, no_progress, diagonal=True)
    read = [inputs_of_linears(window) for window in windows]
    assert sorted(name for unit in moments for name in unit) == sorted(read[0])
    for unit, found in moments.items():
        for name in unit:
            inputs = np.concatenate([each[name] for each in read])
            counts = np.tile([START_WEIGHT] + [1] * (len(PROMPT) - 1), len(windows))
            expected = (inputs.T * counts) @ inputs / counts.sum()
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * found.max())
            np.testing.assert_allclose(squares[unit], np.diag(expected), rtol=1e-3)


def test_layers_that_read_the_same_tensor_are_one_unit(store: Path) -> None:
    units = ENGINE.compile_for_calibration(store, EXACT).units
    kinds = [tuple(name.split(".")[-2] for name in unit) for unit in units]
    assert kinds == [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)] * 2


def test_moments_are_gathered_in_passes_that_fit_the_memory() -> None:
    columns = {("a",): 100, ("b",): 100, ("c",): 300, ("d",): 10}
    assert list(passes(columns, limit=100 * 100 * 4 * 2)) == [[("a",), ("b",)], [("c",)], [("d",)]]


def test_units_choose_between_base_and_residual_on_their_own(store: Path) -> None:
    """All or none of them is what INT8 and INT4 of the served graph are; one alone is in between."""
    graph = ENGINE.compile_for_calibration(store, EXACT, parameter_set.read(store / DEFAULT_PARAMETER_SET))
    served = ENGINE.compile(store, {INT4, INT8}, EXACT)
    for each in (graph, served):
        each.bind(each.allocate_cache(1))

    def logits(with_residual: Sequence[LinearUnit]) -> np.ndarray:
        graph.use_residual(with_residual)
        return next(forward(graph, PROMPT, INT4, block_size=ENGINE.block_size)).copy()

    for mode, units in ((INT4, ()), (INT8, graph.units)):
        expected = next(forward(served, PROMPT, mode, block_size=ENGINE.block_size))
        np.testing.assert_allclose(logits(units), expected, atol=1e-4)
    one = logits(graph.units[:1])
    assert np.abs(one - logits(())).max() > 1e-3
    assert np.abs(one - logits(graph.units)).max() > 1e-3


# -- the text --------------------------------------------------------------------------------------------------------


def test_the_end_of_the_text_is_held_out_and_the_seed_chooses_from_the_rest(store: Path, text: Path) -> None:
    read = read_text(store, text, 512, seed=1)
    assert [len(window) for window in (*read.calibration, *read.held_out)] == [WINDOW] * (4 + len(read.held_out))
    whole = text.read_bytes()  # a byte is a token of this tokenizer
    everything = [tuple(whole[start : start + WINDOW]) for start in range(0, len(whole) - WINDOW + 1, WINDOW)]
    spelled = [bytes(window) for window in everything]
    tokens_of = dict(zip(spelled, everything, strict=True))
    assert len(tokens_of) == len(everything)
    assert len(read.held_out) == len(everything) // 5
    assert not set(read.calibration) & set(read.held_out)
    assert read_text(store, text, 512, seed=1) == read
    assert read_text(store, text, 512, seed=2).calibration != read.calibration
    assert read_text(store, text, 512, seed=2).held_out == read.held_out
    assert read_text(store, text, 1 << 20, seed=1).tokens == (len(everything) - len(read.held_out)) * WINDOW
    assert read.sha256 == hashlib.sha256(whole).hexdigest()


# -- the choice of layers ------------------------------------------------------------------------------------------

SCHEMES = {f"layer{index}": TensorScheme(Role.LINEAR, (64, 64 << index), 32, False) for index in range(4)} | {
    "embedding": TensorScheme(Role.EMBEDDING, (256, 64), 0, False)
}


def sensitivities(kls: Sequence[float]) -> list[Sensitivity]:
    units = [(f"layer{index}",) for index in range(4)]
    return [Sensitivity(unit, kl, residual_bits(unit, SCHEMES)) for unit, kl in zip(units, kls, strict=True)]


def manifest_of(store: Path) -> StoreManifest:
    return StoreManifest.read(store)


def test_residual_bits_are_what_mean_bits_grow_by(store: Path) -> None:
    manifest = manifest_of(store)
    bare = mean_bits(with_residual(SCHEMES, ()).values(), manifest).int4
    for index in range(4):
        unit = (f"layer{index}",)
        grown = mean_bits(with_residual(SCHEMES, [unit]).values(), manifest).int4
        assert (grown - bare) * manifest.parameters == pytest.approx(residual_bits(unit, SCHEMES))
        # 4 bits a weight, and a scale and a zero-point of 24 bits for every 32
        assert residual_bits(unit, SCHEMES) == (64 * (64 << index)) * 4.75


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_budget_is_used_up_and_never_exceeded(store: Path, share: float) -> None:
    manifest, measured = manifest_of(store), sensitivities([0.1, 0.5, 0.3, 0.2])
    bare = mean_bits(with_residual(SCHEMES, ()).values(), manifest).int4
    budget = bare + share * (mean_bits(SCHEMES.values(), manifest).int8 - bare) + 1e-9
    chosen = within_budget(measured, SCHEMES, manifest, budget)
    taken = mean_bits(with_residual(SCHEMES, chosen).values(), manifest).int4
    assert taken <= budget
    left_over = [item for item in measured if item.unit not in chosen]
    assert all(taken + item.bits / manifest.parameters > budget for item in left_over)


def test_layers_are_taken_by_what_they_are_worth_for_their_bits(store: Path) -> None:
    """Layer 1 is twice as large as layer 0 and takes away three times the noise."""
    manifest, measured = manifest_of(store), sensitivities([0.1, 0.3, 0.1, 0.1])
    bare = mean_bits(with_residual(SCHEMES, ()).values(), manifest).int4
    enough_for_one = bare + residual_bits(("layer1",), SCHEMES) / manifest.parameters + 1e-9
    assert within_budget(measured, SCHEMES, manifest, enough_for_one) == [("layer1",)]


def test_the_fewest_layers_are_taken_that_reach_a_noise() -> None:
    measured = sensitivities([0.1, 0.4, 0.4, 0.4])
    worth = {item.unit: item.kl for item in measured}

    def measure(units: Sequence[LinearUnit]) -> float:
        return 1.3 - sum(worth[unit] for unit in units)

    # by worth: layer1 0.4/2, layer0 0.1/1 and layer2 0.4/4 alike, layer3 0.4/8
    assert within_noise(measured, measure, 2.0) == []
    assert within_noise(measured, measure, 0.9001) == [("layer1",)]
    assert within_noise(measured, measure, 0.75) == [("layer1",), ("layer0",), ("layer2",)]
    with pytest.raises(QuantError, match=r"out of reach; with the residual plane everywhere it is 0\.0000"):
        within_noise(measured, measure, -0.1)


# -- the whole way ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(store: Path, text: Path, tmp_path: Path) -> None:
    first, second, other = (
        calibrated(store, text, tmp_path / name, seed=seed, tokens=512, budget=6.5)
        for name, seed in (("first", 3), ("second", 3), ("other", 4))
    )
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")
    assert first.hash == second.hash != other.hash


@pytest.mark.parametrize(("method", "share"), [(Method.GPTQ, 0.6), (Method.SEARCH, 0.9)])
def test_a_calibrated_set_keeps_every_rule_and_is_less_noisy_than_rounding(
    store: Path, text: Path, tmp_path: Path, method: Method, share: float
) -> None:
    made = calibrated(store, text, tmp_path / "set", method=method)
    assert made == parameter_set.read(tmp_path / "set")
    validate(made, store)
    assert made.provenance["method"] == method.value
    kl = {parameters.hash: kl_on(store, text, parameters) for parameters in (made, default_set(store))}
    assert kl[made.hash] < share * kl[default_set(store).hash]


def default_set(store: Path) -> ParameterSet:
    return parameter_set.read(store / DEFAULT_PARAMETER_SET)


def kl_on(store: Path, text: Path, parameters: ParameterSet, mode: PrecisionMode = INT4) -> float:
    """Mean KL(FP32 || mode) over the held-out windows, in float64."""
    graphs = [ENGINE.compile(store, {FP32}, CompileOptions()), ENGINE.compile(store, {mode}, SERVED, parameters)]
    total: list[np.ndarray] = []
    for window in read_text(store, text, 512, seed=0).held_out:
        logs = []
        for graph, its_mode in zip(graphs, (FP32, mode), strict=True):
            graph.bind(graph.allocate_cache(blocks_for(len(window), ENGINE.block_size)))
            pieces = [piece.copy() for piece in forward(graph, window, its_mode, block_size=ENGINE.block_size)]
            logits = np.concatenate(pieces).astype(np.float64)
            logs.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        total.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1))
    return float(np.concatenate(total).mean())


SERVED = CompileOptions()


def test_the_expected_noise_is_what_the_served_set_shows_on_the_held_out_text(
    store: Path, text: Path, tmp_path: Path
) -> None:
    made = calibrated(store, text, tmp_path / "set", budget=6.5)
    assert any(scheme.always_residual for scheme in made.tensors.values())
    for mode in (INT4, INT8):
        assert made.expected_kl[mode] == pytest.approx(kl_on(store, text, made, mode), rel=1e-3, abs=1e-6)


def test_scales_alone_lead_to_the_codes_that_were_measured(store: Path, text: Path, tmp_path: Path) -> None:
    whole = calibrated(store, text, tmp_path / "whole", method=Method.SEARCH)
    scales = calibrated(store, text, tmp_path / "scales", method=Method.SEARCH, codes=Codes.DERIVED)
    assert sorted(path.name for path in (tmp_path / "scales").iterdir()) == [
        "manifest.json",
        "planes-00001.safetensors",
    ]
    assert not any(name.endswith(".codes") for name in load_file(tmp_path / "scales" / "planes-00001.safetensors"))
    completed = set_writer.complete(scales, store, tmp_path / "completed", no_progress)
    arrays, expected = (load_file(each.directory / "planes-00001.safetensors") for each in (completed, whole))
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


def test_the_command_prints_what_it_made(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "set"
    words = ["calibrate", str(store), "--data", str(text), "-o", str(target), "--group-size", "32", "--int8-plane"]
    assert main([*words, "--tokens", "512", "--budget", "6.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    made = parameter_set.read(target)
    validate(made, store)
    assert report["hash"] == made.hash
    assert report["bits_per_weight"] <= 6.5
    assert report["expected_kl"] == {mode.value: kl for mode, kl in made.expected_kl.items()}
    assert [item["layers"] for item in report["sensitivities"]] == [
        list(unit) for unit in ENGINE.compile_for_calibration(store, EXACT).units
    ]
    chosen = {name for item in report["sensitivities"] if item["always_residual"] for name in item["layers"]}
    assert chosen == {name for name, scheme in made.tensors.items() if scheme.always_residual}
    assert report["provenance"] == {
        "method": "gptq",
        "seed": 0,
        "tokens": 512,
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "budget": 6.5,
    }
    assert made.provenance["sensitivities"].keys() == {" ".join(item["layers"]) for item in report["sensitivities"]}


def test_a_noise_that_is_asked_for_is_reached(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", str(store), "--data", str(text), "--group-size", "32", "--tokens", "512"]
    bare = calibrated(store, text, tmp_path / "bare", tokens=512).expected_kl
    wanted = (bare[INT4] * bare[INT8]) ** 0.5
    assert main([*words, "-o", str(tmp_path / "set"), "--max-kl", str(wanted)]) == 0
    assert "what the residual plane of each layer is worth" in capsys.readouterr().out
    made = parameter_set.read(tmp_path / "set")
    assert made.expected_kl[INT4] <= wanted
    assert 0 < sum(scheme.always_residual for scheme in made.tensors.values()) < 14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--budget", "3"], r"--budget 3: out of reach; from [56]\.\d\d to \d\.\d\d bits", id="budget"),
        pytest.param(["--max-kl", "1e-9"], r"--max-kl 1e-09: out of reach; .* it is 0\.0", id="max-kl"),
        pytest.param(["--group-size", "64"], r"group size 64 does not divide rows of 96; allowed: 32, 0", id="group"),
        pytest.param(["--scales-only"], r"--scales-only: .* use --method search", id="scales-only"),
        pytest.param(["--data", "short"], r"short\.txt: too short: 99 tokens; at least 256 are needed", id="short"),
        pytest.param(["--data", "missing"], r"missing\.txt: No such file", id="missing"),
        pytest.param(["--output", "taken"], r"taken exists already", id="taken"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("a" * 99, encoding="utf-8")
    (tmp_path / "taken").mkdir()
    places = {"short": "short.txt", "missing": "missing.txt", "taken": "taken"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    words = ["calibrate", str(store), "--data", str(text), "--output", str(tmp_path / "set"), "--group-size", "32"]
    assert main([*words, "--tokens", "256", *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dskquant calibrate: ")
    assert re.search(message, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "taken"]


# -- the real model --------------------------------------------------------------------------------------------------


def test_smollm2_is_clearly_less_noisy_with_few_tokens_and_the_search_alone(
    smollm2_store: Path, tmp_path: Path
) -> None:
    """Error feedback does better still, but takes minutes."""
    prose = Path(__file__).parent.parent / "LICENSE"
    made = calibrate(
        smollm2_store, prose, tmp_path / "set", CalibrationOptions(Method.SEARCH, tokens=1024), ENGINE, no_progress
    ).parameters
    kl = {parameters.hash: kl_on(smollm2_store, prose, parameters) for parameters in (made, default_set(smollm2_store))}
    assert kl[made.hash] < 0.7 * kl[default_set(smollm2_store).hash]
    assert made.expected_kl[INT4] == pytest.approx(kl[made.hash], rel=0.01)
    assert made.expected_kl[INT8] < 0.15 * made.expected_kl[INT4]
