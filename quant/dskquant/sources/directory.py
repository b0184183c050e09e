"""The files that a Hugging Face directory and an OpenVINO export of one have in common."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.errors import SourceError
from dskquant.store import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises SourceError naming the file when it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: not a JSON object")
    return value


def read_generation_config(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json; its special tokens, where it lacks them, from config.json."""
    path = directory / GENERATION_CONFIG
    fallback = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
    return {**fallback, **(read_json(path) if path.exists() else {})}


def copy_tokenizer(directory: Path, store: Path) -> None:
    """Copies tokenizer.json and the chat template. Raises SourceError where the model has no fast tokenizer."""
    path = directory / TOKENIZER
    if not path.is_file():
        raise SourceError(f"{path}: missing; save the model with its fast tokenizer (AutoTokenizer.save_pretrained)")
    shutil.copyfile(path, store / TOKENIZER)
    template = _chat_template(directory)
    if template is not None:
        (store / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _chat_template(directory: Path) -> str | None:
    path = directory / CHAT_TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = directory / TOKENIZER_CONFIG
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several templates, each with a name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise SourceError(f"{path}: chat_template must be a text, or a list with one named default")
    return template


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / CONFIG)


class DirectorySource:
    """What every source in a directory with a Hugging Face configuration has."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: dict[str, Any] = read_config(directory)
        self.decoder: DecoderConfig = read_decoder(self.config, str(directory / CONFIG))

    @property
    def generation_config(self) -> dict[str, Any]:
        return read_generation_config(self.path, self.config)

    def write_tokenizer(self, store: Path) -> None:
        copy_tokenizer(self.path, store)
