"""The model store: one directory per model, written once by `dskquant convert`, read by everything else.

STORE/
  manifest.json                 what this is (`StoreManifest`)
  openvino_model.xml, .bin      standard stateful OpenVINO IR in the dtype of the source
  config.json                   the Hugging Face configuration of the model
  generation_config.json        its special tokens
  tokenizer.json                for the `tokenizers` library
  chat_template.jinja           where the source has one
  golden.safetensors            the answers of the reference to the golden prompts (`dskquant.golden`)
  parameter_sets/default/       scales, zero-points and codes of both planes (`dskquant.parameter_set`)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dskquant.errors import SourceError, StoreError
from dskquant.fields import Fields, is_text

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
IR_XML = "openvino_model.xml"
IR_BIN = "openvino_model.bin"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GOLDEN = "golden.safetensors"
DEFAULT_PARAMETER_SET = Path("parameter_sets") / "default"

TEXTS = ("model_id", "architecture", "dtype")
COUNTS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "context_length",
)
LARGEST_COUNT = 2**31 - 1
MOST_PARAMETERS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoreManifest:
    """Identity and shape of a stored model."""

    model_id: str
    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    dtype: str  # of the stored weights: "f16", "bf16" or "f32"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # tokens, prompt and answer together
    parameters: int  # weights, tied ones counted once
    bos_token_id: int | None
    end_token_ids: tuple[int, ...]
    source: dict[str, str] = field(default_factory=dict)  # kind, name
    sha256: dict[str, str] = field(default_factory=dict)  # file name -> hex digest
    format_version: int = FORMAT_VERSION

    @property
    def weights_sha256(self) -> str:
        """Digest of the stored weights: parameter sets name it to say what they were made for.

        Raises StoreError when the manifest does not list them.
        """
        if IR_BIN not in self.sha256:
            raise StoreError(f"{MANIFEST}: sha256 does not list {IR_BIN}; convert the model again")
        return self.sha256[IR_BIN]

    def write(self, store: Path) -> None:
        (store / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, store: Path) -> StoreManifest:
        """Reads the manifest of `store`. Raises StoreError when it is missing, damaged or of another version."""
        path = store / MANIFEST
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"{store} is not a model store: no {MANIFEST}; make one with `dskquant convert`") from None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from error
        if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
            raise StoreError(f"{path}: format_version must be {FORMAT_VERSION}; convert the model again")
        known = {item.name for item in fields(cls)}
        if raw.keys() != known:
            odd = ", ".join(sorted(raw.keys() ^ known))
            raise StoreError(f"{path}: missing or unknown keys: {odd}")
        try:
            _check(Fields(raw, str(path)))
        except SourceError as error:
            raise StoreError(str(error)) from error
        raw["end_token_ids"] = tuple(raw["end_token_ids"])
        return cls(**raw)


def _check(manifest: Fields) -> None:
    """Raises SourceError, naming the key, for a value that nothing could work with."""
    for key in TEXTS:
        if not is_text(manifest.values[key]):
            raise manifest.refusal(key, "must be a text")
    for key in COUNTS:
        manifest.count(key, largest=LARGEST_COUNT)
    manifest.count("parameters", largest=MOST_PARAMETERS)
    _check_token_ids(manifest)
    for key in ("source", "sha256"):
        table = manifest.values[key]
        if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
            raise manifest.refusal(key, "must be a table of texts")
    for name in manifest.values["sha256"]:
        if Path(name).name != name:
            raise manifest.refusal("sha256", f"has {name!r}, which is not the name of a file of the store")


def _check_token_ids(manifest: Fields) -> None:
    ends, bos = manifest.values["end_token_ids"], manifest.values["bos_token_id"]
    size = manifest.values["vocab_size"]
    if not isinstance(ends, list) or not all(_is_token(item, size) for item in ends):
        raise manifest.refusal("end_token_ids", f"must be a list of token ids below {size}, the size of the vocabulary")
    if bos is not None and not _is_token(bos, size):
        raise manifest.refusal("bos_token_id", f"must be null or a token id below {size}, the size of the vocabulary")


def _is_token(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def verify(store: Path, manifest: StoreManifest) -> None:
    """Raises StoreError for the first file of the manifest that is missing or another one.

    The weights, which take long to read, must be there but are not read: `dskquant inspect --verify` does.
    """
    for name, expected in manifest.sha256.items():
        path = store / name
        if not path.is_file():
            raise StoreError(f"{path}: missing")
        if name != IR_BIN and file_sha256(path) != expected:
            raise StoreError(f"{path}: damaged: its SHA-256 is not the one in {MANIFEST}")


def file_sha256(path: Path, before_piece: Callable[[], None] = lambda: None) -> str:
    """Hex SHA-256 of a file, read in pieces; what `before_piece` raises ends it."""
    return files_sha256((path,), before_piece)


def files_sha256(paths: Iterable[Path], before_piece: Callable[[], None] = lambda: None) -> str:
    """`file_sha256` of the bytes of several files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                before_piece()
                digest.update(piece)
    return digest.hexdigest()
