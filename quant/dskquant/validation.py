"""The rules that a parameter set must keep before anything computes with it.

Each has a short, stable name, which the error carries:

| rule | what is wrong |
|---|---|
| set-missing | no manifest there, or no file that the manifest names; it may come yet |
| manifest-unreadable, format-version | the manifest is no manifest, or one of another version |
| role, bits-not-supported, group-size, tensor-shape | a tensor of the manifest cannot be, or is not that of the model |
| wrong-weights | made for other weights than those of the model store (an equal hash of the weights decides) |
| unknown-tensor, missing-tensor | the set has a tensor that the model lacks, or lacks one that it has |
| group-divides | the rows of a tensor are no whole number of groups |
| file-unreadable, file-truncated | no regular file; or header, offsets and size of a file do not fit each other |
| array-missing, extra-array, duplicate-array | the files do not hold what the manifest describes, once each |
| array-dtype, array-shape | codes, scales or zero-points are of another dtype or shape |
| hash-mismatch | a file is not the one of the manifest |
| scale-finite, scale-positive, scale-denormal | a scale is NaN, infinite, zero, negative, or denormal in float16 |
| zero-point-range | a zero-point lies outside the range of its codes |
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant import parameter_set
from dskquant.errors import ParameterSetError
from dskquant.parameter_set import Codes, MatrixReader, ParameterSet
from dskquant.planes import SMALLEST_SCALE
from dskquant.scheme import TensorScheme
from dskquant.set_layout import Plane, planes_of
from dskquant.store import DEFAULT_PARAMETER_SET, StoreManifest


def validate(parameters: ParameterSet, store: Path, before_piece: Callable[[], None] = lambda: None) -> None:
    """Raises ParameterSetError for the first rule that `parameters` break for the model in `store`.

    Reads the files tensor by tensor and maps none of what it reads, for others may write to them meanwhile. Raises
    StoreError when the store, or its default set, cannot be read. `before_piece` is called before each piece of the
    files and each tensor; what it raises ends the validation.
    """
    manifest = StoreManifest.read(store)
    if parameters.weights_sha256 != manifest.weights_sha256:
        raise ParameterSetError(
            f"{parameters.directory}: weights_sha256 {parameters.weights_sha256}: made for other weights than those "
            f"of {store}, {manifest.weights_sha256}",
            rule="wrong-weights",
        )
    _check_fit(parameters, parameter_set.read(store / DEFAULT_PARAMETER_SET).tensors)
    planes = _planes(parameters)
    matrices = parameters.matrices()
    _check_arrays(parameters, planes, matrices)
    parameters.verify(before_piece)
    _check_values(parameters, planes, matrices, before_piece)


def check_tensors(parameters: ParameterSet) -> None:
    """The rules that need neither a model nor the digests of the files.

    Raises ParameterSetError for the first that is broken.
    """
    planes = _planes(parameters)
    matrices = parameters.matrices()
    _check_arrays(parameters, planes, matrices)
    _check_values(parameters, planes, matrices)


def _check_fit(parameters: ParameterSet, known: Mapping[str, TensorScheme]) -> None:
    for name, scheme in parameters.tensors.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1) or sorted(known)[:1]
            raise _refusal(parameters, name, "unknown-tensor", f"the model has no such tensor; it has {nearest[0]}")
        expected = known[name]
        if scheme.role is not expected.role:
            message = f"role {scheme.role.value}; the model uses it as {expected.role.value}"
            raise _refusal(parameters, name, "role", message)
        if scheme.shape != expected.shape:
            message = f"shape {list(scheme.shape)}; that of the model is {list(expected.shape)}"
            raise _refusal(parameters, name, "tensor-shape", message)
    for name in sorted(known.keys() - parameters.tensors.keys()):
        raise _refusal(parameters, name, "missing-tensor", "the model has it, the set does not")


def _planes(parameters: ParameterSet) -> list[Plane]:
    return [plane for name, scheme in parameters.tensors.items() for plane in planes_of(name, scheme).values()]


def _check_arrays(parameters: ParameterSet, planes: list[Plane], matrices: MatrixReader) -> None:
    """That the files hold the arrays of `planes`, each once, and no others."""
    stored = parameters.codes is Codes.STORED
    expected: dict[str, Plane] = {}
    for plane in planes:
        names = [name for name in plane.arrays if stored or name != plane.codes]
        matrices.check(plane, names)
        expected |= dict.fromkeys(names, plane)
    seen: set[str] = set()
    for file, name in matrices.names():
        if name not in expected:
            described = "the manifest" if stored else 'the manifest, whose codes are "derived",'
            raise _refusal(parameters, name, "extra-array", f"{file} holds it, but {described} does not describe it")
        if name in seen:
            raise _refusal(parameters, expected[name].tensor, "duplicate-array", f"{file} holds {name} a second time")
        seen.add(name)


def _check_values(
    parameters: ParameterSet,
    planes: list[Plane],
    matrices: MatrixReader,
    before_piece: Callable[[], None] = lambda: None,
) -> None:
    for plane in planes:
        before_piece()
        scales, zero_points = matrices.grid(plane)
        smallest = f"at least {SMALLEST_SCALE:.3g}, for engines may take smaller ones as zero"
        top = 2**plane.bits - 1
        for rule, array, values, good, allowed in (
            ("scale-finite", plane.scales, scales, np.isfinite(scales), "finite numbers"),
            ("scale-positive", plane.scales, scales, scales > 0, "positive numbers"),
            ("scale-denormal", plane.scales, scales, scales >= SMALLEST_SCALE, smallest),
            ("zero-point-range", plane.zero_points, zero_points, zero_points <= top, f"0 to {top}"),
        ):
            if not good.all():
                message = f"{array} {_first_bad(values, good)}; allowed are {allowed}"
                raise _refusal(parameters, plane.tensor, rule, message)


def _first_bad(values: NDArray[Any], good: NDArray[np.bool_]) -> str:
    row, group = (int(index) for index in np.argwhere(~good)[0])
    return f"is {values[row, group]!s} in row {row}, group {group}"


def _refusal(parameters: ParameterSet, tensor: str, rule: str, message: str) -> ParameterSetError:
    return ParameterSetError(f"{parameters.directory}: tensor {tensor}: {message}", rule=rule, tensor=tensor)
