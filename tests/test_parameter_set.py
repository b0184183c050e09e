"""Parameter sets on disk: what is written is what is read, and codes that are left out are derived again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dskquant import parameter_set, set_writer
from dskquant.convert import ConvertOptions, convert
from dskquant.errors import ParameterSetError, StoreError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.parameter_set import MatrixReader, ParameterSet
from dskquant.planes import quantize, rounded, unpack_u4
from dskquant.scheme import Role, Scheme, TensorScheme
from dskquant.set_layout import planes_of
from dskquant.set_writer import derive_codes, quantize_tensor
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, file_sha256
from dskquant.validation import validate

PLANES = "planes-00001.safetensors"
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


def store_of(made: Path) -> Path:
    return made.parent.parent


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
    path = directory / PLANES
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"planes-00001\.safetensors: damaged"):
        parameter_set.read(directory).verify()


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / PLANES).unlink()
    with pytest.raises(StoreError, match=r"planes-00001\.safetensors: missing"):
        parameter_set.read(directory).verify()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda manifest: manifest.update(format_version=1), "format_version 1; this version reads 2"),
        (lambda manifest: manifest.pop("tensors"), "tensors is missing"),
        (lambda manifest: manifest.update(sha256=[]), "not a readable parameter set"),
        (lambda manifest: manifest.update(tensors=[]), "not a readable parameter set"),
        (lambda manifest: manifest["tensors"][GATE].update(role="bias"), "role 'bias'; allowed"),
        (lambda manifest: manifest["tensors"][GATE].update(shape=[0, 64]), "not the sizes of a matrix"),
        (lambda manifest: manifest["tensors"][GATE].update(shape="wide"), "shape must be a list"),
        (lambda manifest: manifest["tensors"][GATE].update(group_size=None), "group_size must be a whole number"),
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


def test_a_tensor_is_not_read_as_what_it_is_not(directory: Path) -> None:
    """A set that was not validated may name another role than the model has."""
    made = parameter_set.read(directory)
    lm_head = made.tensors["lm_head.weight"]
    with pytest.raises(ParameterSetError, match=r"tensor lm_head\.weight: role lm_head is not what the model"):
        made.matrices().plane("lm_head.weight", "base", lm_head)
    with pytest.raises(ParameterSetError, match=r"gate_proj\.weight: role linear is not what the model"):
        made.matrices().eight_bit(GATE, made.tensors[GATE])


def without_codes(directory: Path) -> ParameterSet:
    """Turns a set into one of scales and zero-points alone."""
    path = directory / PLANES
    save_file({name: array for name, array in load_file(path).items() if not name.endswith(".codes")}, path)
    edit_manifest(directory, lambda manifest: manifest.update(codes="derived", sha256={PLANES: file_sha256(path)}))
    return parameter_set.read(directory)


def test_codes_derived_from_scales_and_zero_points_are_those_that_were_left_out(
    directory: Path, made: Path, tmp_path: Path
) -> None:
    """Of all planes, and of the 8-bit tensors: the completed set is the default one, byte for byte."""
    bare = without_codes(directory)
    validate(bare, store_of(made))
    whole = set_writer.complete(bare, store_of(made), tmp_path / "whole", lambda *_: None)
    validate(whole, store_of(made))
    assert (tmp_path / "whole" / PLANES).read_bytes() == (made / PLANES).read_bytes()
    assert whole == parameter_set.read(tmp_path / "whole")
    assert whole.provenance == bare.provenance | {"completed_from": bare.hash}


def test_completing_a_set_twice_gives_the_same_set(directory: Path, made: Path, tmp_path: Path) -> None:
    bare = without_codes(directory)
    hashes = [
        set_writer.complete(bare, store_of(made), tmp_path / name, lambda *_: None).hash for name in ("one", "other")
    ]
    assert hashes[0] == hashes[1]


def test_a_damaged_set_is_not_completed(directory: Path, made: Path, tmp_path: Path) -> None:
    without_codes(directory)
    arrays = load_file(directory / PLANES)
    arrays[f"{GATE}.base.scales"][0, 0] = np.nan
    save_file(arrays, directory / PLANES)
    digest = file_sha256(directory / PLANES)
    edit_manifest(directory, lambda manifest: manifest.update(sha256={PLANES: digest}))
    with pytest.raises(ParameterSetError, match="is nan"):
        set_writer.complete(parameter_set.read(directory), store_of(made), tmp_path / "whole", lambda *_: None)
    assert not (tmp_path / "whole").exists()


def test_a_set_that_has_its_codes_is_not_completed(directory: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds its codes already"):
        set_writer.complete(parameter_set.read(directory), store_of(made), tmp_path / "whole", lambda *_: None)


def test_a_set_without_codes_cannot_be_computed_with(directory: Path) -> None:
    bare = without_codes(directory)
    with pytest.raises(ParameterSetError, match=r"no tensor .*gate_proj\.weight\.base\.codes") as caught:
        bare.matrices().plane(GATE, "base", bare.tensors[GATE])
    assert caught.value.rule == "array-missing"


def test_the_manifest_stands_for_its_directory(directory: Path) -> None:
    assert parameter_set.read(directory / MANIFEST) == parameter_set.read(directory)


@given(
    st.sampled_from([(4, 32), (4, 64), (4, 0), (8, 32), (8, 0)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 100.0]),
)
def test_a_derived_code_is_the_nearest_its_group_has(
    kind: tuple[int, int], symmetric: bool, seed: int, spread: float
) -> None:
    """Against a search through all codes in float64; a tie may go either way."""
    bits, group_size = kind
    weights = (np.random.default_rng(seed).standard_normal((3, 64)) * spread).astype(np.float32)
    made = quantize(weights, bits, group_size, symmetric)
    derived = rounded(weights, made.scales, made.zero_points, bits)
    assert np.array_equal(derived.codes, made.codes)
    scales, zero_points = (grid.astype(np.float64)[..., None] for grid in (made.scales, made.zero_points))
    grouped = weights.astype(np.float64).reshape(*made.scales.shape, -1)
    levels = (np.arange(2**bits) - zero_points) * scales  # [N, G, codes]
    nearest = np.abs(grouped[..., None] - levels[:, :, None, :]).min(axis=-1)
    reached = np.abs(grouped - (derived.codes.reshape(grouped.shape) - zero_points) * scales)
    assert (reached <= nearest + 1e-5 * scales).all()


class PiecewiseWeight:
    """A weight that comes some rows at a time."""

    name = "W"
    role = Role.LINEAR

    def __init__(self, values: NDArray[np.float32], rows_at_once: int) -> None:
        self._values = values
        self._rows_at_once = rows_at_once
        self.shape = values.shape[0], values.shape[1]

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        for begin in range(0, len(self._values), self._rows_at_once):
            yield self._values[begin : begin + self._rows_at_once]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 0]), st.booleans(), st.integers(1, 40))
def test_both_planes_of_any_matrix_follow_from_their_grids(
    seed: int, group_size: int, symmetric: bool, rows_at_once: int
) -> None:
    """However the matrix is cut into pieces."""
    weights = np.random.default_rng(seed).standard_normal((40, 64)).astype(np.float32)
    scheme = TensorScheme(Role.LINEAR, (40, 64), group_size, symmetric, int8_plane=True)
    weight = PiecewiseWeight(weights, rows_at_once)
    arrays = quantize_tensor(weight, scheme)
    grids = {name: array for name, array in arrays.items() if not name.endswith(".codes")}
    with TemporaryDirectory() as directory:
        save_file(grids, Path(directory) / PLANES)
        matrices = MatrixReader(Path(directory), {PLANES: MappedSafetensors(Path(directory) / PLANES)})
        derived = derive_codes(weight, planes_of(weight.name, scheme), matrices)
        assert derived.keys() == arrays.keys()
        assert all(np.array_equal(derived[name], arrays[name]) for name in arrays)
