"""The store of a plain graph: one directory, written once by `dskquant convert`, read by everything else.

STORE/
  manifest.json     what this is (`PlainManifest`)
  fp32.onnx         the graph as it was given; fp32.xml and fp32.bin where that was an OpenVINO IR
  fp16.onnx, int8.onnx, int4.onnx   the modes that were made of it
  golden.npz        inputs ("in.NAME") and what FP32 answers to them ("out.NAME")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dskquant.errors import StoreError, TensorError
from dskquant.modes import REFERENCE, PrecisionMode
from dskquant.plain.manifest_fields import ManifestFields, read_json
from dskquant.plain.noise import MOST_DB, GraphNoise
from dskquant.plain.npz import load_npz
from dskquant.plain.protocol import Tensors, TensorSpec, check_tensors
from dskquant.store import MANIFEST, files_sha256

FORMAT = "dskd-plain-store"
VERSION = 1
GOLDEN = "golden.npz"
RANDOM = "random"
INPUT_PREFIX, OUTPUT_PREFIX = "in.", "out."
KEYS = ("format", "version", "name", "source_sha256", "batch_axis", "inputs", "outputs", "graphs", "calibration")
MOST_TENSORS = 1024
MOST_GOLDEN_BYTES = 256 << 20
LONGEST_TEXT = 1000
LARGEST_SIZE = 2**31 - 1
MOST_BYTES = 2**50
MOST_RANK = 16
DTYPES = {name: np.dtype(name) for name in ("bool", "float16", "float32", "float64")} | {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}


def graph_files(path: Path) -> tuple[Path, ...]:
    """The files of the graph at `path`: an IR has two."""
    return (path, path.with_suffix(".bin")) if path.suffix == ".xml" else (path,)


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """One precision mode of a store."""

    file: str  # MODE.onnx, or MODE.xml with a MODE.bin beside it
    sha256: str  # of the file; of an IR, of the bytes of .xml and .bin one after the other
    nbytes: int  # of the file; of an IR, of both
    method: str  # how it was made: "as given", "static QDQ", "dynamic", ...
    noise: GraphNoise | None  # against FP32, on the calibration data; None for FP32 itself

    def files(self, directory: Path) -> tuple[Path, ...]:
        """What `sha256` and `nbytes` are of."""
        return graph_files(directory / self.file)

    def verify(self, directory: Path) -> None:
        """Raises StoreError when a file is missing, or is not the one that was written."""
        for path in self.files(directory):
            if not path.is_file():
                raise StoreError(f"{path}: missing")
        if files_sha256(self.files(directory)) != self.sha256:
            raise StoreError(f"{directory / self.file}: damaged: its SHA-256 is not the one in {MANIFEST}")


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """What the graphs were calibrated on, and their noise was measured on."""

    source: str  # the name of a file, or "random"
    rows: int

    @property
    def is_random(self) -> bool:
        """Noise measured on random inputs says little about real ones."""
        return self.source == RANDOM


@dataclass(frozen=True, slots=True)
class PlainManifest:
    """Identity and modes of a stored plain graph."""

    name: str
    source_sha256: str  # of the file that was converted
    batch_axis: int | None  # 0: all inputs and outputs have as many rows, each computed for itself; None: one run each
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graphs: Mapping[PrecisionMode, StoredGraph]  # FP32 is always there
    calibration: CalibrationData

    @classmethod
    def read(cls, directory: Path) -> PlainManifest:
        """Raises StoreError, naming file and field, when the manifest is missing, damaged or of another version."""
        fields = read_json(directory / MANIFEST)
        fields.check_keys(*KEYS)
        fields.equals("format", FORMAT)
        fields.equals("version", VERSION)
        return cls(
            fields.text("name", LONGEST_TEXT),
            fields.sha256("source_sha256"),
            fields.one_of("batch_axis", (0, None)),
            _read_specs(fields, "inputs"),
            _read_specs(fields, "outputs"),
            _read_graphs(fields.table("graphs")),
            _read_calibration(fields.table("calibration")),
        )

    def write(self, directory: Path) -> None:
        (directory / MANIFEST).write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """What stands in the manifest."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source_sha256": self.source_sha256,
            "batch_axis": self.batch_axis,
            "inputs": [_spec_json(spec) for spec in self.inputs],
            "outputs": [_spec_json(spec) for spec in self.outputs],
            "graphs": {mode.value: asdict(graph) for mode, graph in self.graphs.items()},
            "calibration": asdict(self.calibration),
        }


@dataclass(frozen=True, slots=True)
class PlainGolden:
    """Inputs, and what FP32 answered to them, in one run. With a batch axis all of them have the same rows."""

    inputs: Tensors
    outputs: Tensors


