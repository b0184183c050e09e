"""An OpenVINO IR directory as `optimum-cli export openvino --weight-format fp16` writes it: taken as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from dskquant.sources.directory import DirectorySource
from dskquant.store import IR_BIN, IR_XML


class OpenVINOIRSource(DirectorySource):
    """Raises SourceError, naming the file, where the configuration cannot be used."""

    kind = "openvino"

    def copy_model(self, store: Path) -> None:
        for name in (IR_XML, IR_BIN):
            shutil.copyfile(self.path / name, store / name)
