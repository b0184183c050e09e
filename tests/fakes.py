"""A toy language model behind the engine contract. It reads its context from the cache and nowhere else.

Its next token is a hash of the whole context, the mode and the generation: a wrong block table, a lost or a repeated
token, or a wrong label changes the rest of the answer. `toy_answer` tells the right one without any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dskd.engine.request import MadeToken
from dskquant.engines.protocol import GRAPH_GROUPS, Int32, KVCache, Logits, SlotBatch, SlotCache, StepBatch
from dskquant.modes import LADDER, PrecisionMode

VOCABULARY = 97
EMPTY = -1
NOISE = np.random.default_rng(20260101).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)

Label = tuple[PrecisionMode, int]


def toy_logits(context: Sequence[int], mode: PrecisionMode, generation: int) -> Logits:
    """Logits [VOCABULARY] of the token after `context`."""
    salt = LADDER.index(mode) + 10 * generation
    winner = crc32(np.asarray(context, np.int64).tobytes(), salt) % VOCABULARY
    logits: Logits = NOISE[winner].copy()
    logits[winner] = 5.0  # beyond all noise
    return logits


def toy_answer(prompt: Sequence[int], labels: Iterable[Label]) -> list[int]:
    """The greedy answer to `prompt` whose i-th token is made by the i-th mode and generation."""
    tokens = list(prompt)
    for mode, generation in labels:
        tokens.append(int(toy_logits(tokens, mode, generation).argmax()))
    return tokens[len(prompt) :]


def assert_right_answer(prompt: Sequence[int], made: Sequence[MadeToken]) -> None:
    """Every token of `made` is what the mode and generation of its label make of all tokens before it."""
    assert [token.id for token in made] == toy_answer(prompt, [(token.mode, token.generation) for token in made])


class FakeCache:
    """Paged cache whose "keys and values" are the tokens themselves."""

    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tokens: NDArray[np.int64] = np.full((num_blocks, block_size), EMPTY, np.int64)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


class FakeGraph:
    """Records the batches it runs; `on_run` is called with each one first, and may raise or block.

    Logits after `poison`, a token, are not a number.
    """

    def __init__(self, modes: Iterable[PrecisionMode], generation: int = 1, poison: int | None = None) -> None:
        self.modes = frozenset(modes)
        self.resident_bytes = 1_000
        self.generation = generation
        self.poison = poison
        self.batches: list[StepBatch] = []
        self.on_run: Callable[[StepBatch], None] = lambda batch: None
        self.is_closed = False

    @property
    def cache_block_bytes(self) -> int:
        return 4 * np.dtype(np.int64).itemsize

    def allocate_cache(self, num_blocks: int) -> FakeCache:
        return FakeCache(num_blocks)

    def bind(self, cache: KVCache) -> None:
        assert isinstance(cache, FakeCache)
        self._cache = cache

    def release_source(self) -> None:
        """There is no source."""

    def close(self) -> None:
        self.is_closed = True

    def run(self, batch: StepBatch) -> Logits:
        self.batches.append(batch)
        self.on_run(batch)
        contexts = [self._write(batch, b) for b in range(len(batch.past_lens))]
        rows = [self._logits(batch, row, contexts) for row in batch.logit_rows.tolist()]
        return np.array(rows, np.float32).reshape(len(rows), VOCABULARY)

    def _write(self, batch: StepBatch, b: int) -> list[int]:
        """Writes the new tokens of sequence b into its blocks; its whole context as the cache then holds it."""
        begin, end = batch.subsequence_begins[b : b + 2].tolist()
        past = int(batch.past_lens[b])
        length = past + end - begin
        blocks = batch.block_indices[slice(*batch.block_indices_begins[b : b + 2].tolist())]
        assert len(blocks) == -(-length // self._cache.block_size), "block table of another length than the context"
        positions = np.arange(past, length)
        assert batch.positions[begin:end].tolist() == positions.tolist(), "positions do not follow the past"
        size = self._cache.block_size
        self._cache.tokens[blocks[positions // size], positions % size] = batch.token_ids[begin:end]
        context: list[int] = self._cache.tokens[blocks].reshape(-1)[:length].tolist()
        assert EMPTY not in context, "context that was never written"
        return context

    def _logits(self, batch: StepBatch, row: int, contexts: list[list[int]]) -> Logits:
        b = int(np.searchsorted(batch.subsequence_begins, row, side="right")) - 1
        missing = int(batch.subsequence_begins[b + 1]) - 1 - row
        context = contexts[b][: len(contexts[b]) - missing]
        if context[-1] == self.poison:
            return np.full(VOCABULARY, np.nan, np.float32)
        mode = PrecisionMode.INT8 if row in batch.residual_rows else min(self.modes, key=LADDER.index)
        return toy_logits(context, mode, self.generation)


def fake_graphs(cache: FakeCache, generation: int = 1) -> dict[frozenset[PrecisionMode], FakeGraph]:
    """A bound graph for each group of modes."""
    graphs = {modes: FakeGraph(modes, generation) for modes in GRAPH_GROUPS}
    for graph in graphs.values():
        graph.bind(cache)
    return graphs


class FakeSlotCache:
    """Slots whose "keys and values" are the tokens themselves. Counts what is copied."""

    def __init__(self, num_slots: int, longest: int = 256) -> None:
        self.num_slots = num_slots
        self.longest = longest
        self.tokens: NDArray[np.int64] = np.full((num_slots, longest), EMPTY, np.int64)
        self.loaded = self.stored = self.copied = 0

    def load(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        assert isinstance(pages, FakeCache)
        assert begin % pages.block_size == 0
        positions = np.arange(begin, end)
        found = pages.tokens[blocks[positions // pages.block_size], positions % pages.block_size]
        assert EMPTY not in found, "loaded what was never written"
        self.tokens[slot, begin:end] = found
        self.loaded += end - begin

    def store(self, slot: int, pages: KVCache, blocks: Int32, begin: int, end: int) -> None:
        assert isinstance(pages, FakeCache)
        assert begin % pages.block_size == 0
        positions = np.arange(begin, end)
        pages.tokens[blocks[positions // pages.block_size], positions % pages.block_size] = self.tokens[slot, begin:end]
        self.stored += end - begin

    def copy(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]
        self.copied += length


class FakeSlotGraph:
    """`FakeGraph` over slots."""

    def __init__(self, modes: Iterable[PrecisionMode], generation: int = 1, poison: int | None = None) -> None:
        self.modes = frozenset(modes)
        self.resident_bytes = 500
        self.generation = generation
        self.poison = poison
        self.batches: list[SlotBatch] = []
        self.on_run: Callable[[SlotBatch], None] = lambda batch: None
        self.is_closed = False

    def allocate_cache(self, num_slots: int) -> FakeSlotCache:
        return FakeSlotCache(num_slots)

    def bind(self, cache: SlotCache) -> None:
        assert isinstance(cache, FakeSlotCache)
        self._cache = cache

    def close(self) -> None:
        self.is_closed = True

    def run(self, batch: SlotBatch) -> Logits:
        self.batches.append(batch)
        self.on_run(batch)
        for b, (past, new) in enumerate(zip(batch.past_lens.tolist(), batch.new_lens.tolist(), strict=True)):
            self._cache.tokens[batch.first_slot + b, past : past + new] = batch.token_ids[b, :new]
        in_int8 = set(map(tuple, batch.residual_rows.tolist()))
        rows = [self._logits(batch, b, s, (b, s) in in_int8) for b, s in batch.logit_rows.tolist()]
        return np.array(rows, np.float32).reshape(len(rows), VOCABULARY)

    def _logits(self, batch: SlotBatch, b: int, s: int, in_int8: bool) -> Logits:
        context = self._cache.tokens[batch.first_slot + b, : batch.past_lens[b] + s + 1].tolist()
        assert EMPTY not in context, "context that was never written"
        if context[-1] == self.poison:
            return np.full(VOCABULARY, np.nan, np.float32)
        mode = PrecisionMode.INT8 if in_int8 else min(self.modes, key=LADDER.index)
        return toy_logits(context, mode, self.generation)
