"""Precision modes: how exactly a model computes. Imports nothing of the project."""

from __future__ import annotations

import enum


class PrecisionMode(enum.Enum):
    """One precision a model can serve in; the value is its spelling in files and on command lines."""

    INT4 = "int4"
    INT8 = "int8"
    FP16 = "fp16"
    FP32 = "fp32"


LADDER = (PrecisionMode.INT4, PrecisionMode.INT8, PrecisionMode.FP16, PrecisionMode.FP32)
"""All modes from the least to the most exact."""

REFERENCE = PrecisionMode.FP32
"""The mode every other one is measured against."""

QUANTIZED = frozenset({PrecisionMode.INT4, PrecisionMode.INT8})
"""The modes made from a parameter set; the others run the source weights."""
