"""The rules of parameter sets: whatever is wrong with one, it is refused by the name of the rule, without a crash."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dskquant import parameter_set
from dskquant.convert import ConvertOptions, convert
from dskquant.errors import ParameterSetError, ParameterSetMissingError, StoreError
from dskquant.parameter_set import ParameterSet
from dskquant.scheme import Scheme
from dskquant.store import DEFAULT_PARAMETER_SET, MANIFEST, file_sha256
from dskquant.validation import check_tensors, validate

GATE = "model.layers.0.mlp.gate_proj.weight"  # [96, 64], in groups of 32
DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
EMBEDDING = "model.embed_tokens.weight"
PLANES = "planes-00001.safetensors"
DENORMAL = 2.0**-15  # the smallest float16 that is not denormal is 2^-14

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("validation") / "store"
    options = ConvertOptions(scheme=Scheme(group_size=32, int8_plane=True), golden=False)
    convert(GOLDEN / "llama", store, options, lambda *_: None)
    return store


@pytest.fixture
def directory(store: Path, tmp_path: Path) -> Path:
    """A set to damage."""
    return shutil.copytree(store / DEFAULT_PARAMETER_SET, tmp_path / "set")


def in_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Damage to the manifest."""

    def damage(directory: Path) -> None:
        manifest = json.loads((directory / MANIFEST).read_text())
        edit(manifest)
        (directory / MANIFEST).write_text(json.dumps(manifest))

    return damage


def in_tensor(edit: Callable[[dict[str, Any]], object], tensor: str = GATE) -> Callable[[Path], None]:
    """Damage to what the manifest says of one tensor."""
    return in_manifest(lambda manifest: edit(manifest["tensors"][tensor]))


def in_arrays(edit: Callable[[Arrays], object], file: str = PLANES) -> Callable[[Path], None]:
    """Damage to what a file holds; the manifest has the digest of the damaged file."""

    def damage(directory: Path) -> None:
        arrays = load_file(directory / file)
        edit(arrays)
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / file)
        sign(directory)

    return damage


def sign(directory: Path) -> None:
    digests = {path.name: file_sha256(path) for path in directory.glob("*.safetensors")}
    in_manifest(lambda manifest: manifest.update(sha256=digests))(directory)


def put(array: str, row: int, group: int, value: float) -> Callable[[Path], None]:
    def edit(arrays: Arrays) -> None:
        arrays[array][row, group] = value

    return in_arrays(edit)


def swap(one: str, other: str) -> Callable[[Path], None]:
    return in_arrays(lambda arrays: arrays.update({one: arrays[other], other: arrays[one]}))


