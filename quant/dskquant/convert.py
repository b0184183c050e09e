"""From a source model to a model store, or to nothing: a store is written aside and renamed when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dskquant.architecture import DecoderConfig
from dskquant.decoder import tensor_shapes
from dskquant.errors import StoreError
from dskquant.fields import Fields
from dskquant.scheme import Scheme
from dskquant.sources import OpenVINOIRSource, Source, TensorSource, open_source
from dskquant.staging import Progress, StagedWeight, stage_weights
from dskquant.store import (
    CONFIG,
    DEFAULT_PARAMETER_SET,
    GENERATION_CONFIG,
    IR_XML,
    MANIFEST,
    StoreManifest,
    file_sha256,
)

SCRATCH = ".weights"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert; the defaults keep what the source has."""

    dtype: str | None = None  # of the stored weights; None: that of the source, f32 for quantized GGUF types
    model_id: str | None = None  # None: the name of the source
    scheme: Scheme = field(default_factory=Scheme)  # of the default parameter set
    replace: bool = False  # an existing store of that name


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished store, and what its user should know of it."""

    manifest: StoreManifest
    notes: tuple[str, ...]


def convert(source: Path, store: Path, options: ConvertOptions, progress: Progress) -> Conversion:
    """Converts the model at `source` into a new store at `store`.

    Raises SourceError for a source that cannot be used, SchemeError for a scheme that does not fit it, and StoreError
    when `store` exists already or cannot be written; whatever happens, `store` is either complete or as it was.
    """
    store = store.resolve()
    _check_destination(store, options.replace)
    opened = open_source(source)
    with _written_aside(store) as partial:
        stored = _write_model(opened, partial, options.dtype, progress)
        opened.write_tokenizer(partial)
        _write_json(partial / CONFIG, opened.config)
        _write_json(partial / GENERATION_CONFIG, opened.generation_config)
        model_id = options.model_id or source.resolve().name.removesuffix(".gguf")
        manifest = _manifest(opened, stored, model_id, _digests(partial, progress))
        manifest.write(partial)
        _write_parameter_set(partial, options.scheme, progress)
    return Conversion(manifest, _notes(opened.decoder))


def _check_destination(store: Path, replace: bool) -> None:
    if not store.exists():
        return
    if not replace:
        raise StoreError(f"{store} exists already; --force replaces it")
    if not (store / MANIFEST).is_file():
        raise StoreError(f"{store} is not a model store (no {MANIFEST}): it will not be replaced")


@contextmanager
def _written_aside(store: Path) -> Iterator[Path]:
    """A directory beside `store` that becomes it when the block ends well, and is removed when it does not."""
    partial = store.parent / f".{store.name}.partial-{os.getpid()}"
    store.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process of the same number, as in containers
    partial.mkdir()
    try:
        yield partial
        _sync(partial)
        _put_in_place(partial, store)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, store: Path) -> None:
    if not store.exists():
        partial.rename(store)
        _sync_directory(store.parent)
        return
    old = store.parent / f".{store.name}.old-{os.getpid()}"
    shutil.rmtree(old, ignore_errors=True)
    store.rename(old)
    try:
        partial.rename(store)
    except OSError:
        old.rename(store)
        raise
    _sync_directory(store.parent)
    shutil.rmtree(old)


def _write_model(
    source: TensorSource | OpenVINOIRSource, store: Path, dtype: str | None, progress: Progress
) -> _Stored:
    if isinstance(source, OpenVINOIRSource):
        return _copy_model(source, store, dtype)
    from dskquant.engines.openvino.emit import emit_ir

    shapes = tensor_shapes(source.decoder)
    source.check_tensors(shapes)
    scratch = store / SCRATCH
    weights = stage_weights(source, shapes, dtype, scratch, progress)
    progress("writing the model", 0, 1)
    emit_ir(source.decoder, weights, store / IR_XML)
    scratch.unlink()
    progress("writing the model", 1, 1)
    return _count(weights)


def _copy_model(source: OpenVINOIRSource, store: Path, dtype: str | None) -> _Stored:
    from dskquant.engines.openvino.stateful import inspect_ir

    weights = inspect_ir(source.path / IR_XML, source.decoder)
    if dtype not in (None, weights.dtype):
        raise StoreError(
            f"{source.path}: an OpenVINO IR is taken as it is, in {weights.dtype}; --dtype {dtype} needs its source"
        )
    source.copy_model(store)
    return _Stored(weights.dtype, weights.parameters)


def _count(weights: Mapping[str, StagedWeight]) -> _Stored:
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        sizes[weight.dtype] += weight.values.size
    return _Stored(sizes.most_common(1)[0][0], sizes.total())


def _manifest(source: Source, stored: _Stored, model_id: str, sha256: dict[str, str]) -> StoreManifest:
    decoder, tokens = source.decoder, Fields(source.generation_config, str(source.path))
    return StoreManifest(
        model_id=model_id,
        architecture=decoder.architecture,
        dtype=stored.dtype,
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        vocab_size=decoder.vocab_size,
        context_length=decoder.context_length,
        parameters=stored.parameters,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id")), None),
        end_token_ids=tokens.token_ids("eos_token_id"),
        source={"kind": source.kind, "name": source.path.resolve().name},
        sha256=sha256,
    )


def _notes(decoder: DecoderConfig) -> tuple[str, ...]:
    if decoder.context_length == decoder.max_positions:
        return ()
    cap = f"the context is {decoder.context_length} tokens instead of {decoder.max_positions}"
    return (f"{cap}: the sliding window of the model, within which attention is exact",)


def _digests(store: Path, progress: Progress) -> dict[str, str]:
    paths = sorted(store.iterdir())
    digests = {}
    for done, path in enumerate(paths):
        progress("hashing", done, len(paths))
        digests[path.name] = file_sha256(path)
    progress("hashing", len(paths), len(paths))
    return digests


def _write_parameter_set(store: Path, scheme: Scheme, progress: Progress) -> None:
    from dskquant import parameter_set

    parameter_set.create(store, scheme, store / DEFAULT_PARAMETER_SET, progress)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    """Makes everything below `directory` durable, so that the rename cannot be seen before the contents."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_directory(path)
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
