"""What the files of the watched directory mean together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dskd import quant_config
from dskd.quant_config import QuantConfig

TOLD_NAMES = 10


class DropIns:
    """The last good content of each file. A damaged file keeps it in effect until it is mended or removed."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._configs: dict[str, QuantConfig] = {}

    @property
    def texts(self) -> Mapping[str, str]:
        """The last good content of each file, by name."""
        return self._texts

    def put(self, name: str, text: str, config: QuantConfig) -> None:
        """The file has got this content, which means `config`."""
        self._texts[name] = text
        self._configs[name] = config

    def remove(self, name: str) -> None:
        self._texts.pop(name, None)
        self._configs.pop(name, None)

    def model_of(self, name: str) -> str:
        """The model that the last good content of a file is for; "" when it never had one."""
        config = self._configs.get(name)
        return config.model if config else ""

    def desired(self) -> dict[str, QuantConfig]:
        """By model, what its files say together."""
        models = {config.model for config in self._configs.values()}
        return {
            model: quant_config.merge([(name, self._configs[name]) for name in self.files_of(model)])
            for model in models
        }

    def files_of(self, model: str) -> list[str]:
        """The names of the files for `model`, in the order in which they are merged."""
        return sorted(name for name, config in self._configs.items() if config.model == model)


def shown(name: str) -> str:
    """A file name as it may stand in messages: what cannot be printed is replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


def names_of(files: Iterable[str]) -> str:
    """Several file names as one text, which names a few of them if there are many."""
    names = [shown(name) for name in files]
    more = len(names) - TOLD_NAMES
    return ",".join(names[:TOLD_NAMES]) + (f" and {more} more" if more > 0 else "")