def in_header(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage to the header of a file, whose digest the manifest has."""

    def damage(directory: Path) -> None:
        data = (directory / PLANES).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = edit(data[8 : 8 + size])
        (directory / PLANES).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        sign(directory)

    return damage


def of_header_bytes(size: int) -> Callable[[Path], None]:
    return in_header(lambda header: header.ljust(size))


def with_array(name: str) -> Callable[[Path], None]:
    """An empty array that nobody asked for."""
    array = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    return in_header(lambda header: json.dumps(json.loads(header) | array).encode())


def flip_last_byte(directory: Path) -> None:
    data = bytearray((directory / PLANES).read_bytes())
    data[-1] ^= 1
    (directory / PLANES).write_bytes(data)


def replace_by(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return damage


def a_second_file_with_the_same_scales(directory: Path) -> None:
    scales = f"{GATE}.base.scales"
    save_file({scales: load_file(directory / PLANES)[scales]}, directory / "more.safetensors")
    sign(directory)


def without_int8_codes_and_scales(directory: Path) -> None:
    """What is left of a plane that the manifest does not know."""
    in_arrays(lambda arrays: [arrays.pop(f"{GATE}.int8.{part}") for part in ("codes", "scales")])(directory)
    in_tensor(lambda item: item.update(int8_plane=False))(directory)


def rename_tensor(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model.layers.0.mlp.gates.weight"] = manifest["tensors"].pop(GATE)


BAD_VALUES = [
    ("scale-finite", GATE, r"gate_proj\.weight\.base\.scales is nan in row 7, group 1; allowed are finite numbers",
     put(f"{GATE}.base.scales", 7, 1, np.nan)),
    ("scale-finite", GATE, r"residual\.scales is inf in row 0, group 0", put(f"{GATE}.residual.scales", 0, 0, np.inf)),
    ("scale-positive", GATE, r"int8\.scales is 0\.0 in row 95, group 1", put(f"{GATE}.int8.scales", 95, 1, 0.0)),
    ("scale-positive", EMBEDDING, r"is -0\.5 in row 3, group 0", put(f"{EMBEDDING}.scales", 3, 0, -0.5)),
    ("scale-denormal", GATE, r"base\.scales is 3\.05e-05 in row 1.*at least 6\.1e-05",
     put(f"{GATE}.base.scales", 1, 0, DENORMAL)),
    ("zero-point-range", GATE, r"base\.zero_points is 16 in row 2, group 1; allowed are 0 to 15",
     put(f"{GATE}.base.zero_points", 2, 1, 16)),
    ("zero-point-range", GATE, r"residual\.zero_points is 255", put(f"{GATE}.residual.zero_points", 2, 1, 255)),
]  # fmt: skip

BAD_ARRAYS = [
    ("array-missing", GATE, r"no tensor .*gate_proj\.weight\.base\.codes",
     in_arrays(lambda arrays: arrays.pop(f"{GATE}.base.codes"))),
    ("array-missing", EMBEDDING, r"no tensor .*zero_points",
     in_arrays(lambda arrays: arrays.pop(f"{EMBEDDING}.zero_points"))),
    ("array-shape", GATE, r"scales of the parameter set is F16 \[96, 1\], not F16 \[96, 2\]",
     in_arrays(lambda arrays: arrays.update({f"{GATE}.base.scales": arrays[f"{GATE}.base.scales"][:, :1]}))),
    ("array-shape", DOWN, r"codes of the parameter set is U8 \[96, 32\], not U8 \[64, 48\]",
     swap(f"{GATE}.base.codes", f"{DOWN}.base.codes")),
    ("array-dtype", GATE, r"scales of the parameter set is F32 \[96, 2\], not F16",
     in_arrays(lambda arrays: arrays.update(
         {f"{GATE}.base.scales": arrays[f"{GATE}.base.scales"].astype(np.float32)}))),
    ("array-dtype", GATE, r"zero_points of the parameter set is I8",
     in_arrays(lambda arrays: arrays.update(
         {f"{GATE}.base.zero_points": arrays[f"{GATE}.base.zero_points"].astype(np.int8)}))),
    ("array-dtype", GATE, r"codes of the parameter set is I32",
     in_arrays(lambda arrays: arrays.update({f"{GATE}.base.codes": arrays[f"{GATE}.base.codes"].astype(np.int32)}))),
    ("extra-array", "bonus.scales", r"planes-00001\.safetensors holds it, but the manifest does not describe it",
     in_arrays(lambda arrays: arrays.update({"bonus.scales": np.ones((2, 2), np.float16)}))),
    ("extra-array", f"{GATE}.int8.zero_points", "the manifest does not describe it", without_int8_codes_and_scales),
    ("extra-array", "lm_head.weight.codes", 'whose codes are "derived", does not describe it',
     in_manifest(lambda manifest: manifest.update(codes="derived"))),
    ("duplicate-array", GATE, r"holds .*base\.scales a second time", a_second_file_with_the_same_scales),
]  # fmt: skip

BAD_TENSORS = [
    ("unknown-tensor", "model.layers.0.mlp.gates.weight", r"it has model\.layers\.0\.mlp\.gate_proj\.weight",
     in_manifest(rename_tensor)),
    ("missing-tensor", GATE, "the model has it, the set does not",
     in_manifest(lambda manifest: manifest["tensors"].pop(GATE))),
    ("tensor-shape", GATE, r"shape \[64, 96\]; that of the model is \[96, 64\]",
     in_tensor(lambda item: item.update(shape=[64, 96]))),
    ("tensor-shape", GATE, r"shape \[96, 0\]", in_tensor(lambda item: item.update(shape=[96, 0]))),
    ("tensor-shape", GATE, r"shape \[96, 64, 1\]", in_tensor(lambda item: item.update(shape=[96, 64, 1]))),
    ("tensor-shape", GATE, r"shape \['96', 64\]", in_tensor(lambda item: item.update(shape=["96", 64]))),
    ("role", GATE, "role lm_head; the model uses it as linear",
     in_tensor(lambda item: item.update(role="lm_head", bits=8))),
    ("role", GATE, "role 'bias'; allowed: linear, embedding, lm_head",
     in_tensor(lambda item: item.update(role="bias"))),
    ("bits-not-supported", GATE, "bits 3; a tensor of role linear has 4", in_tensor(lambda item: item.update(bits=3))),
    ("bits-not-supported", EMBEDDING, "bits 4; a tensor of role embedding has 8",
     in_tensor(lambda item: item.update(bits=4), EMBEDDING)),
    ("group-size", GATE, r"group_size 48; allowed: 32, 64, 128, 0", in_tensor(lambda item: item.update(group_size=48))),
    ("group-size", GATE, r"group_size -64; allowed", in_tensor(lambda item: item.update(group_size=-64))),
    ("group-divides", GATE, "group size 128 does not divide rows of 64; allowed: 32, 64, 0",
     in_tensor(lambda item: item.update(group_size=128))),
    ("manifest-unreadable", GATE, "symmetric is missing", in_tensor(lambda item: item.pop("symmetric"))),
    ("manifest-unreadable", GATE, "always_residual must be true or false",
     in_tensor(lambda item: item.update(always_residual=1))),
    ("manifest-unreadable", GATE, "is not described by a table",
     in_manifest(lambda manifest: manifest["tensors"].update({GATE: 4}))),
]  # fmt: skip

BAD_SETS = [
    ("manifest-unreadable", "not a readable parameter set", lambda directory: (directory / MANIFEST).write_text("{")),
    ("manifest-unreadable", "not a readable", lambda directory: (directory / MANIFEST).write_bytes(b"\xff\xfe\x00{")),
    ("manifest-unreadable", "is not a regular file", replace_by(os.mkfifo, MANIFEST)),
    ("manifest-unreadable", "is not a regular file", replace_by(Path.mkdir, MANIFEST)),
    ("manifest-unreadable", "weights_sha256 must be a text",
     in_manifest(lambda manifest: manifest.update(weights_sha256=None))),
    ("manifest-unreadable", "codes 'some'; allowed: stored, derived",
     in_manifest(lambda manifest: manifest.update(codes="some"))),
    ("manifest-unreadable", "expected_kl of int4 is nan",
     in_manifest(lambda manifest: manifest.update(expected_kl={"int4": float("nan")}))),
    ("manifest-unreadable", "expected_kl of int4 is 1000.*, not a finite number",
     in_manifest(lambda manifest: manifest.update(expected_kl={"int4": 10**400}))),
    ("manifest-unreadable", "'int5', which is no precision mode",
     in_manifest(lambda manifest: manifest.update(expected_kl={"int5": 0.1}))),
    ("manifest-unreadable", "surrogates not allowed",
     in_manifest(lambda manifest: manifest.update(model_id="\ud800"))),
    ("format-version", "format_version 3; this version reads 2",
     in_manifest(lambda manifest: manifest.update(format_version=3))),
    ("format-version", "format_version missing", in_manifest(lambda manifest: manifest.pop("format_version"))),
    ("wrong-weights", "made for other weights than those of",
     in_manifest(lambda manifest: manifest.update(weights_sha256="0" * 64))),
    ("manifest-unreadable", r"'\.\./planes' is not the name of a file of the set",
     in_manifest(lambda manifest: manifest["sha256"].update({"../planes": "0"}))),
    ("manifest-unreadable", "is not the name of a file of the set",
     in_manifest(lambda manifest: manifest["sha256"].update({"x" * 300 + ".safetensors": "0"}))),
    ("manifest-unreadable", r"'completed' is not the name of a file of the set, which are \*\.safetensors",
     in_manifest(lambda manifest: manifest["sha256"].update({"completed": "0"}))),
    ("manifest-unreadable", "has more than 2097152 bytes",
     in_manifest(lambda manifest: manifest["provenance"].update(notes=["a"] * 1_000_000))),
    ("file-truncated", "header size 2097153: at most 2097152 bytes are read", of_header_bytes((2 << 20) + 1)),
    ("file-truncated", r"tensor 'x\\ud800y': half a surrogate pair", with_array("x\ud800y")),
    ("file-truncated", "a tensor has a name of 513 characters; at most 512 are allowed", with_array("x" * 513)),
    ("hash-mismatch", r"planes-00001\.safetensors: damaged", flip_last_byte),
    ("file-unreadable", r"planes-00001\.safetensors: is not a regular file", replace_by(os.mkfifo, PLANES)),
    ("file-truncated", r"planes-00001\.safetensors: header size 0 in a file of 0 bytes",
     replace_by(Path.touch, PLANES)),
]  # fmt: skip


def refusal(directory: Path, store: Path) -> ParameterSetError:
    with pytest.raises(ParameterSetError) as caught:
        validate(parameter_set.read(directory), store)
    return caught.value


def test_a_validation_ends_when_it_is_told_to_while_it_reads(directory: Path, store: Path) -> None:
    class OvertakenError(Exception):
        pass

    pieces: list[None] = []

    def stop_at_the_second() -> None:
        pieces.append(None)
        if len(pieces) == 2:
            raise OvertakenError

    with pytest.raises(OvertakenError):
        validate(parameter_set.read(directory), store, stop_at_the_second)
    assert len(pieces) == 2


def test_an_untouched_set_breaks_no_rule(directory: Path, store: Path) -> None:
    validate(parameter_set.read(directory), store)


@pytest.mark.parametrize(("rule", "tensor", "message", "damage"), [*BAD_VALUES, *BAD_ARRAYS, *BAD_TENSORS])
def test_a_damaged_tensor_is_refused_by_rule_and_name(
    directory: Path, store: Path, rule: str, tensor: str, message: str, damage: Callable[[Path], None]
) -> None:
    damage(directory)
    error = refusal(directory, store)
    assert (error.rule, error.tensor) == (rule, tensor), str(error)
    assert str(directory) in str(error)
    assert tensor in str(error)
    with pytest.raises(ParameterSetError, match=message):
        raise error


@pytest.mark.parametrize(("rule", "message", "damage"), BAD_SETS)
def test_a_damaged_set_is_refused_by_rule(
    directory: Path, store: Path, rule: str, message: str, damage: Callable[[Path], None]
) -> None:
    damage(directory)
    error = refusal(directory, store)
    assert (error.rule, error.tensor) == (rule, "")
    assert not isinstance(error, ParameterSetMissingError)
    with pytest.raises(ParameterSetError, match=message):
        raise error


@pytest.mark.parametrize("name", [MANIFEST, PLANES])
def test_what_is_not_there_yet_is_told_from_what_is_damaged(directory: Path, store: Path, name: str) -> None:
    (directory / name).unlink()
    error = refusal(directory, store)
    assert isinstance(error, ParameterSetMissingError)
    assert (error.rule, str(directory / name) in str(error)) == ("set-missing", True)


def test_a_path_with_dots_is_told_without_them(tmp_path: Path) -> None:
    with pytest.raises(ParameterSetMissingError) as told:
        parameter_set.read(tmp_path / "configs" / ".." / "sets")
    assert str(told.value) == f"{tmp_path}/sets/manifest.json: no parameter set is there"


def test_a_model_store_in_place_of_a_set_is_told_where_its_set_is(store: Path) -> None:
    with pytest.raises(ParameterSetError) as told:
        parameter_set.read(store)
    assert str(told.value) == (
        f"{store}: is a model store, not a parameter set; its default set is in parameter_sets/default"
    )
    assert parameter_set.read(store / "parameter_sets/default").hash


def test_a_set_of_another_model_with_the_same_weights_fits(directory: Path, store: Path) -> None:
    """The weights decide: the same model may be stored under two names."""
    in_manifest(lambda manifest: manifest.update(model_id="another"))(directory)
    validate(parameter_set.read(directory), store)


def test_swapped_tensors_of_one_shape_are_found_by_the_digest(directory: Path, store: Path) -> None:
    arrays = load_file(directory / PLANES)
    up = GATE.replace("gate", "up")
    arrays[f"{GATE}.base.codes"], arrays[f"{up}.base.codes"] = arrays[f"{up}.base.codes"], arrays[f"{GATE}.base.codes"]
    save_file(arrays, directory / PLANES)
    assert refusal(directory, store).rule == "hash-mismatch"


def test_a_model_whose_default_set_is_gone_can_prove_no_other(directory: Path, store: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(store, tmp_path / "bare", ignore=shutil.ignore_patterns("parameter_sets"))
    with pytest.raises(StoreError, match=r"parameter_sets/default/manifest\.json: no parameter set is there"):
        validate(parameter_set.read(directory), bare)


@pytest.mark.parametrize("name", [PLANES, MANIFEST])
def test_a_file_cut_off_anywhere_is_refused(directory: Path, store: Path, name: str) -> None:
    """At every kilobyte, around the header and one byte before the end; signed, so that no digest gives it away."""
    whole = (directory / name).read_bytes()
    parameters = parameter_set.read(directory)
    for length in (*range(0, len(whole) - 1, 1024), 1, 7, 8, 9, len(whole) - 2):
        (directory / name).write_bytes(whole[:length])
        with pytest.raises(ParameterSetError) as caught:
            check_tensors(parameters) if name == PLANES else parameter_set.read(directory)
        assert caught.value.rule == ("file-truncated" if name == PLANES else "manifest-unreadable"), length
        assert str(directory / name) in str(caught.value)


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(
    directory: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest was still right. A map of it would end the process here."""
    digest = ParameterSet.verify

    def verify_and_cut(parameters: ParameterSet, before_piece: Callable[[], None]) -> None:
        digest(parameters, before_piece)
        (directory / PLANES).write_bytes((directory / PLANES).read_bytes()[:20_000])

    monkeypatch.setattr(ParameterSet, "verify", verify_and_cut)
    error = refusal(directory, store)
    assert error.rule == "file-truncated"
    assert "the file ends in it: truncated" in str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_with_bytes_of_its_header_changed_is_read_or_refused(
    directory: Path, store: Path, data: st.DataObject
) -> None:
    content = bytearray((store / DEFAULT_PARAMETER_SET / PLANES).read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        byte = data.draw(st.sampled_from(b'0123456789"{}[],:-eN\\\0\xff'))
        content[data.draw(st.integers(0, header_bytes - 1))] = byte
    (directory / PLANES).write_bytes(content)
    with contextlib.suppress(ParameterSetError):
        check_tensors(parameter_set.read(directory))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_manifest_with_any_value_changed_is_read_or_refused(
    directory: Path, store: Path, data: st.DataObject
) -> None:
    manifest = json.loads((store / DEFAULT_PARAMETER_SET / MANIFEST).read_text())
    place: Any = data.draw(st.sampled_from([manifest, manifest["tensors"], manifest["tensors"][GATE]]))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with contextlib.suppress(ParameterSetError):
        validate(parameter_set.read(directory), store)


@pytest.mark.parametrize(("rule", "tensor", "message", "damage"), BAD_VALUES)
def test_values_are_checked_without_a_model(
    directory: Path, rule: str, tensor: str, message: str, damage: Callable[[Path], None]
) -> None:
    damage(directory)
    with pytest.raises(ParameterSetError, match=message) as caught:
        check_tensors(parameter_set.read(directory))
    assert (caught.value.rule, caught.value.tensor) == (rule, tensor)
