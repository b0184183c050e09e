"""Model sources, told apart by what is in the file or directory."""

from __future__ import annotations

from pathlib import Path

from dskquant.errors import SourceError
from dskquant.sources.genai import GENAI_CONFIG, GenaiSource
from dskquant.sources.gguf import GGUFSource
from dskquant.sources.gguf_header import MAGIC
from dskquant.sources.huggingface import HuggingFaceSource
from dskquant.sources.openvino_ir import OpenVINOIRSource
from dskquant.sources.protocol import Source, SourceTensor, TensorSource
from dskquant.store import CONFIG, IR_XML

__all__ = ["OpenVINOIRSource", "Source", "SourceTensor", "TensorSource", "open_source"]


def open_source(path: Path) -> TensorSource | OpenVINOIRSource:
    """Opens a GGUF file or a directory of Hugging Face, OpenVINO or onnxruntime-genai.

    Raises SourceError for anything else.
    """
    if not path.exists():
        raise SourceError(f"{path}: no such file or directory")
    if path.is_dir():
        return _open_directory(path)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return GGUFSource(path)
    raise SourceError(f"{path}: not a GGUF file; of a Hugging Face model or an OpenVINO IR give the directory")


def _open_directory(path: Path) -> TensorSource | OpenVINOIRSource:
    if (path / IR_XML).is_file():
        return OpenVINOIRSource(path)
    if (path / GENAI_CONFIG).is_file():
        return GenaiSource(path)
    if (path / CONFIG).is_file():
        return HuggingFaceSource(path)
    hint = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
    advice = f"; give one of its files: {hint}" if hint else ""
    raise SourceError(f"{path}: none of {CONFIG}, {IR_XML} and {GENAI_CONFIG} in it{advice}")
