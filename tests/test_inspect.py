"""`dskquant inspect`: what it tells of stores, parameter sets and files, and what it notices of their damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN
from safetensors.numpy import load_file, save_file

from dskquant import set_writer
from dskquant.cli import main
from dskquant.convert import ConvertOptions, convert
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest

# Of the tiny Llama: two layers with seven matrices each, two matrices outside of them, five norms.
LINEAR = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
OUTSIDE = 2 * 256 * 64
NORMS = 5 * 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the tiny Llama: groups of 32, and a layer that always uses both planes."""
    store = tmp_path_factory.mktemp("made") / "tiny"
    scheme = Scheme(group_size=32, int8_layers=("model.layers.0.mlp.down_proj.weight",))
    convert(GOLDEN / "llama", store, ConvertOptions(scheme=scheme), lambda stage, done, total: None)
    return store


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def inspected(capsys: pytest.CaptureFixture[str], path: Path, *options: str, status: int = 0) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json", *options]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(path), *options]) == 0
    return capsys.readouterr().out


def row(text: str, *starts: str) -> list[str]:
    """The cells of the one table row that begins with `starts`."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    (found,) = (cells for cells in rows if tuple(cells[: len(starts)]) == starts)
    return found


def test_a_store_is_told_as_its_manifest_and_its_files_are(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspected(capsys, made)
    assert report["manifest"] == json.loads((made / "manifest.json").read_text())
    sizes = {file["name"]: file["bytes"] for file in report["files"]}
    on_disk = {path.name: path.stat().st_size for path in made.iterdir() if path.is_file()}
    assert sizes == {name: size for name, size in on_disk.items() if name != "manifest.json"}
    assert {file["whole"] for file in report["files"]} == {None}
    (parameters,) = report["parameter_sets"]
    assert (
        parameters["hash"] == hashlib.sha256((made / DEFAULT_PARAMETER_SET / "manifest.json").read_bytes()).hexdigest()
    )
    assert parameters["weights_sha256"] == hashlib.sha256((made / "openvino_model.bin").read_bytes()).hexdigest()


def test_stored_bits_are_those_of_the_files(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Independently of the formula: what the tensors in the files take, and the norms in 16 bit."""
    (parameters,) = inspected(capsys, made)["parameter_sets"]
    arrays = [
        array for path in (made / DEFAULT_PARAMETER_SET).glob("*.safetensors") for array in load_file(path).values()
    ]
    bits = 8 * sum(array.nbytes for array in arrays) + 16 * NORMS
    assert parameters["weights"] == LINEAR + OUTSIDE + NORMS == StoreManifest.read(made).parameters
    assert parameters["bits_per_weight"]["stored"] == pytest.approx(bits / parameters["weights"])


