"""`dskquant compare`: modes and parameter sets against one run of the reference."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, PROMPT, golden_logits
from safetensors.numpy import load_file, save_file

from dskquant import set_writer
from dskquant.cli import main
from dskquant.comparison import compare_modes
from dskquant.convert import ConvertOptions, convert
from dskquant.engines import load_engine
from dskquant.engines.openvino.graph import OpenVINOGraph
from dskquant.engines.protocol import CompileOptions, Logits, StepBatch
from dskquant.modes import PrecisionMode
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, StoreManifest, file_sha256

PLANES = "planes-00001.safetensors"
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
WINDOW = 64

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("compare") / "store"
    convert(GOLDEN / "llama", store, ConvertOptions(scheme=Scheme(group_size=32), golden=False), lambda *_: None)
    return store


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def changed(store: Path, destination: Path, edit: Callable[[Arrays], Arrays], **manifest: str) -> Path:
    """A copy of the default set with other arrays."""
    shutil.copytree(store / DEFAULT_PARAMETER_SET, destination)
    save_file(edit(load_file(destination / PLANES)), destination / PLANES)
    written = json.loads((destination / MANIFEST).read_text())
    written |= manifest | {"sha256": {PLANES: file_sha256(destination / PLANES)}}
    (destination / MANIFEST).write_text(json.dumps(written))
    return destination


def without_codes(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if not name.endswith(".codes")}


def with_larger_scales(arrays: Arrays) -> Arrays:
    """Base planes twice as large, their codes kept: INT4 is far off."""
    return {name: array * np.float16(2) if name.endswith("base.scales") else array for name, array in arrays.items()}


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    words = ["compare", *map(str, arguments), "--json", "--quiet", "--window", str(WINDOW), "--activation-group", "0"]
    assert main(words) == 0, capsys.readouterr().err
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_store_alone_is_told_mode_by_mode(store: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, store, "--data", text)
    assert [(row["parameter_set"], row["mode"]) for row in rows] == [
        ("default", "int4"), ("default", "int8"), (None, "fp16"), (None, "fp32"),
    ]  # fmt: skip
    noise = [row["mean_kl"] for row in rows]
    assert noise[0] > noise[1] > noise[3] == 0
    assert rows[3]["agreement"] == 1
    assert {row["positions"] for row in rows} == {len(TEXT)}  # a token a byte


def test_the_perplexity_of_the_reference_is_that_of_its_published_logits(store: Path) -> None:
    """tests/golden has the logits of the transformers library for these tokens."""
    logits = golden_logits("llama").reshape(len(PROMPT), -1).astype(np.float64)[:-1]
    likelihoods = logits[range(len(logits)), PROMPT[1:]] - np.log(np.exp(logits).sum(axis=1))
    options = CompileOptions(kv_precision="f32")
    (reference,) = compare_modes(
        store, load_engine("openvino"), PROMPT, [PrecisionMode.FP32], options, progress=lambda *_: None
    )
    assert reference.perplexity == pytest.approx(np.exp(-likelihoods.mean()), rel=1e-3)


def test_sets_are_measured_beside_the_default_one(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Derived codes are those of the default set, so all its figures are the same; a worse set is told as worse."""
    same = changed(store, tmp_path / "same", without_codes, codes="derived")
    worse = changed(store, tmp_path / "worse", with_larger_scales)
    rows = compared(capsys, store, same, worse, "--data", text, "--modes", "int4")
    found = {row["parameter_set"]: row for row in rows}
    assert list(found) == ["default", str(same), str(worse), None]
    figures = ("perplexity", "mean_kl", "p99_kl", "agreement", "bits_per_weight")
    assert [found[str(same)][key] for key in figures] == [found["default"][key] for key in figures]
    assert found[str(worse)]["mean_kl"] > 1.5 * found["default"]["mean_kl"]


def test_bits_count_what_a_mode_computes_with(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Independently of the formula: what the arrays take, and the norms in 16 bit."""
    coarse = tmp_path / "coarse"
    set_writer.create(store, Scheme(group_size=0), coarse, lambda *_: None)
    rows = compared(capsys, store, coarse, "--data", text, "--modes", "int4,int8", "--tokens", "64")
    manifest = StoreManifest.read(store)
    arrays = load_file(coarse / PLANES)
    norms = 16 * 5 * 64
    both = 8 * sum(array.nbytes for array in arrays.values()) + norms
    base = 8 * sum(array.nbytes for name, array in arrays.items() if ".residual." not in name) + norms
    bits = {row["mode"]: row["bits_per_weight"] for row in rows if row["parameter_set"] in (str(coarse), None)}
    assert bits == pytest.approx({"int4": base / manifest.parameters, "int8": both / manifest.parameters, "fp32": 32})


def test_one_run_of_the_reference_serves_all_sets(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: Counter[str] = Counter()
    run = OpenVINOGraph.run

    def counted(graph: OpenVINOGraph, batch: StepBatch) -> Logits:
        runs["+".join(sorted(mode.value for mode in graph.modes))] += 1
        return run(graph, batch)

    monkeypatch.setattr(OpenVINOGraph, "run", counted)
    other = changed(store, tmp_path / "other", with_larger_scales)
    compared(capsys, store, other, "--data", text, "--modes", "int4", "--tokens", 2 * WINDOW)
    assert runs == {"fp32": 2, "int4+int8": 4}  # two windows, and two sets


def test_derived_codes_are_not_left_behind(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    bare = changed(store, tmp_path / "bare", without_codes, codes="derived")
    compared(capsys, store, bare, "--data", text, "--modes", "int4", "--tokens", "8")
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in bare.iterdir()) == [MANIFEST, PLANES]


def negative(arrays: Arrays) -> Arrays:
    return arrays | {"lm_head.weight.scales": -arrays["lm_head.weight.scales"]}


@pytest.mark.parametrize("codes", ["stored", "derived"])
def test_a_set_that_breaks_a_rule_is_not_compared(
    store: Path, text: Path, tmp_path: Path, codes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = without_codes if codes == "derived" else dict
    damaged = changed(store, tmp_path / "damaged", lambda arrays: keep(negative(arrays)), codes=codes)
    assert main(["compare", str(store), str(damaged), "--data", str(text), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dskquant compare: {damaged}: tensor lm_head.weight: lm_head.weight.scales is -")
    assert err.count("\n") == 1


def test_the_table_names_sets_as_they_were_given(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    changed(store, Path("[/b] november"), with_larger_scales)
    assert main(["compare", str(store), "[/b] november", "--data", str(text), "--tokens", "8", "--quiet"]) == 0
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [tuple(cell.strip() for cell in row[:2]) for row in rows] == [
        ("default", "int4"), ("default", "int8"), ("[/b] november", "int4"), ("[/b] november", "int8"),
        ("", "fp16"), ("", "fp32"),
    ]  # fmt: skip


def test_only_a_store_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words")
    for path in (tmp_path, text):
        assert main(["compare", str(path), "--data", str(text)]) == 1
        assert capsys.readouterr().err.startswith(f"dskquant compare: {path} is not a model store: no manifest.json")
