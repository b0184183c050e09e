"""Parameter sets on disk: what is written is what is read, and what is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, weights_of

from dskquant import parameter_set
from dskquant.convert import ConvertOptions, convert
from dskquant.errors import StoreError
from dskquant.planes import unpack_u4
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST

GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("set") / "store"
    convert(GOLDEN / "llama", store, ConvertOptions(scheme=Scheme(group_size=32, int8_plane=True)), lambda *_: None)
    return store / DEFAULT_PARAMETER_SET


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """A set to damage."""
    return shutil.copytree(made, tmp_path / "set")


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / MANIFEST).read_text())
    edit(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest))


def test_the_planes_on_disk_are_close_to_the_weights_they_were_made_from(directory: Path) -> None:
    weights = weights_of("llama")[GATE].astype(np.float64)
    made = parameter_set.read(directory)
    matrices, scheme = made.matrices(), made.tensors[GATE]
    total = np.zeros(weights.shape)
    for plane in ("base", "residual"):
        matrix = matrices.plane(GATE, plane, scheme)
        codes = unpack_u4(matrix.codes).astype(np.float64).reshape(*matrix.scales.shape, -1)
        total += ((codes - matrix.zero_points[..., None]) * matrix.scales[..., None]).reshape(weights.shape)
    step = np.ptp(weights.reshape(-1, 32), axis=1).max() / 15
    assert np.abs(total - weights).max() < step / 10


def test_an_untouched_set_verifies_and_keeps_its_hash(directory: Path) -> None:
    parameter_set.read(directory).verify()
    assert parameter_set.read(directory).hash == parameter_set.read(directory).hash


def test_a_flipped_bit_is_found_and_the_file_is_named(directory: Path) -> None:
    path = directory / "planes-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"planes-00001\.safetensors: damaged"):
        parameter_set.read(directory).verify()


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / "planes-00001.safetensors").unlink()
    with pytest.raises(StoreError, match=r"planes-00001\.safetensors: missing"):
        parameter_set.read(directory).verify()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda manifest: manifest.update(format_version=1), "format_version 1; this version reads 2"),
        (lambda manifest: manifest.pop("tensors"), "'tensors'"),
        (lambda manifest: manifest.update(sha256=[]), "not a readable parameter set"),
        (lambda manifest: manifest.update(tensors=[]), "not a readable parameter set"),
        (lambda manifest: manifest["tensors"][GATE].update(role="bias"), "'bias' is not a valid Role"),
        (lambda manifest: manifest["tensors"][GATE].update(shape=[0, 64]), "not the sizes of a matrix"),
        (lambda manifest: manifest["tensors"][GATE].update(shape="wide"), "not the sizes of a matrix"),
        (lambda manifest: manifest["tensors"][GATE].update(group_size=None), "not the sizes of a matrix"),
        (lambda manifest: manifest["sha256"].update({"../planes": "0"}), "is not the name of a file of the set"),
    ],
)
def test_a_damaged_manifest_is_refused(directory: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    edit_manifest(directory, edit)
    with pytest.raises(StoreError, match=message):
        parameter_set.read(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"set"', "[" * 100_000])
def test_a_manifest_that_is_none_is_refused(directory: Path, text: str) -> None:
    (directory / MANIFEST).write_text(text)
    with pytest.raises(StoreError, match="not a readable parameter set"):
        parameter_set.read(directory)


def test_tensors_of_another_shape_than_the_manifest_says_are_refused(directory: Path) -> None:
    edit_manifest(directory, lambda manifest: manifest["tensors"][GATE].update(shape=[96, 32]))
    made = parameter_set.read(directory)
    with pytest.raises(
        StoreError, match=r"gate_proj\.weight\.base\.codes of the parameter set is U8 \[96, 32\], not U8"
    ):
        made.matrices().plane(GATE, "base", made.tensors[GATE])


def test_a_tensor_the_set_lacks_is_named(directory: Path) -> None:
    made = parameter_set.read(directory)
    with pytest.raises(StoreError, match=r"no tensor other\.weight\.base\.codes"):
        made.matrices().plane("other.weight", "base", made.tensors[GATE])
