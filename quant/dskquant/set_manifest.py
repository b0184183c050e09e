"""Reads the manifest.json of a parameter set, as untrusted as any file that somebody drops into a directory."""

from __future__ import annotations

import json
import os
import reprlib
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dskquant.errors import ParameterSetError, ParameterSetMissingError, SchemeError
from dskquant.modes import PrecisionMode
from dskquant.planes import group_length
from dskquant.scheme import GROUP_SIZES, Role, TensorScheme
from dskquant.store import DEFAULT_PARAMETER_SET

FORMAT_VERSION = 2
MOST_BYTES = 2 << 20
"""Of a manifest, and of the header of a file of tensors: three times those of a model of 80 layers in one file.

While JSON is read, all other threads wait.
"""

STORE_KEYS = {"architecture", "num_layers"}
"""Of the manifest of a model store, which has the same name."""

SUFFIX = ".safetensors"
LONGEST_TENSOR_NAME = 400
"""Characters; the arrays of a tensor have longer names, of at most `mapped_safetensors.LONGEST_NAME`."""

LONGEST_FILE_NAME = 255  # bytes: NAME_MAX

KINDS: dict[str, type] = {
    "model_id": str,
    "weights_sha256": str,
    "tensors": dict,
    "sha256": dict,
    "codes": str,
    "expected_kl": dict,
    "provenance": dict,
}
TENSOR_KINDS: dict[str, type] = {
    "role": str,
    "shape": list,
    "bits": int,
    "group_size": int,
    "symmetric": bool,
    "always_residual": bool,
    "int8_plane": bool,
}
KIND_WORDS = {str: "a text", dict: "a table", list: "a list", int: "a whole number", bool: "true or false"}


def read_bytes(path: Path) -> bytes:
    """The bytes of the manifest at `path`.

    Raises ParameterSetMissingError when nothing is there, ParameterSetError for what is no file, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
            raise _unreadable(path, "is not a regular file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ParameterSetMissingError(f"{os.path.normpath(path)}: no parameter set is there") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {error}") from error
    if len(text) > MOST_BYTES:
        raise _unreadable(path, f"has more than {MOST_BYTES} bytes")
    return text


def parse(path: Path, text: bytes) -> dict[str, Any]:
    """The keys of a manifest, each of the right kind. Raises ParameterSetError for the first that is not."""
    try:
        raw = json.loads(text)
        json.dumps(raw, ensure_ascii=False).encode()  # JSON may hide half a surrogate pair in a text
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not a readable parameter set: {type(error).__name__}: {error}") from error
    if not isinstance(raw, dict):
        raise _unreadable(path, "not a readable parameter set: not a JSON object")
    if raw.keys() >= STORE_KEYS:
        message = f"is a model store, not a parameter set; its default set is in {DEFAULT_PARAMETER_SET}"
        raise ParameterSetError(f"{path.parent}: {message}", rule="manifest-unreadable")
    if raw.get("format_version") != FORMAT_VERSION:
        found = reprlib.repr(raw["format_version"]) if "format_version" in raw else "missing"
        raise ParameterSetError(
            f"{path}: format_version {found}; this version reads {FORMAT_VERSION}", rule="format-version"
        )
    _check_kinds(path, raw, KINDS)
    for name, digest in raw["sha256"].items():
        _check_file(path, name, digest)
    return raw


def expected_kl(path: Path, raw: Mapping[str, Any]) -> dict[PrecisionMode, float]:
    """The noise a set expects of each mode, in nats per token."""
    for mode, kl in raw.items():
        if mode not in {each.value for each in PrecisionMode}:
            raise _unreadable(path, f"expected_kl names {reprlib.repr(mode)}, which is no precision mode")
        if type(kl) not in (int, float) or not 0 <= kl <= sys.float_info.max:
            raise _unreadable(path, f"expected_kl of {mode} is {reprlib.repr(kl)}, not a finite number from 0 on")
    return {PrecisionMode(mode): float(kl) for mode, kl in raw.items()}


def tensor_scheme(path: Path, name: str, raw: Any) -> TensorScheme:
    """The scheme of the tensor `name`. Raises ParameterSetError, naming rule and tensor, for one that cannot be."""
    if len(name) > LONGEST_TENSOR_NAME:
        problem = f"has a name of {len(name)} characters; at most {LONGEST_TENSOR_NAME} are allowed"
        raise _refusal(path, f"{name[:60]}...", "manifest-unreadable", problem)
    if not isinstance(raw, dict):
        raise _refusal(path, name, "manifest-unreadable", "is not described by a table")
    _check_kinds(path, raw, TENSOR_KINDS, name)
    roles = {role.value: role for role in Role}
    if raw["role"] not in roles:
        raise _refusal(path, name, "role", f"role {reprlib.repr(raw['role'])}; allowed: {', '.join(roles)}")
    if raw["group_size"] not in GROUP_SIZES:
        allowed = f"allowed: {', '.join(map(str, GROUP_SIZES))} (0: per channel)"
        raise _refusal(path, name, "group-size", f"group_size {reprlib.repr(raw['group_size'])}; {allowed}")
    scheme = _scheme(path, name, roles[raw["role"]], raw)
    if raw["bits"] != scheme.bits:
        allowed = f"a tensor of role {scheme.role.value} has {scheme.bits}"
        raise _refusal(path, name, "bits-not-supported", f"bits {reprlib.repr(raw['bits'])}; {allowed}")
    return scheme


def _scheme(path: Path, name: str, role: Role, raw: Mapping[str, Any]) -> TensorScheme:
    flags = raw["symmetric"], raw["always_residual"], raw["int8_plane"]
    try:
        scheme = TensorScheme(role, tuple(raw["shape"]), raw["group_size"], *flags)
    except SchemeError as error:
        raise _refusal(path, name, "tensor-shape", str(error)) from error
    try:
        group_length(scheme.shape[1], scheme.group_size)
    except SchemeError as error:
        raise _refusal(path, name, "group-divides", str(error)) from error
    return scheme


def _check_kinds(path: Path, raw: Mapping[str, Any], kinds: Mapping[str, type], tensor: str = "") -> None:
    where = f"tensor {tensor}: " if tensor else ""
    for key, kind in kinds.items():
        if key not in raw:
            raise _unreadable(path, f"not a readable parameter set: {where}{key} is missing", tensor)
        if type(raw[key]) is not kind:
            raise _unreadable(path, f"not a readable parameter set: {where}{key} must be {KIND_WORDS[kind]}", tensor)


def _check_file(path: Path, name: str, digest: Any) -> None:
    is_name = Path(name).name == name and "\0" not in name and len(name.encode()) <= LONGEST_FILE_NAME
    if not is_name or not name.endswith(SUFFIX):
        told = f"{reprlib.repr(name)} is not the name of a file of the set, which are *{SUFFIX}"
        raise _unreadable(path, f"not a readable parameter set: {told}")
    if not isinstance(digest, str):
        raise _unreadable(path, f"not a readable parameter set: the SHA-256 of {name} must be a text")


def _unreadable(path: Path, message: str, tensor: str = "") -> ParameterSetError:
    return ParameterSetError(f"{path}: {message}", rule="manifest-unreadable", tensor=tensor)


def _refusal(path: Path, tensor: str, rule: str, message: str) -> ParameterSetError:
    return ParameterSetError(f"{path}: tensor {tensor}: {message}", rule=rule, tensor=tensor)
