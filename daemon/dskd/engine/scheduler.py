"""Who runs in the next step, and with how many tokens. A plain object: no engine, no threads, no clock.

Continuous batching with chunked prefill (Yu et al., Orca, OSDI 2022; Agrawal et al., Sarathi-Serve, OSDI 2024) over a
paged cache, with shared prefixes and preemption by recompute (Kwon et al., PagedAttention, SOSP 2023). Strictly first
come, first served: running and waiting sequences, taken together, always stand in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

from dskd.config import SchedulerConfig
from dskd.engine.block_pool import BlockPool
from dskd.engine.prefix_cache import PrefixCache
from dskd.engine.sequence import NO_BLOCKS, Chunk, Sequence
from dskd.errors import InternalError, ResourceExhaustedError
from dskquant.engines.protocol import Int32

RETRY_AFTER_S = 1.0
"""What a client is told to wait when too many wait already."""


class Scheduler:
    """Owns the open sequences and gives them tokens of each step and blocks of the pool."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.on_release: Callable[[Sequence], None] = lambda sequence: None  # told before one gives its blocks back
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._prefixes = PrefixCache(pool)
        self._lent: Counter[int] = Counter()

    @property
    def has_sequences(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All open sequences, the oldest first."""
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Puts `sequence` at the end of the line; ResourceExhaustedError if it can never fit or the line is full."""
        needed = self.pool.blocks_for(sequence.max_cached)
        if needed > self.pool.num_blocks:
            detail = f"the request needs {needed} KV cache blocks of {self.pool.block_size} tokens"
            raise ResourceExhaustedError("kv_cache", f"{detail}; there are {self.pool.num_blocks}")
        if len(self.waiting) >= self.config.max_waiting:
            detail = f"{len(self.waiting)} requests are waiting already"
            raise ResourceExhaustedError("waiting", detail, RETRY_AFTER_S)
        self.waiting.append(sequence)

    def schedule(self, held: Collection[Sequence] = ()) -> list[Chunk]:
        """The chunks of the next step, at most one per sequence, and never none while sequences that may run are open.

        Every sequence in mid-answer gets its one token; what is left of the budget goes to prompts, the oldest first.
        Those of `held` that run already sit the step out.
        """
        self._prefixes.publish(self.running)
        chunks = self._schedule_decodes(held)
        budget = self.config.max_batch_tokens - len(chunks)
        budget = self._schedule_prefills(chunks, budget, held)
        self._admit(chunks, budget)
        return chunks

    def postprocess(self, chunk: Chunk) -> None:
        """Notes that the tokens of `chunk` have gone through a graph and are in the cache."""
        chunk.sequence.num_cached += chunk.num_tokens
        self._prefixes.note_writer(chunk.sequence)

    def preempt(self) -> Sequence:
        """Sends the youngest running sequence back to the head of the line.

        Its tokens will be computed again, but for those whose blocks were published and are still kept then.
        """
        youngest = self.running.pop()
        self._release(youngest)
        youngest.preemptions += 1
        self.waiting.appendleft(youngest)
        return youngest

    def restart(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the head of the line: what serves it next reads all its tokens again."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def lend(self, blocks: Int32, is_taken: bool = False) -> None:
        """Counts one more owner of `blocks` that is no sequence; `is_taken`: they were allocated for it."""
        if not is_taken:
            self.pool.hold(blocks)
        self._lent.update(blocks.tolist())

    def take_back(self, blocks: Int32) -> None:
        """Ends `lend`."""
        self._lent -= Counter(blocks.tolist())
        self.pool.free(blocks)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a finished or cancelled sequence and frees its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def check(self) -> None:
        """Raises InternalError unless the pool is sound and all owners of its blocks are known."""
        self.pool.check()
        held = Counter(block for sequence in self.running for block in sequence.blocks.tolist()) + self._lent
        num_out = self.pool.num_blocks - self.pool.num_free
        if len(held) != num_out:
            raise InternalError(f"{num_out} KV blocks are out, {len(held)} are in use")
        if any(self.pool.num_owners(block) != count for block, count in held.items()):
            raise InternalError("KV blocks have other owners than those who run and those they are lent to")

    def _schedule_decodes(self, held: Collection[Sequence]) -> list[Chunk]:
        # The oldest first, while preemption takes the youngest: no victim has its chunk already, and the list that is
        # walked shrinks at its far end alone.
        return [
            Chunk(sequence, 1)
            for sequence in self.running
            if sequence.num_uncached == 1 and sequence not in held and self._make_room(sequence)
        ]

    def _make_room(self, sequence: Sequence) -> bool:
        """Sees that `sequence` has a block for its next token; False if it was preempted itself."""
        if len(sequence.tokens) <= len(sequence.blocks) * self.pool.block_size:
            return True
        while self.pool.num_free == 0:
            if self.preempt() is sequence:
                return False
        sequence.blocks = self.pool.append(sequence.blocks, len(sequence.tokens))
        return True

    def _schedule_prefills(self, chunks: list[Chunk], budget: int, held: Collection[Sequence]) -> int:
        for sequence in self.running:
            if budget and sequence.num_uncached > 1 and sequence not in held:
                chunks.append(Chunk(sequence, min(budget, sequence.num_uncached)))
                budget -= chunks[-1].num_tokens
        return budget

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            if self.config.prefix_cache:
                self._prefixes.reuse(sequence)
            missing = self.pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            # One more block for each one that runs, lest the newcomer be preempted before it has made a token.
            if missing + len(self.running) > self.pool.num_free:
                self._release(sequence)
                return
            self._start(sequence)
            chunks.append(Chunk(sequence, min(budget, sequence.num_uncached)))
            budget -= chunks[-1].num_tokens

    def _start(self, sequence: Sequence) -> None:
        """Lets the first of those who wait run."""
        self.running.append(self.waiting.popleft())
        sequence.blocks = self.pool.append(sequence.blocks, len(sequence.tokens))
        if not sequence.preemptions:
            sequence.num_reused = sequence.num_cached

    def _release(self, sequence: Sequence) -> None:
        self._prefixes.publish([sequence])
        self.on_release(sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks = NO_BLOCKS
        sequence.num_cached = 0
