"""A Hugging Face directory: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from dskquant.decoder import LM_HEAD, Shape
from dskquant.errors import SourceError
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.sources.directory import DirectorySource, read_json
from dskquant.sources.protocol import SourceTensor, refuse_differences

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
COMPUTED_BUFFER = "rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the configuration


class HuggingFaceSource(DirectorySource):
    """Raises SourceError, naming the file, for anything in the directory that cannot be used."""

    kind = "huggingface"

    def check_tensors(self, expected: Mapping[str, Shape]) -> None:
        present = {name: self._opened[path].shape(name) for name, path in self._files.items()}
        # A checkpoint of a tied model may carry the shared matrix twice.
        ignored = {name for name in present if name.endswith(COMPUTED_BUFFER)} | {LM_HEAD}
        refuse_differences(str(self.path), present, expected, ignored)

    def tensor(self, name: str) -> SourceTensor:
        path = self._files[name]
        file = self._opened[path]
        dtype = FLOATS.get(file.dtype(name))
        if dtype is None:
            raise SourceError(f"{path}: tensor {name}: dtype {file.dtype(name)}; supported: {', '.join(FLOATS)}")
        return SourceTensor.of_mapped(f"{path}: tensor {name}", file.array(name), dtype)

    @cached_property
    def _opened(self) -> dict[Path, MappedSafetensors]:
        return {path: MappedSafetensors(path) for path in sorted(set(self._paths))}

    @property
    def _paths(self) -> list[Path]:
        if (self.path / INDEX).is_file():
            return [self._shard(name) for name in self._weight_map.values()]
        if (self.path / SINGLE_FILE).is_file():
            return [self.path / SINGLE_FILE]
        raise SourceError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX}; only safetensors are read, never pickles")

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        files = {name: path for path, file in self._opened.items() for name in file.names}
        if (self.path / INDEX).is_file():
            for name, shard in self._weight_map.items():
                if name not in self._opened[self._shard(shard)].names:
                    raise SourceError(f"{self._shard(shard)}: tensor {name}, which {INDEX} places here, is missing")
        return files

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise SourceError(f"{self.path / INDEX}: weight_map must map tensors to files")
        return weight_map

    def _shard(self, name: str) -> Path:
        if Path(name).name != name:
            raise SourceError(f"{self.path / INDEX}: {name!r} is not a file beside it")
        if not (self.path / name).is_file():
            raise SourceError(f"{self.path / name}: missing, though {INDEX} names it")
        return self.path / name
