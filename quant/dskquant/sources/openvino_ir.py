"""An OpenVINO IR directory as `optimum-cli export openvino --weight-format fp16` writes it: taken as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dskquant.architecture import DecoderConfig, read_decoder
from dskquant.sources.directory import copy_tokenizer, read_config, read_generation_config
from dskquant.store import CONFIG, IR_BIN, IR_XML


class OpenVINOIRSource:
    """Raises SourceError, naming the file, where the configuration cannot be used."""

    kind = "openvino"

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: dict[str, Any] = read_config(directory)
        self.decoder: DecoderConfig = read_decoder(self.config, str(directory / CONFIG))

    @property
    def generation_config(self) -> dict[str, Any]:
        return read_generation_config(self.path, self.config)

    def write_tokenizer(self, store: Path) -> None:
        copy_tokenizer(self.path, store)

    def copy_model(self, store: Path) -> None:
        for name in (IR_XML, IR_BIN):
            shutil.copyfile(self.path / name, store / name)
