"""Named arrays of an untrusted `.npz` file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import QuantError


def load_npz(path: Path, most_bytes: int, error: type[QuantError]) -> dict[str, NDArray[Any]]:
    """Raises `error` when it is missing or damaged, or unpacks to more than `most_bytes`. No pickle is read."""
    try:
        _check_size(path, most_bytes, error)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except error:
        raise
    except FileNotFoundError:
        raise error(f"{path}: missing") from None
    except Exception as problem:  # the libraries have a dozen unrelated types for it
        raise error(f"{path}: damaged, or no .npz file: {problem}") from problem


def _check_size(path: Path, most_bytes: int, error: type[QuantError]) -> None:
    """Asked first, for a few bytes may unpack to any size."""
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > most_bytes:
            raise error(f"{path}: unpacks to more than {most_bytes >> 20} MiB")
