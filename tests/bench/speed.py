"""Decode and prefill against OpenVINO GenAI's continuous batching, on the same weights, in one interleaved run."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from tests.bench.report import Section

from dskd.config import SchedulerConfig
from dskd.engine.request import GenerationRequest, StepOutput
from dskd.engine.step_loop import StepLoop
from dskquant.engines import load_engine
from dskquant.engines.protocol import CompileOptions, WeightLayout
from dskquant.modes import PrecisionMode

CACHE_BLOCKS = 600
CASES = {"decode, 1 stream": (1, 32, 16), "decode, 8 streams": (8, 32, 10), "prefill 512": (1, 512, 1)}
"""Streams, prompt tokens, new tokens."""

REPEATS = 3

Run = Callable[[int, int, int], float]
"""Seconds a step (of decode), or of the whole (with one new token), for streams, prompt tokens and new tokens."""

_ids = itertools.count()
_rng = np.random.default_rng(0)


def measure(store: Path, plain: dict[PrecisionMode, Path]) -> Section:
    """Times both layouts and GenAI for INT4 and INT8."""
    rows = []
    for mode in (PrecisionMode.INT4, PrecisionMode.INT8):
        runs = {layout.value: _ours(store, mode, layout) for layout in WeightLayout} | {"GenAI": _genai(plain[mode])}
        for name, (streams, prompt, new) in CASES.items():
            seconds = _interleaved(runs, streams, prompt, new)
            rate = {key: (streams if new > 1 else prompt) / value for key, value in seconds.items()}
            ratios = [f"{rate[key] / rate['GenAI']:.2f}x" for key in ("shared", "separate")]
            rows.append([mode.value, name, *(f"{rate[key]:.1f}" for key in ("shared", "separate", "GenAI")), *ratios])
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    return Section(
        "Speed against OpenVINO GenAI",
        "Tokens a second, 1.5B random Llama, group 128, dynamic activations of group 128, 8-bit KV cache, all cores. "
        "GenAI runs `ContinuousBatchingPipeline` on a plain IR of the same codes. Ours includes "
        "scheduling and sampling.",
        ["mode", "case", "shared", "separate", "GenAI", "shared / GenAI", "separate / GenAI"],
        rows,
    )


def _interleaved(runs: dict[str, Run], streams: int, prompt: int, new: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(REPEATS + 1):
        for key, run in runs.items():
            taken = run(streams, prompt, new)
            if repeat > 0:  # the first one packs weights
                seconds[key].append(taken)
    return {key: float(np.median(values)) for key, values in seconds.items()}


def _ours(store: Path, mode: PrecisionMode, layout: WeightLayout) -> Run:
    options = CompileOptions(weights=layout)
    graph = load_engine("openvino").compile(store, options.graph_key(mode), options)
    cache = graph.allocate_cache(CACHE_BLOCKS)
    graph.bind(cache)
    ended: list[StepOutput] = []
    loop = StepLoop(
        model="bench",
        engine_name="openvino",
        cache=cache,
        config=SchedulerConfig(),
        mode=mode,
        generation=1,
        deliver=lambda outputs: ended.extend(output for output in outputs if output.is_last),
    )
    loop.install(1, graph)

    def run(streams: int, prompt: int, new: int) -> float:
        ended.clear()
        for _ in range(streams):
            loop.submit(GenerationRequest(f"r{next(_ids)}", tuple(_random_prompt(prompt)), new))
        loop.apply_commands()
        return _step_seconds(loop.run_one_step, lambda: len(ended) < streams, new)

    return run


def _genai(path: Path) -> Run:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = SchedulerConfig().max_batch_tokens
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": CompileOptions().activation_group,
        "KV_CACHE_PRECISION": "u8",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)

    def run(streams: int, prompt: int, new: int) -> float:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        # the handles must live as long as the requests
        handles = [
            pipeline.add_request(next(_ids), ov.Tensor(np.array([_random_prompt(prompt)])), config)
            for _ in range(streams)
        ]
        seconds = _step_seconds(pipeline.step, pipeline.has_non_finished_requests, new)
        del handles
        return seconds

    return run


def _step_seconds(step: Callable[[], None], goes_on: Callable[[], bool], new: int) -> float:
    steps = []
    while goes_on():
        began = time.perf_counter()
        step()
        steps.append(time.perf_counter() - began)
    return sum(steps) if new == 1 else float(np.median(steps[1:]))


def _random_prompt(length: int) -> list[int]:
    return _rng.integers(10, 40_000, length).tolist()
