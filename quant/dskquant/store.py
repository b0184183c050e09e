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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dskquant.errors import StoreError

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
        """Digest of the stored weights: parameter sets name it to say what they were made for."""
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
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read: {error}") from error
        if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
            raise StoreError(f"{path}: format_version must be {FORMAT_VERSION}; convert the model again")
        known = {item.name for item in fields(cls)}
        if raw.keys() != known:
            odd = ", ".join(sorted(raw.keys() ^ known))
            raise StoreError(f"{path}: missing or unknown keys: {odd}")
        raw["end_token_ids"] = tuple(raw["end_token_ids"])
        return cls(**raw)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