def is_plain_store(directory: Path) -> bool:
    """Whether `directory` says that it holds a plain graph, be it damaged or not."""
    try:
        return read_json(directory / MANIFEST).values.get("format") == FORMAT
    except StoreError:
        return False


def write_golden(directory: Path, golden: PlainGolden) -> None:
    tensors: dict[str, NDArray[Any]] = {INPUT_PREFIX + name: tensor for name, tensor in golden.inputs.items()}
    tensors |= {OUTPUT_PREFIX + name: tensor for name, tensor in golden.outputs.items()}
    with (directory / GOLDEN).open("wb") as file:
        np.savez(file, allow_pickle=False, **tensors)


def read_golden(directory: Path) -> PlainGolden:
    """Raises StoreError when it is missing or damaged, or does not fit the manifest, which is read too."""
    manifest, path = PlainManifest.read(directory), directory / GOLDEN
    tensors = load_npz(path, MOST_GOLDEN_BYTES, StoreError)
    inputs = {name[len(INPUT_PREFIX) :]: array for name, array in tensors.items() if name.startswith(INPUT_PREFIX)}
    outputs = {name[len(OUTPUT_PREFIX) :]: array for name, array in tensors.items() if name.startswith(OUTPUT_PREFIX)}
    if len(inputs) + len(outputs) != len(tensors):
        raise StoreError(f"{path}: has arrays that are neither {INPUT_PREFIX}NAME nor {OUTPUT_PREFIX}NAME")
    try:
        check_tensors(manifest.inputs, inputs)
        check_tensors(manifest.outputs, outputs)
    except TensorError as error:
        raise StoreError(f"{path}: {error}") from error
    _check_rows(path, manifest, {**inputs, **outputs})
    return PlainGolden(inputs, outputs)


def _check_rows(path: Path, manifest: PlainManifest, tensors: Tensors) -> None:
    rows = {tensor.shape[0] for tensor in tensors.values()} if manifest.batch_axis == 0 else set()
    if len(rows) > 1:
        raise StoreError(f"{path}: its arrays have different numbers of rows: {', '.join(map(str, sorted(rows)))}")


def _spec_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype.name, "shape": list(spec.shape)}


def _read_specs(fields: ManifestFields, key: str) -> tuple[TensorSpec, ...]:
    specs = tuple(map(_read_spec, fields.tables(key, MOST_TENSORS)))
    if len({spec.name for spec in specs}) != len(specs):
        raise fields.refusal(key, "must have different names")
    return specs


def _read_spec(fields: ManifestFields) -> TensorSpec:
    fields.check_keys("name", "dtype", "shape")
    dtype = DTYPES[fields.one_of("dtype", tuple(DTYPES))]
    return TensorSpec(fields.text("name", LONGEST_TEXT), dtype, fields.sizes("shape", MOST_RANK, LARGEST_SIZE))


def _read_graphs(fields: ManifestFields) -> dict[PrecisionMode, StoredGraph]:
    known = {mode.value: mode for mode in PrecisionMode}
    for key in fields.values:
        if key not in known:
            raise fields.refusal(key, f"is no precision mode; known: {', '.join(known)}")
    if REFERENCE.value not in fields.values:
        raise fields.refusal(REFERENCE.value, "is missing")
    return {known[key]: _read_graph(known[key], fields.table(key)) for key in fields.values}


def _read_graph(mode: PrecisionMode, fields: ManifestFields) -> StoredGraph:
    fields.check_keys("file", "sha256", "nbytes", "method", "noise")
    if mode is REFERENCE:
        fields.equals("noise", None)
    return StoredGraph(
        fields.one_of("file", (f"{mode.value}.onnx", f"{mode.value}.xml")),
        fields.sha256("sha256"),
        fields.count("nbytes", 1, MOST_BYTES),
        fields.text("method", LONGEST_TEXT),
        None if mode is REFERENCE else _read_noise(fields.table("noise")),
    )


def _read_noise(fields: ManifestFields) -> GraphNoise:
    fields.check_keys("sqnr_db", "cosine", "top1")
    top1 = None if fields.values["top1"] is None else fields.number("top1", 0, 1)
    return GraphNoise(fields.number("sqnr_db", -MOST_DB, MOST_DB), fields.number("cosine", -1, 1), top1)


def _read_calibration(fields: ManifestFields) -> CalibrationData:
    fields.check_keys("source", "rows")
    return CalibrationData(fields.text("source", LONGEST_TEXT), fields.count("rows", 1, LARGEST_SIZE))
