"""What the benchmarks of the noise monitor read: the Python language reference, which comes with every Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from dskquant.calibration.calibrate import CalibrationOptions, calibrate
from dskquant.calibration.layers import Method
from dskquant.engines import load_engine
from dskquant.store import TOKENIZER

CALIBRATED_ON = 0.6
"""Share of the text that the parameter set is calibrated on; the rest is for measuring."""

CALIBRATION_TOKENS = 8192


def _parts() -> tuple[str, str]:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    cut = int(len(text) * CALIBRATED_ON)
    return text[:cut], text[cut:]


def held_out(store: Path) -> list[int]:
    """Tokens that no calibration has seen."""
    ids: list[int] = Tokenizer.from_file(str(store / TOKENIZER)).encode(_parts()[1]).ids
    return ids


def prompts(store: Path, length: int) -> Iterator[tuple[int, ...]]:
    """Different pieces of `length` tokens of the held-out text, for ever."""
    tokens = held_out(store)
    stride = 7 * length + 1
    for begin in itertools.count(0, stride):
        first = begin % (len(tokens) - length)
        yield tuple(tokens[first : first + length])


def calibrated_set(store: Path, folder: Path) -> Path:
    """A parameter set for `store` with searched ranges, which knows its expected noise; made once."""
    destination = folder / "calibrated"
    if not destination.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "calibration.txt"
        text.write_text(_parts()[0], encoding="utf-8")
        options = CalibrationOptions(method=Method.SEARCH, tokens=CALIBRATION_TOKENS)
        calibrate(store, text, destination, options, load_engine("openvino"), lambda *_: None)
    return destination
