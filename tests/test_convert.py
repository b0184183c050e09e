"""What `dskquant convert` leaves on disk, what it refuses, and that a store appears complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, PROMPT, golden_logits, weights_of
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from dskquant import golden, parameter_set
from dskquant.cli import main
from dskquant.convert import ConvertOptions, convert
from dskquant.engines.openvino.stateful import StatefulModel
from dskquant.errors import QuantError, SchemeError, SourceError, StoreError
from dskquant.floats import from_float32, to_float32
from dskquant.scheme import Scheme
from dskquant.sources import open_source
from dskquant.staging import stage_weights
from dskquant.store import DEFAULT_PARAMETER_SET, IR_XML, StoreManifest, file_sha256
from dskquant.version import VERSION

PER_CHANNEL = ConvertOptions(scheme=Scheme(group_size=0))
REPLACING = ConvertOptions(scheme=Scheme(group_size=0), replace=True)
Weights = dict[str, Any]


def silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, change: Callable[[Weights], None]) -> None:
    weights: Weights = {name: np.array(values) for name, values in weights_of("llama").items()}
    change(weights)
    save_file(weights, directory / "model.safetensors")


def snapshot(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): file_sha256(path) for path in directory.rglob("*") if path.is_file()}


# --- what is written


def test_a_store_holds_all_that_a_daemon_needs(tmp_path: Path) -> None:
    store = tmp_path / "deep" / "store"
    conversion = convert(GOLDEN / "qwen2", store, PER_CHANNEL, silent)
    manifest = StoreManifest.read(store)
    assert manifest == conversion.manifest
    assert (manifest.model_id, manifest.architecture, manifest.dtype) == ("qwen2", "qwen2", "f16")
    assert (manifest.num_layers, manifest.num_heads, manifest.num_kv_heads, manifest.head_dim) == (2, 4, 2, 16)
    assert (manifest.context_length, manifest.vocab_size) == (128, 256)
    assert manifest.parameters == 94784  # total_parameters of its model.safetensors.index.json
    assert (manifest.bos_token_id, manifest.end_token_ids) == (1, (2,))
    assert manifest.source == {"kind": "huggingface", "name": "qwen2"}
    assert {path.name for path in store.iterdir()} == set(manifest.sha256) | {"manifest.json", "parameter_sets"}
    assert {"golden.safetensors", "openvino_model.bin", "tokenizer.json"} < set(manifest.sha256)
    for name, digest in manifest.sha256.items():
        assert file_sha256(store / name) == digest
    assert parameter_set.read(store / DEFAULT_PARAMETER_SET).weights_sha256 == manifest.weights_sha256
    assert json.loads((store / "config.json").read_text()) == json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    assert Tokenizer.from_file(str(store / "tokenizer.json")).encode("a").ids


def test_several_end_tokens_and_a_configuration_without_generation_config(tmp_path: Path, llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    edit_config(llama, eos_token_id=[2, 7], bos_token_id=None)
    manifest = convert(llama, tmp_path / "store", PER_CHANNEL, silent).manifest
    assert (manifest.bos_token_id, manifest.end_token_ids) == (None, (2, 7))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tools", "template": "x"},
                        {"name": "default", "template": "{{ messages }}"},
                    ]
                }
            ),
        ),
    ],
)
def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path, llama: Path, file: str, content: str) -> None:
    (llama / file).write_text(content)
    convert(llama, tmp_path / "store", PER_CHANNEL, silent)
    assert (tmp_path / "store" / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-3), ("bf16", 0.5)])
def test_weights_can_be_stored_in_another_dtype(tmp_path: Path, dtype: str, tolerance: float) -> None:
    options = ConvertOptions(dtype=dtype, scheme=Scheme(group_size=0))
    manifest = convert(GOLDEN / "llama", tmp_path / "store", options, silent).manifest
    logits = StatefulModel(tmp_path / "store" / "openvino_model.xml").run(PROMPT)
    assert manifest.dtype == dtype
    assert np.abs(logits - golden_logits("llama")).max() <= tolerance


def test_a_sliding_window_caps_the_context_and_says_so(tmp_path: Path) -> None:
    conversion = convert(GOLDEN / "mistral", tmp_path / "store", PER_CHANNEL, silent)
    assert conversion.manifest.context_length == 64
    assert "64 tokens" in conversion.notes[0]
    assert convert(GOLDEN / "llama", tmp_path / "other", PER_CHANNEL, silent).notes == ()


def test_a_window_that_a_qwen_does_not_use_caps_nothing(tmp_path: Path, llama: Path) -> None:
    edit_config(llama, model_type="qwen3", sliding_window=16, use_sliding_window=False)
    assert open_source(llama).decoder.context_length == 128
    edit_config(llama, use_sliding_window=True)
    assert open_source(llama).decoder.context_length == 16


def test_a_mistral_that_names_no_window_has_that_of_transformers(llama: Path) -> None:
    edit_config(llama, model_type="mistral", max_position_embeddings=32768)
    assert open_source(llama).decoder.context_length == 4096
    edit_config(llama, sliding_window=None)
    assert open_source(llama).decoder.context_length == 32768


def test_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    source = open_source(GOLDEN / "llama")
    weights = stage_weights(source, ["model.embed_tokens.weight"], None, tmp_path / "scratch", silent)
    values = weights["model.embed_tokens.weight"].values
    assert np.shares_memory(values, source.tensor("model.embed_tokens.weight").mapped)
    assert (tmp_path / "scratch").stat().st_size == 0


def test_float_formats_round_to_nearest_even() -> None:
    """bfloat16 keeps the upper half of a float32: 1 + 2^-8 lies halfway between 1 and 1 + 2^-7."""
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20], np.float32)
    rounded = to_float32(from_float32(values, "bf16"), "bf16")
    assert rounded.tolist() == [1.0, 1.0, 1 + 2**-6, -1 - 2**-7]
    assert from_float32(np.array([70000.0], np.float32), "f16").tolist() == [np.inf]


def test_every_file_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        convert(GOLDEN / "llama", tmp_path / "store", PER_CHANNEL, silent)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


# --- the reference's answers to the golden prompts


def test_the_reference_answers_the_golden_prompts(tmp_path: Path) -> None:
    convert(GOLDEN / "llama", tmp_path / "store", PER_CHANNEL, silent)
    kept = golden.read(tmp_path / "store")
    model = StatefulModel(tmp_path / "store" / IR_XML)
    plain = []
    for prompt in kept.prompts:
        model.reset()
        plain.append(model.run(prompt)[-golden.SCORED :])
    assert kept.reference is not None
    assert np.abs(kept.reference - np.concatenate(plain)).max() <= 1e-3


@pytest.mark.parametrize(
    ("limit", "wanted", "why"), [(2 << 30, False, "as asked for"), (400_000, True, "0.0 GiB, more than")]
)
def test_without_the_answers_of_the_reference_a_note_tells_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, wanted: bool, why: str
) -> None:
    """The tiny model has 107,072 weights: 428,288 bytes in FP32."""
    monkeypatch.setattr("dskquant.convert.GOLDEN_LIMIT", limit)
    options = ConvertOptions(scheme=Scheme(group_size=0), golden=wanted)
    conversion = convert(GOLDEN / "llama_tied_bias", tmp_path / "store", options, silent)
    (note,) = conversion.notes
    assert why in note
    assert "the most exact one proven so far" in note
    assert "golden.safetensors" not in conversion.manifest.sha256
    assert golden.read(tmp_path / "store").reference is None


@pytest.mark.parametrize(
    "damaged", [{"other": np.zeros((96, 256), np.float32)}, {"logits": np.zeros((95, 256), np.float32)}]
)
def test_answers_that_do_not_fit_the_prompts_are_refused(tmp_path: Path, damaged: Weights) -> None:
    convert(GOLDEN / "llama", tmp_path / "store", PER_CHANNEL, silent)
    save_file(damaged, tmp_path / "store" / "golden.safetensors")
    with pytest.raises(StoreError, match=r"golden\.safetensors: no logits of 96 positions"):
        golden.read(tmp_path / "store")


def test_a_reference_that_answers_nonsense_is_refused(tmp_path: Path, llama: Path) -> None:
    """Finite weights whose products are not: 3e38 is nearly the largest float32."""
    edit_weights(llama, lambda weights: weights.update({"model.norm.weight": np.full(64, 3e38, np.float32)}))
    with pytest.raises(QuantError, match="golden prompts are not finite"):
        convert(llama, tmp_path / "store", PER_CHANNEL, silent)
    assert list(tmp_path.iterdir()) == [llama]


# --- what is refused


def nan_weight(weights: Weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


def missing_weight(weights: Weights) -> None:
    del weights["model.layers.1.self_attn.v_proj.weight"]


def unknown_weight(weights: Weights) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float16)


def misshapen_weight(weights: Weights) -> None:
    weights["model.norm.weight"] = np.zeros(65, np.float16)


def transposed_weight(weights: Weights) -> None:
    weights["model.layers.0.mlp.down_proj.weight"] = np.zeros((96, 64), np.float16)


def whole_numbers(weights: Weights) -> None:
    weights["lm_head.weight"] = np.zeros((256, 64), np.int8)


def too_large_for_f16(weights: Weights) -> None:
    weights["lm_head.weight"] = np.full((256, 64), 1e6, np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nan_weight, "model.safetensors: tensor model.layers.1.mlp.up_proj.weight: holds NaN or infinite values"),
        (missing_weight, "1 tensors are missing: model.layers.1.self_attn.v_proj.weight"),
        (unknown_weight, "not part of this architecture: model.layers.0.self_attn.q_proj.bias"),
        (misshapen_weight, "tensor model.norm.weight: shape [65], expected [64]"),
        (transposed_weight, "model.layers.0.mlp.down_proj.weight: shape [96, 64], expected [64, 96]"),
        (whole_numbers, "tensor lm_head.weight: dtype I8; supported: F16, BF16, F32"),
    ],
)
def test_unusable_weights_are_refused_by_name(
    tmp_path: Path, llama: Path, damage: Callable[[Weights], None], message: str
) -> None:
    edit_weights(llama, damage)
    refuse(llama, tmp_path, message)


def test_a_scheme_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(SchemeError) as refusal:
        convert(llama, tmp_path / "store", ConvertOptions(scheme=Scheme(group_size=64)), silent)
    assert str(refusal.value) == (
        "model.layers.0.mlp.down_proj.weight: group size 64 does not divide rows of 96; "
        "what divides all rows of this model: 32, 0 (0: per channel)"
    )
    assert list(tmp_path.iterdir()) == [llama]


def test_rows_of_an_odd_length_are_refused(tmp_path: Path, llama: Path) -> None:
    edit_config(llama, intermediate_size=95)
    with pytest.raises(SchemeError, match=r"0\.mlp\.down_proj\.weight: rows of 95 weights: an odd number"):
        convert(llama, tmp_path / "store", PER_CHANNEL, silent)


def test_a_pattern_that_matches_no_layer_is_refused(tmp_path: Path) -> None:
    options = ConvertOptions(scheme=Scheme(group_size=0, int8_layers=("*.v_proj.weight", "*.w2.weight")))
    with pytest.raises(SchemeError, match=r"no linear layer matches '\*\.w2\.weight'"):
        convert(GOLDEN / "llama", tmp_path / "store", options, silent)


def test_values_that_do_not_fit_the_dtype_are_refused(tmp_path: Path, llama: Path) -> None:
    edit_weights(llama, too_large_for_f16)
    refuse(llama, tmp_path, "tensor lm_head.weight: values too large for f16", dtype="f16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is unknown; known: llama, mistral, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unknown; known: silu, swish"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type 'dynamic' is unknown"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
    ],
)
def test_configurations_that_are_not_understood_name_file_and_key(
    tmp_path: Path, llama: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(llama, **changes)
    refuse(llama, tmp_path, message, str(llama / "config.json"))


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def index_to_elsewhere(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def index_without_shard(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_lies(directory: Path) -> None:
    index = {"weight_map": {"model.norm.bias": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"')


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def damaged_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')


def tokenizer_of_another_model(directory: Path) -> None:
    """Its tokens begin where the 256 of the model end."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {token: 300 + id_ for token, id_ in tokenizer["model"]["vocab"].items()}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def tokenizer_that_cannot_encode(directory: Path) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"] |= {"unk_token": "<unk>", "vocab": {"!": 0}}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "lie outside the"),
        (only_a_pickle, "only safetensors are read, never pickles"),
        (index_to_elsewhere, "'../secret.safetensors' is not a file beside it"),
        (index_without_shard, "model-00001-of-00002.safetensors: missing"),
        (index_that_lies, "tensor model.norm.bias, which model.safetensors.index.json places here, is missing"),
        (damaged_config, "config.json: cannot be read"),
        (no_tokenizer, "tokenizer.json: missing"),
        (damaged_tokenizer, "its tokenizer cannot be used"),
        (tokenizer_that_cannot_encode, "its tokenizer cannot be used: Unk token `<unk>` not found"),
        (tokenizer_of_another_model, "its tokenizer gives token 5"),
    ],
)
def test_damaged_directories_are_refused(
    tmp_path: Path, llama: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(llama)
    refuse(llama, tmp_path, message)


@pytest.mark.parametrize("name", ["nothing", "empty", "text.txt", "model.safetensors"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("Dear reader")
    shutil.copy(GOLDEN / "llama" / "model.safetensors", tmp_path)
    refuse(tmp_path / name, tmp_path / "there", str(tmp_path / name))


def test_an_openvino_model_is_checked_before_it_is_taken(tmp_path: Path) -> None:
    export = Path(shutil.copytree(GOLDEN / "llama_openvino", tmp_path / "export"))
    refuse(export, tmp_path, "taken as it is, in f16", dtype="f32")
    edit_config(export, num_hidden_layers=3)
    refuse(export, tmp_path, "4 ReadValue operations, expected 6")
    (export / "openvino_model.bin").write_bytes(b"")
    refuse(export, tmp_path, "openvino_model.xml: not a readable OpenVINO IR")


def test_an_openvino_model_with_nan_is_refused(tmp_path: Path) -> None:
    export = Path(shutil.copytree(GOLDEN / "llama_openvino", tmp_path / "export"))
    weights = bytearray((export / "openvino_model.bin").read_bytes())
    half = len(weights) // 2
    weights[half : half + 64] = b"\xff" * 64  # not a number in every format, at every alignment
    (export / "openvino_model.bin").write_bytes(weights)
    refuse(export, tmp_path, "holds NaN or infinite values")


def refuse(source: Path, root: Path, *messages: str, dtype: str | None = None) -> None:
    """Converting fails with all of `messages` and leaves nothing behind."""
    store = root / "store"
    with pytest.raises(QuantError) as refusal:
        convert(source, store, ConvertOptions(dtype=dtype, scheme=Scheme(group_size=0)), silent)
    for message in messages:
        assert message in str(refusal.value)
    assert not store.exists()
    assert not list(root.glob(".store*"))


# --- complete or not at all


@pytest.mark.parametrize("stage", ["weights", "writing the model", "hashing", "quantized", "golden prompts"])
def test_ctrl_c_at_any_stage_leaves_nothing(tmp_path: Path, stage: str) -> None:
    def interrupted(current: str, done: int, total: int) -> None:
        if current == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(GOLDEN / "llama", tmp_path / "store", PER_CHANNEL, interrupted)
    assert list(tmp_path.iterdir()) == []


TERMINATED = """
import signal, sys
from pathlib import Path
from dskquant import golden
from dskquant.cli import main

def create(store, engine):
    assert list(store.iterdir())
    signal.raise_signal(signal.SIGTERM)

golden.create = create
before = signal.getsignal(signal.SIGTERM)
code = main(["convert", sys.argv[1], "-o", sys.argv[2], "--group-size", "0"])
assert signal.getsignal(signal.SIGTERM) is before
sys.exit(code)
"""


def test_sigterm_leaves_nothing_and_takes_effect_as_before_afterwards(tmp_path: Path) -> None:
    """In a process of its own, as signals are sent to processes."""
    command = [sys.executable, "-c", TERMINATED, str(GOLDEN / "llama"), str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (130, "dskquant convert: interrupted; nothing was left behind\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_an_old_store_is_replaced_leaves_it_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    convert(GOLDEN / "llama", store, PER_CHANNEL, silent)
    before = snapshot(store)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(GOLDEN / "qwen2", store, REPLACING, silent)
    assert snapshot(store) == before
    assert list(tmp_path.iterdir()) == [store]


def test_an_existing_store_is_only_replaced_by_force(tmp_path: Path) -> None:
    store = tmp_path / "store"
    convert(GOLDEN / "llama", store, PER_CHANNEL, silent)
    before = snapshot(store)
    with pytest.raises(StoreError, match="--force"):
        convert(GOLDEN / "qwen2", store, PER_CHANNEL, silent)
    assert snapshot(store) == before
    convert(GOLDEN / "qwen2", store, REPLACING, silent)
    assert StoreManifest.read(store).architecture == "qwen2"
    assert list(tmp_path.iterdir()) == [store]


def test_a_failed_replacement_leaves_the_old_store_untouched(tmp_path: Path, llama: Path) -> None:
    store = tmp_path / "store"
    convert(llama, store, PER_CHANNEL, silent)
    before = snapshot(store)
    edit_weights(llama, nan_weight)
    with pytest.raises(SourceError):
        convert(llama, store, REPLACING, silent)
    assert snapshot(store) == before
    assert not list(tmp_path.glob(".store*"))


def test_what_a_killed_conversion_left_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("partial", "old"):
        left = tmp_path / f".store.{name}-{os.getpid()}"
        left.mkdir()
        (left / "manifest.json").write_text("{}")
    convert(GOLDEN / "llama", tmp_path / "store", PER_CHANNEL, silent)
    convert(GOLDEN / "qwen2", tmp_path / "store", REPLACING, silent)
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def test_force_never_removes_what_is_no_store(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="not a model store"):
        convert(GOLDEN / "llama", precious, ConvertOptions(replace=True), silent)
    assert (precious / "thesis.txt").exists()


# --- the command


def test_the_command_prints_the_manifest_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(GOLDEN / "mistral"), "-o", str(tmp_path / "s"), "--group-size", "32", "--json"]
    assert main([*arguments, "--model-id", "tiny", "--symmetric"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model_id"] == "tiny"
    assert "sliding window" in err
    schemes = parameter_set.read(tmp_path / "s" / DEFAULT_PARAMETER_SET).tensors
    scheme = schemes["model.layers.0.mlp.down_proj.weight"]
    assert (scheme.group_size, scheme.symmetric, scheme.always_residual, scheme.int8_plane) == (32, True, False, False)


def test_the_command_makes_mixed_precision_and_separate_planes(tmp_path: Path) -> None:
    arguments = ["convert", str(GOLDEN / "llama"), "-o", str(tmp_path / "s"), "--group-size", "0", "--no-golden"]
    assert main([*arguments, "--int8-layers", "*.v_proj.weight", "--int8-layers", "*.0.*", "--int8-plane"]) == 0
    schemes = parameter_set.read(tmp_path / "s" / DEFAULT_PARAMETER_SET).tensors
    always = {name for name, scheme in schemes.items() if scheme.always_residual}
    assert {name for name in always if ".layers.1." in name} == {"model.layers.1.self_attn.v_proj.weight"}
    assert len(always) == 8
    assert schemes["model.layers.1.mlp.up_proj.weight"].int8_plane
    assert not (tmp_path / "s" / "golden.safetensors").exists()


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"dskquant {VERSION}\n"


def test_a_refusal_is_one_line_and_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), "-o", str(tmp_path / "s")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"dskquant convert: {tmp_path / 'none'}: no such file or directory\n"


@pytest.mark.parametrize(
    "arguments", [[], ["convert"], ["convert", "x"], ["convert", "x", "-o", "y", "--dtype", "f8"], ["bake", "x"]]
)
def test_wrong_usage_is_status_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err
