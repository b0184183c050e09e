"""What a model can be converted from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from dskquant.architecture import DecoderConfig
from dskquant.decoder import Shape
from dskquant.errors import SourceError

PIECE_ELEMENTS = 1 << 22
"""Values of a tensor handled at a time: bounds the memory of work on a large matrix (16 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One weight of a source; its values are read in pieces of whole rows."""

    origin: str  # file and name in it, for errors
    shape: Shape
    dtype: str  # of the values that `rows` gives: "f16", "bf16" or "f32"
    kept_dtype: str  # what they are stored as unless another dtype is asked for
    rows: Callable[[int, int], NDArray[Any]]  # (first, past the last) along the first axis
    mapped: NDArray[Any] | None  # all the values as they lie in the mapped file, where they need no work

    def pieces(self) -> Iterator[NDArray[Any]]:
        """All values in order, about `PIECE_ELEMENTS` at a time."""
        elements = 1
        for dimension in self.shape[1:]:
            elements *= dimension
        step = max(1, PIECE_ELEMENTS // max(1, elements))
        for first in range(0, self.shape[0], step):
            yield self.rows(first, min(first + step, self.shape[0]))

    @classmethod
    def of_mapped(cls, origin: str, values: NDArray[Any], dtype: str) -> SourceTensor:
        """A tensor whose values in the file are the weights."""
        return cls(origin, values.shape, dtype, dtype, lambda first, last: values[first:last], values)


class Source(Protocol):
    """A model to convert."""

    @property
    def kind(self) -> str:
        """ "gguf", "huggingface", "openvino" or "onnxruntime-genai"."""
        ...

    @property
    def path(self) -> Path: ...
    @property
    def decoder(self) -> DecoderConfig: ...
    @property
    def config(self) -> dict[str, Any]:
        """As config.json holds it."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """As generation_config.json holds it."""
        ...

    def write_tokenizer(self, store: Path) -> None:
        """Writes tokenizer.json and, where there is one, chat_template.jinja into `store`."""
        ...


class TensorSource(Source, Protocol):
    """A source that gives single weights."""

    def check_tensors(self, expected: Mapping[str, Shape]) -> None:
        """Raises SourceError when a weight is missing or of another shape, or one is unknown to the decoder."""
        ...

    def tensor(self, name: str) -> SourceTensor:
        """The weight with the Hugging Face name `name`. Raises SourceError when its dtype is not supported."""
        ...


def refuse_differences(
    where: str, present: Mapping[str, Shape], expected: Mapping[str, Shape], ignored: Collection[str]
) -> None:
    """Raises SourceError naming weights that are missing, unknown (and not `ignored`), or not of the expected shape."""
    missing = sorted(expected.keys() - present.keys())
    unknown = sorted(present.keys() - expected.keys() - set(ignored))
    if missing:
        raise SourceError(f"{where}: {len(missing)} tensors are missing: {_shortened(missing)}")
    if unknown:
        raise SourceError(f"{where}: {len(unknown)} tensors are not part of this architecture: {_shortened(unknown)}")
    for name, shape in expected.items():
        if present[name] != shape:
            raise SourceError(f"{where}: tensor {name}: shape {list(present[name])}, expected {list(shape)}")


def _shortened(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
