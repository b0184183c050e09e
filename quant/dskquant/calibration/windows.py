"""The text of a calibration: cut into windows that each start afresh, some of them held out to measure on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dskquant.errors import QuantError, SourceError
from dskquant.store import TOKENIZER, StoreManifest

WINDOW = 512
MOST_HELD_OUT = 2048
"""Tokens; enough for a mean divergence that is good to a few percent."""

Window = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of one length."""

    calibration: tuple[Window, ...]
    held_out: tuple[Window, ...]
    sha256: str  # of the file

    @property
    def tokens(self) -> int:
        """Tokens that are calibrated on."""
        return sum(map(len, self.calibration))


def read_text(store: Path, path: Path, tokens: int, seed: int) -> CalibrationText:
    """The last fifth of the text is held out (at most MOST_HELD_OUT tokens); of what is before it, windows that `seed`
    chooses, `tokens` tokens in all or as many as there are.

    Raises SourceError when the file cannot be read, QuantError when it has less than two windows.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    length = min(WINDOW, StoreManifest.read(store).context_length)
    ids: list[int] = Tokenizer.from_file(str(store / TOKENIZER)).encode(data.decode("utf-8", errors="replace")).ids
    windows = [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]
    if len(windows) < 2:
        raise QuantError(
            f"{path}: too short: {len(ids)} tokens; at least {2 * length} are needed to calibrate and to measure, "
            f"and {32 * length} or more are better"
        )
    held_out = max(1, min(len(windows) // 5, MOST_HELD_OUT // length))
    before, last = windows[:-held_out], windows[-held_out:]
    wanted = min(len(before), max(1, tokens // length))
    chosen = sorted(np.random.default_rng(seed).permutation(len(before))[:wanted].tolist())
    return CalibrationText(tuple(before[index] for index in chosen), tuple(last), hashlib.sha256(data).hexdigest())
