"""[monitor]: defaults are whole, every key is read, and what makes no sense is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from dskd.monitor.config import LoadConfig, LongContextConfig, MonitorConfig, ThresholdConfig
from dskd.monitor.states import Repair, Scope
from dskd.typed_toml import Builder
from dskquant.modes import PrecisionMode

FULL = """
share = 0.1
time_share = 0.01
reference = "int8"
window = 1024
window_s = 60
scope = "request"
target = "next"
repair = "reprefill"
factor = 3
min_agreement = 0.6
false_trip_samples = 1e6
hysteresis = 0.7
dwell_s = 5
max_dwell_s = 60
prefill = "int8"
threshold = { int4 = 0.5, int8 = 0.02 }
long_context = { tokens = 4096, mode = "int8" }
load = { mode = "int4", queue = 8, max_kl = 0.4, quiet_s = 10 }
"""


def build(table: dict[str, Any]) -> tuple[MonitorConfig, list[str]]:
    builder = Builder(Path("/"))
    return builder.build(MonitorConfig, table, "monitor"), builder.problems


def test_every_key_is_read() -> None:
    config, problems = build(tomli.loads(FULL))
    assert problems == []
    assert config == MonitorConfig(
        share=0.1,
        time_share=0.01,
        reference=PrecisionMode.INT8,
        window=1024,
        window_s=60.0,
        scope=Scope.REQUEST,
        target="next",
        repair=Repair.REPREFILL,
        threshold=ThresholdConfig(int4=0.5, int8=0.02),
        factor=3.0,
        min_agreement=0.6,
        false_trip_samples=1e6,
        hysteresis=0.7,
        dwell_s=5.0,
        max_dwell_s=60.0,
        prefill=PrecisionMode.INT8,
        long_context=LongContextConfig(4096, PrecisionMode.INT8),
        load=LoadConfig(PrecisionMode.INT4, 8, 0.4, 10.0),
    )


def test_an_empty_table_is_the_defaults() -> None:
    assert build({}) == (MonitorConfig(), [])


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"share": 1.5}, "monitor.share = 1.5: allowed: 0 to 1"),
        ({"target": "int4"}, 'monitor.target = "int4": allowed: "next", "int8", "fp16", "fp32"'),
        ({"factor": 0.5}, "monitor.factor = 0.5: allowed: 1 to 1000000.0"),
        ({"threshold": {"int4": 0}}, "monitor.threshold.int4 = 0: allowed: 1e-06 to 1000000.0"),
        ({"window": 2**62}, f"monitor.window = {2**62}: allowed: 40 to 100000"),
        ({"window": 2**63}, f"monitor.window = {2**63}: allowed: numbers of at most 64 bits"),
        ({"threshold": {"fp32": 0.1}}, "monitor.threshold.fp32: unknown key; known: fp16, int4, int8"),
        ({"dwell_s": 100, "max_dwell_s": 50}, "monitor.max_dwell_s: 50.0 must not be below dwell_s, 100.0"),
        ({"factor": 1.25}, "monitor.factor: must be above 1 / hysteresis, 1.25: expected noise would never be low"),
        ({"long_context": {"mode": "int8"}}, "monitor.long_context.tokens: is missing"),
        (
            {"load": {"mode": "fp16", "queue": 1, "max_kl": 0.1}},
            "monitor.load.mode: fp16 is not a faster mode; allowed: int4, int8",
        ),
    ],
)
def test_what_makes_no_sense_is_named(table: dict[str, Any], problem: str) -> None:
    assert build(table)[1] == [problem]
