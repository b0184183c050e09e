"""Real plain graphs, which `make test` brings, and inputs for them like those they were made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CACHE = Path(__file__).parents[1] / ".cache"
DETECTOR = CACHE / "ppocr_det.onnx"  # finds lines of text in images; convolutions
RECOGNIZER = CACHE / "ppocr_rec.onnx"  # reads a line; convolutions and attention
VOICE = CACHE / "silero_vad.onnx"  # finds voices in sound; all of it in branches of an If
MAGIKA = CACHE / "magika.onnx"  # names the kind of a file; matrix products

WORDS = [
    "water",
    "lake",
    "still",
    "clear",
    "far",
    "shore",
    "old",
    "trees",
    "stood",
    "people",
    "waiting",
    "boat",
    "1234",
    "5678",
    "2026",
    "INVOICE",
    "Total",
    "99.50",
]
MEAN, SPREAD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
KINDS = (
    b"#!/bin/sh\necho %d\n",
    b"<html><body>%d</body></html>",
    b"%%PDF-1.7\n%d",
    b"import os\nprint(os.getpid(), %d)\n",
)

Arrays = dict[str, NDArray[Any]]


def present(path: Path) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing; `make test` brings it")
    return path


def pages(count: int, seed: int = 0, size: int = 160) -> Arrays:
    """Pages with three lines of text, [count, 3, size, size], as the detector wants them."""
    random = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        image = Image.new("RGB", (size, size), tuple(random.integers(180, 256, 3).tolist()))
        for line in range(3):
            _write(image, (int(random.integers(2, 30)), 12 + 50 * line), int(random.integers(12, 26)), random)
        images.append(np.asarray(image, np.float32) / 255)
    return {"x": ((np.stack(images) - MEAN) / SPREAD).transpose(0, 3, 1, 2).copy()}


def lines(count: int, seed: int = 0, width: int = 192) -> Arrays:
    """Single lines of text, [count, 3, 48, width], as the recognizer wants them."""
    random = np.random.default_rng(seed)
    images = []
    for _ in range(count):
        image = Image.new("RGB", (width, 48), tuple(random.integers(200, 256, 3).tolist()))
        _write(image, (4, 8), int(random.integers(22, 34)), random)
        images.append(np.asarray(image, np.float32) / 255)
    return {"x": ((np.stack(images) - 0.5) / 0.5).transpose(0, 3, 1, 2).copy()}


def files(count: int) -> Arrays:
    """Beginnings and ends of small files, padded as magika wants them, [count, 2048]."""
    padded = np.full((count, 2048), 256, np.int32)
    for row in range(count):
        content = np.frombuffer((KINDS[row % len(KINDS)] % row) * (1 + row), np.uint8)[:1024]
        padded[row, : len(content)] = content
        padded[row, 2048 - len(content) :] = content
    return {"bytes": padded}


def sounds(count: int) -> Arrays:
    """Pieces of 512 samples at 16 kHz, with the state of the detector of voices before them."""
    random = np.random.default_rng(0)
    return {
        "input": random.normal(0, 0.1, (count, 1, 512)).astype(np.float32),
        "state": np.zeros((count, 2, 1, 128), np.float32),
        "sr": np.full(count, 16000),
    }


def saved(path: Path, arrays: Arrays) -> Path:
    np.savez(path, allow_pickle=False, **arrays)
    return path


def direct_answers(path: Path, arrays: Arrays) -> list[Arrays]:
    """What ONNX Runtime, called directly, answers to each row."""
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    count = len(next(iter(arrays.values())))
    return [
        dict(zip(names, session.run(names, {name: rows[row : row + 1] for name, rows in arrays.items()}), strict=True))
        for row in range(count)
    ]


def _write(image: Image.Image, place: tuple[int, int], size: int, random: np.random.Generator) -> None:
    colour = tuple(random.integers(0, 90, 3).tolist())
    text = " ".join(random.choice(WORDS, 3))
    ImageDraw.Draw(image).text(place, text, fill=colour, font=ImageFont.load_default(size))