def test_int4_counts_the_base_alone_except_where_both_planes_always_serve(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 bits and (16 + 8) / 32 of a group's scale and zero-point are 4.75 bits for a plane."""
    schemes = inspected(capsys, made / DEFAULT_PARAMETER_SET)["schemes"]
    linear = {each["always_residual"]: each for each in schemes if each["role"] == "linear"}
    assert linear[False]["bits_per_weight"] == {"int4": 4.75, "int8": 9.5, "stored": 9.5}
    assert linear[True]["bits_per_weight"] == {"int4": 9.5, "int8": 9.5, "stored": 9.5}
    assert (linear[False]["tensors"], linear[True]["tensors"], linear[True]["weights"]) == (13, 1, 96 * 64)
    outside = {each["role"]: each["bits_per_weight"] for each in schemes if each["role"] != "linear"}
    per_channel = 8 + 24 / 64
    assert outside == {
        role: dict.fromkeys(("int4", "int8", "stored"), per_channel) for role in ("embedding", "lm_head")
    }


def test_the_total_of_a_mode_counts_everything(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (parameters,) = inspected(capsys, made)["parameter_sets"]
    down = 96 * 64
    bits = 4.75 * (LINEAR - down) + 9.5 * down + 8.375 * OUTSIDE + 16 * NORMS
    assert parameters["bits_per_weight"]["int4"] == pytest.approx(bits / (LINEAR + OUTSIDE + NORMS))


def test_an_8_bit_plane_takes_room_but_no_part_in_the_shared_modes(
    tmp_path: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = Scheme(group_size=32, int8_plane=True)
    set_writer.create(made, scheme, tmp_path / "set", lambda stage, done, total: None)
    (linear,) = (each for each in inspected(capsys, tmp_path / "set")["schemes"] if each["role"] == "linear")
    assert linear["bits_per_weight"] == {"int4": 4.75, "int8": 9.5, "stored": 9.5 + 8.75}


def test_tables_show_identity_files_and_schemes(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(capsys, monkeypatch, made, "--verify")
    assert "model store llama" in text
    assert re.search(r"context length +128\b", text)
    weights = hashlib.sha256((made / "openvino_model.bin").read_bytes()).hexdigest()
    assert row(text, "openvino_model.bin")[1:3] == [f"{weights[:16]}…", "whole"]
    assert row(text, "linear", "4 + 4 bit, group 32, INT4 uses both") == [
        "linear", "4 + 4 bit, group 32, INT4 uses both", "1", "6,144", "9.50", "9.50", "9.50",
    ]  # fmt: skip
    assert row(text, "all")[3] == f"{LINEAR + OUTSIDE + NORMS:,}"


def test_a_manifest_stands_for_its_directory(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(capsys, made / "manifest.json") == inspected(capsys, made)
    parameters = made / DEFAULT_PARAMETER_SET
    assert inspected(capsys, parameters / "manifest.json") == inspected(capsys, parameters)


def test_a_safetensors_file_is_told_tensor_by_tensor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GOLDEN / "llama" / "model.safetensors"
    tensors = {tensor["name"]: tensor for tensor in inspected(capsys, path)["tensors"]}
    arrays = load_file(path)
    assert {name: (tuple(each["shape"]), each["bytes"]) for name, each in tensors.items()} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    assert {each["dtype"] for each in tensors.values()} == {"F16"}
    text = printed(capsys, monkeypatch, path)
    assert row(text, "model.norm.weight") == ["model.norm.weight", "F16", "64", "128"]
    assert row(text, f"{len(arrays)} tensors")[-1] == f"{sum(array.nbytes for array in arrays.values()):,}"


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("name", ["openvino_model.bin", "parameter_sets/default/planes-00001.safetensors"])
def test_damage_is_found_when_files_are_verified(store: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip_last_byte(store / name)
    assert main(["inspect", str(store), "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(store), "--json", "--verify"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    files = [*report["files"], *report["parameter_sets"][0]["files"]]
    assert [file["name"] for file in files if not file["whole"]] == [Path(name).name]
    assert err.endswith(f"{Path(name).name} is damaged\n")


def test_a_missing_file_is_found_without_reading_the_others(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "tokenizer.json").unlink()
    report = inspected(capsys, store, status=1)
    assert {file["name"]: file["bytes"] for file in report["files"]}["tokenizer.json"] is None


def test_a_set_made_for_other_weights_is_noticed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / DEFAULT_PARAMETER_SET / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": "0" * 64}))
    assert main(["inspect", str(store)]) == 1
    assert "default: made for other weights" in capsys.readouterr().err


def edit_set(store: Path, **values: Any) -> Path:
    """Changes keys of the manifest of the default set."""
    directory = store / DEFAULT_PARAMETER_SET
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | values))
    return directory


def test_a_set_is_told_with_its_codes_its_noise_and_how_it_was_made(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is long or nested is summed up; all of it is in the JSON."""
    sensitivity = {f"model.layers.{layer}.mlp.up_proj.weight": layer / 7 for layer in range(30)}
    provenance = {
        "method": "activation-aware [/b] :smile:",
        "text": {"file": "a.txt", "tokens": 12288},
        "sensitivity": sensitivity,
        "seeds": [1, 2],
        "rounds": [[1], [2]],
    }
    path = edit_set(store, expected_kl={"int4": 0.1234567, "int8": 0.003}, provenance=provenance)
    text = printed(capsys, monkeypatch, path)
    for line in (
        r"codes +stored",
        r"expected noise +INT4 0\.12346, INT8 0\.00300",
        r"method +activation-aware \[/b\] :smile:",
        r"text +file a\.txt, tokens 12288",
        r"sensitivity +30 entries: model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1\.mlp\.up_proj\.weight, …",
        r"seeds +1 2",
        r"rounds +2 entries",
    ):
        assert re.search(rf"^ {line} *$", text, re.MULTILINE), (line, text)
    report = inspected(capsys, path)
    assert report["provenance"] == provenance
    assert report["expected_kl"] == {"int4": 0.1234567, "int8": 0.003}


def test_a_set_without_codes_is_told_as_that(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores a scale and a zero-point of 24 bits for each group of 32, in each of two planes."""
    path = edit_set(store, codes="derived")
    assert re.search(r"^ codes +derived from the weights", printed(capsys, monkeypatch, path), re.MULTILINE)
    (linear, _) = (each for each in inspected(capsys, path)["schemes"] if each["role"] == "linear")
    assert linear["bits_per_weight"]["stored"] == 2 * 24 / 32
    assert linear["bits_per_weight"]["int8"] == 9.5


def test_verifying_a_set_checks_its_scales(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its digests are right: it was made so."""
    planes = store / DEFAULT_PARAMETER_SET / "planes-00001.safetensors"
    arrays = load_file(planes)
    arrays["lm_head.weight.scales"][5, 0] = np.inf
    save_file(arrays, planes)
    path = edit_set(store, sha256={planes.name: hashlib.sha256(planes.read_bytes()).hexdigest()})
    assert inspected(capsys, path)["broken_rule"] is None  # not read
    assert main(["inspect", str(path), "--verify", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["broken_rule"].startswith("scale-finite: ")
    assert "tensor lm_head.weight: lm_head.weight.scales is inf in row 5, group 0" in err
    assert main(["inspect", str(store), "--verify", "--json"]) == 1
    assert "default: scale-finite: " in capsys.readouterr().err


def damaged_manifest(path: Path) -> Path:
    (path / "manifest.json").write_text("{")
    return path


def no_manifest(path: Path) -> Path:
    return path


def no_safetensors(path: Path) -> Path:
    np.save(path / "a.npy", np.zeros(3))
    return path / "a.npy"


def nothing(path: Path) -> Path:
    return path / "nothing"


@pytest.mark.parametrize("make", [damaged_manifest, no_manifest, no_safetensors, nothing])
def test_what_is_no_store_no_set_and_no_file_of_tensors_is_refused(
    tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dskquant inspect: {path}")
    assert err.count("\n") == 1


def test_a_text_is_told_what_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    path.write_text("# A text, and no tensors")
    assert main(["inspect", str(path)]) == 1
    problem = "not a model store, parameter set or safetensors file"
    assert capsys.readouterr().err == f"dskquant inspect: {path}: {problem}\n"
