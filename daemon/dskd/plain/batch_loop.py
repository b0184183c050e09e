"""The batch loop: the thread that serves a plain graph. Everything reaches it between two batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from dskd.config import BatchingConfig
from dskd.engine.command_queue import CommandQueue
from dskd.engine.request import FlipReport, InFlight, LoopSnapshot, ModeRules, Observation, ScoringPlan
from dskd.errors import InternalError, UnavailableError
from dskd.plain.batch_core import BatchCore, Deliver
from dskd.plain.served_graph import ServedGraph
from dskd.plain.waiting import Waiting
from dskquant.modes import PrecisionMode

T = TypeVar("T")


class BatchLoop:
    """Runs the requests of one model, batch by batch, and flips precision modes between two batches.

    Public methods may be called from any thread. They mean what those of `dskd.engine.step_loop.StepLoop` do; the
    futures resolve on the loop's thread, and a refusal is a DskdError in the future.
    """

    def __init__(
        self,
        model: str,
        limits: BatchingConfig,
        max_waiting: int,
        mode: PrecisionMode,
        generation: int,
        deliver: Deliver,
        observe: Callable[[list[Observation]], None],
    ) -> None:
        """`deliver` gets the outcomes of each batch in one call on the loop's thread; it must not block."""
        self._commands = CommandQueue()
        self._core = BatchCore(model, limits, max_waiting, mode, generation, deliver, observe)
        self._thread = Thread(target=self._run, name=f"batch-loop-{model}", daemon=True)
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends what is left with UnavailableError and joins the thread; blocks until the batch under way is done."""
        self._commands.ask(self._note_stop)
        self._thread.join()

    def drain(self, grace_s: float) -> Future[int]:
        return self._commands.ask_later(lambda done: self._core.drain(grace_s, done))

    def submit(self, entry: Waiting) -> None:
        """Queues a request; its outcome is delivered, be it a refusal. Raises a DskdError once the loop has ended."""
        self._commands.tell(lambda: self._core.submit(entry), entry.rows)

    def cancel(self, entry: Waiting) -> Future[bool]:
        """Takes a request out of the line; False if its batch has begun."""
        return self._commands.ask(lambda: self._core.cancel(entry))

    def install(self, generation: int, graph: ServedGraph, slot_graph: object = None) -> Future[None]:
        return self._commands.ask(lambda: self._core.install(generation, graph))

    def install_slots(self, generation: int, slot_graph: object) -> Future[None]:
        raise NotImplementedError("one engine alone serves a plain graph")

    def flip(self, mode: PrecisionMode, generation: int, in_flight: InFlight) -> Future[FlipReport]:
        return self._commands.ask(lambda: self._core.flip(mode, generation, in_flight))

    def retire(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[bool]:
        return self._commands.ask(lambda: self._core.retire(generation, modes))

    def suspend(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[None]:
        return self._commands.ask(lambda: self._core.suspend(generation, modes))

    def resume(self) -> Future[None]:
        return self._commands.ask(self._core.resume)

    def set_rules(self, rules: ModeRules, repair: bool) -> Future[None]:
        """There is no cache to repair."""
        return self._commands.ask(lambda: self._core.set_rules(rules))

    def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> Future[bool]:
        """False: a request has ended when it is scored."""
        return self._commands.ask(lambda: False)

    def set_scoring(self, plan: ScoringPlan | None) -> Future[None]:
        return self._commands.ask(lambda: self._core.set_scoring(plan))

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        return self._commands.ask(work)

    def set_preparing(self, is_preparing: bool) -> Future[None]:
        return self._commands.ask(lambda: self._core.set_preparing(is_preparing))

    def snapshot(self) -> LoopSnapshot:
        """The state after some recent batch; `tokens_by_mode` are requests answered."""
        return self._core.snapshot

    def _run(self) -> None:
        reason: Exception = UnavailableError("the model is being unloaded")
        try:
            has_run = False  # then another batch may be full already
            while not self._stopping:
                patience = 0.0 if has_run else self._core.patience()
                if patience > 0:
                    self._commands.wait(None if patience == math.inf else patience, self._core.lacking_rows())
                has_run = self._do_what_is_due()
        except Exception:
            self._core.log.exception("batch loop ended by a bug")
            reason = InternalError("the batch loop of the model ended by a bug; the log tells more")
        self._commands.close(reason)
        self._core.abandon(reason)

    def _do_what_is_due(self) -> bool:
        """Whether a batch was run."""
        self._commands.apply_all()
        has_run = self._core.run_batch()
        self._core.score()
        self._core.settle()
        return has_run

    def _note_stop(self) -> None:
        self._stopping = True
