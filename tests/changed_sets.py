"""Parameter sets that differ from another one in some scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dskquant.store import MANIFEST, file_sha256

Scales = NDArray[np.float16]


def changed_set(source: Path, destination: Path, change: Callable[[str, Scales], Scales]) -> Path:
    """A copy of the set at `source` whose scales are what `change` makes of each array of them, given its name."""
    shutil.copytree(source, destination)
    manifest = json.loads((destination / MANIFEST).read_text(encoding="utf-8"))
    for name in manifest["sha256"]:
        path = destination / name
        arrays = load_file(path)
        save_file({key: change(key, old) if key.endswith(".scales") else old for key, old in arrays.items()}, path)
        manifest["sha256"][name] = file_sha256(path)
    (destination / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return destination


def scaled(part: str, factor: float) -> Callable[[str, Scales], Scales]:
    """Multiplies the scales of the tensors whose name contains `part`."""
    return lambda name, scales: (scales * np.float16(factor)) if part in name else scales
