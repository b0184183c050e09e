"""Golden prompts: a few fixed texts, and what the reference answers to them, kept in the store.

A graph is asked them before it serves. They are prose, code, numbers and a dialogue, so that broken weights, a wrong
tokenizer or a half-converted graph can hardly hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from dskquant.engines.protocol import CompileOptions, Engine, Graph, Logits, SlotGraph
from dskquant.errors import StoreError
from dskquant.forward import blocks_for, forward_together, slot_batch_of
from dskquant.mapped_safetensors import MappedSafetensors
from dskquant.modes import PrecisionMode
from dskquant.store import GOLDEN, TOKENIZER

TEXTS = (
    """\
The water of the lake was still and clear, and on the far shore a row of old trees stood like people waiting for a boat.
Nobody had crossed since the summer, when the ferryman left for the city and did not come back.""",
    """\
def binary_search(values, wanted):
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
""",
    """\
Question: A train leaves at 9:40 and arrives at 12:15. How long does the journey take?
Answer: From 9:40 to 12:00 are 2 hours and 20 minutes, and 15 minutes more make 2 hours and 35 minutes.""",
    """\
1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144. Paris is the capital of France; Rome is the capital of Italy;
Madrid is the capital of Spain; Berlin is the capital of""",
)
LOGITS = "logits"
MAX_TOKENS = 64
SCORED = 24
"""Positions at the end of each prompt whose logits are compared."""


@dataclass(frozen=True, slots=True)
class Golden:
    """The golden prompts of a model, and the logits [positions, vocabulary] of its reference where they are known."""

    prompts: tuple[tuple[int, ...], ...]
    reference: Logits | None


def read(store: Path) -> Golden:
    """The golden prompts of `store`. Raises StoreError when the file of the reference is damaged."""
    prompts = encode_prompts(store)
    path = store / GOLDEN
    if not path.exists():
        return Golden(prompts, None)
    file = MappedSafetensors(path, error=StoreError)
    shape = file.shape(LOGITS) if LOGITS in file.names else ()
    positions = sum(min(SCORED, len(prompt)) for prompt in prompts)
    if len(shape) != 2 or shape[0] != positions or file.dtype(LOGITS) != "F32":
        raise StoreError(f"{path}: no logits of {positions} positions in FP32; convert the model again")
    reference = file.array(LOGITS)
    if not np.isfinite(reference).all():
        raise StoreError(f"{path}: damaged: an answer of the reference is not finite; convert the model again")
    return Golden(prompts, reference)


def create(store: Path, engine: Engine) -> None:
    """Runs the reference mode of `store`, its KV cache in FP32 too, on the golden prompts and keeps its logits there.

    Needs the memory of an FP32 graph. Raises StoreError when an answer is not finite.
    """
    graph = engine.compile(store, {PrecisionMode.FP32}, CompileOptions(kv_precision="f32"))
    try:
        logits = answers(encode_prompts(store), graph, engine, PrecisionMode.FP32)
    finally:
        graph.close()
    if not np.isfinite(logits).all():
        raise StoreError("the answers to the golden prompts are not finite: the weights are damaged")
    save_file({LOGITS: logits}, store / GOLDEN)


def answers(prompts: Sequence[Sequence[int]], graph: Graph, engine: Engine, mode: PrecisionMode) -> Logits:
    """Logits of the last SCORED positions of every prompt, end to end, [positions, vocabulary].

    Leaves a scratch cache bound to `graph`.
    """
    graph.bind(graph.allocate_cache(len(prompts) * blocks_for(MAX_TOKENS, engine.block_size)))
    return np.concatenate(forward_together(graph, prompts, mode, block_size=engine.block_size, last=SCORED))


def answers_in_slots(prompts: Sequence[Sequence[int]], graph: SlotGraph, mode: PrecisionMode) -> Logits:
    """`answers` of a slot graph. Leaves a scratch cache bound to it."""
    graph.bind(graph.allocate_cache(len(prompts)))
    wanted = [range(max(len(prompt) - SCORED, 0), len(prompt)) for prompt in prompts]
    return graph.run(slot_batch_of(prompts, 0, max(map(len, prompts)), wanted, mode)).copy()


def encode_prompts(store: Path) -> tuple[tuple[int, ...], ...]:
    """The tokens of every golden prompt. Raises what the tokenizers library raises for a file it cannot use."""
    tokenizer = Tokenizer.from_file(str(store / TOKENIZER))
    return tuple(tuple(tokenizer.encode(text).ids[:MAX_TOKENS]) for text in TEXTS)
