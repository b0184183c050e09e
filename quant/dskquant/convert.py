"""From a source model to a model store, or to nothing: a store is written aside and renamed when it is complete."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dskquant import golden, set_writer
from dskquant.architecture import DecoderConfig
from dskquant.aside import check_destination, written_aside
from dskquant.decoder import EMBEDDING, LM_HEAD, tensor_shapes
from dskquant.engines import ENGINE_NAMES, load_engine
from dskquant.errors import SchemeError, SourceError, StoreError
from dskquant.fields import Fields
from dskquant.parameter_set import Progress
from dskquant.scheme import GROUP_SIZES, Role, Scheme, TensorScheme
from dskquant.sources import OpenVINOIRSource, Source, TensorSource, open_source
from dskquant.staging import StagedWeight, stage_weights
from dskquant.store import (
    CONFIG,
    DEFAULT_PARAMETER_SET,
    GENERATION_CONFIG,
    GOLDEN,
    IR_XML,
    StoreManifest,
    file_sha256,
)

SCRATCH = ".weights"
GOLDEN_LIMIT = 2 << 30
"""Bytes that the weights of an FP32 graph may take for the golden prompts to be answered during a conversion."""

GOLDEN_SKIPPED = (
    "the reference has not answered the golden prompts, {why}: "
    "the daemon will prove each mode against the most exact one proven so far"
)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert; the defaults keep what the source has."""

    dtype: str | None = None  # of the stored weights; None: that of the source, f32 for quantized GGUF types
    model_id: str | None = None  # None: the name of the source
    scheme: Scheme = field(default_factory=Scheme)  # of the default parameter set
    golden: bool = True  # keep the reference's answers to the golden prompts, if its graph fits into GOLDEN_LIMIT
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
    check_destination(store, options.replace)
    opened = open_source(source)
    check_scheme(options.scheme, opened.decoder)
    with written_aside(store) as partial:
        opened.write_tokenizer(partial)
        _check_tokenizer(opened, partial)
        stored = _write_model(opened, partial, options.dtype, progress)
        _write_json(partial / CONFIG, opened.config)
        _write_json(partial / GENERATION_CONFIG, opened.generation_config)
        model_id = options.model_id or source.resolve().name.removesuffix(".gguf")
        manifest = _manifest(opened, stored, model_id, _digests(partial, progress))
        manifest.write(partial)  # what follows reads the store through it
        set_writer.create(partial, options.scheme, partial / DEFAULT_PARAMETER_SET, progress)
        skipped = _why_no_golden(options, stored)
        if not skipped:
            manifest = _with_golden(partial, manifest, progress)
    return Conversion(manifest, (*_notes(opened.decoder), *skipped))


def check_scheme(scheme: Scheme, decoder: DecoderConfig) -> None:
    """Raises SchemeError, naming the tensor and what is allowed, where `scheme` does not fit the linear layers."""
    layers = _linear_layers(scheme, decoder)
    fitting = [size for size in GROUP_SIZES if all(_divides(size, layer.shape[1]) for layer in layers.values())]
    for name, layer in layers.items():
        columns = layer.shape[1]
        if columns % 2:
            raise SchemeError(f"{name}: rows of {columns} weights: an odd number cannot be packed two to a byte")
        if not _divides(layer.group_size, columns):
            raise SchemeError(
                f"{name}: group size {layer.group_size} does not divide rows of {columns}; "
                f"what divides all rows of this model: {', '.join(map(str, fitting))} (0: per channel)"
            )
    for pattern in scheme.int8_layers:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in layers):
            raise SchemeError(f"no linear layer matches {pattern!r}; there are {', '.join(list(layers)[:7])} and so on")


def _linear_layers(scheme: Scheme, decoder: DecoderConfig) -> dict[str, TensorScheme]:
    matrices = {name: shape for name, shape in tensor_shapes(decoder).items() if len(shape) == 2}
    return {
        name: scheme.for_tensor(name, Role.LINEAR, (shape[0], shape[1]))
        for name, shape in matrices.items()
        if name not in (EMBEDDING, LM_HEAD)
    }


def _divides(group_size: int, columns: int) -> bool:
    return columns % (group_size or columns) == 0


def _check_tokenizer(source: Source, store: Path) -> None:
    try:
        prompts = golden.encode_prompts(store)
    except Exception as error:  # the library raises no narrower type for what it cannot read or encode
        raise SourceError(f"{source.path}: its tokenizer cannot be used: {error}") from error
    highest = max(max(prompt, default=-1) for prompt in prompts)
    if not 0 <= highest < source.decoder.vocab_size:
        raise SourceError(
            f"{source.path}: its tokenizer gives token {highest} where the model has {source.decoder.vocab_size}"
        )


def _why_no_golden(options: ConvertOptions, stored: _Stored) -> tuple[str, ...]:
    """A note where the reference is not asked; nothing where it is."""
    needed = stored.parameters * 4
    if not options.golden:
        return (GOLDEN_SKIPPED.format(why="as asked for"),)
    if needed > GOLDEN_LIMIT:
        gibibytes = f"{needed / 2**30:.1f} GiB, more than {GOLDEN_LIMIT / 2**30:g} GiB"
        return (GOLDEN_SKIPPED.format(why=f"for its weights take {gibibytes}"),)
    return ()


def _with_golden(store: Path, manifest: StoreManifest, progress: Progress) -> StoreManifest:
    """Asks the reference, and lists its answers in the manifest."""
    progress("golden prompts", 0, 1)
    golden.create(store, load_engine(ENGINE_NAMES[0]))
    manifest = replace(manifest, sha256={**manifest.sha256, GOLDEN: file_sha256(store / GOLDEN)})
    manifest.write(store)
    progress("golden prompts", 1, 1)
    return manifest


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
