"""The step loop: the thread that owns the engine state of a model. Everything reaches it between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from dskd.config import SchedulerConfig
from dskd.engine.block_pool import BlockPool
from dskd.engine.command_queue import CommandQueue
from dskd.engine.request import (
    FlipReport,
    GenerationRequest,
    InFlight,
    LoopSnapshot,
    ModeRules,
    Observation,
    ScoringPlan,
    StepOutput,
)
from dskd.engine.scheduler import Scheduler
from dskd.engine.slot_decoder import SecondEngine, SlotDecoder
from dskd.engine.step_core import StepCore
from dskd.errors import InternalError, UnavailableError
from dskquant.engines.protocol import Graph, KVCache, SlotGraph
from dskquant.modes import PrecisionMode

T = TypeVar("T")


class StepLoop:
    """Runs the open requests of one model, step by step, and flips precision modes between two steps.

    Every public method but `apply_commands` and `run_one_step` may be called from any thread. The futures resolve on
    the loop's thread; a refusal is a DskdError in the future. A future that is cancelled in time undoes its command.
    """

    def __init__(
        self,
        *,
        model: str,
        engine_name: str,
        cache: KVCache,
        config: SchedulerConfig,
        mode: PrecisionMode,
        generation: int,
        deliver: Callable[[list[StepOutput]], None],
        observe: Callable[[list[Observation]], None] = lambda observations: None,
        second: SecondEngine | None = None,
    ) -> None:
        """`deliver` gets the outputs of each step in one call on the loop's thread; it must not block.

        `observe` gets what was measured, on that thread or another one. `second` may decode where it is faster.
        """
        self._commands = CommandQueue()
        self._core = StepCore(
            model=model,
            engine_name=engine_name,
            scheduler=Scheduler(config, BlockPool(cache.num_blocks, cache.block_size)),
            mode=mode,
            generation=generation,
            deliver=deliver,
            observe=observe,
            ask=self._commands.ask,
            slots=SlotDecoder(second, engine_name, cache) if second else None,
        )
        self._thread = Thread(target=self._run, name=f"step-loop-{model}", daemon=True)
        self._stopping = False

    # Life

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `stop`, and after a bug ended the thread (its requests got an InternalError)."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Waits, `timeout` seconds at most, for the thread to end."""
        self._thread.join(timeout)

    def stop(self) -> None:
        """Ends what is left with UnavailableError and joins the thread; blocks until the step under way is done."""
        self._commands.ask(self._note_stop)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def drain(self, grace_s: float) -> Future[int]:
        """Refuses new requests; resolves when no request is open any more.

        What is still open after `grace_s` seconds ends with UnavailableError; the result is the number of these.
        """
        return self._commands.ask_later(lambda done: self._core.drain(grace_s, done))

    # What others ask for

    def submit(self, request: GenerationRequest) -> Future[None]:
        """Queues `request`; resolves when it is accepted.

        UnavailableError while draining, FailedPreconditionError if its mode is not resident, ResourceExhaustedError if
        it never fits into the cache or too many wait, InvalidArgumentError if its id is open already.
        """
        arrived = time.perf_counter()
        return self._commands.ask(lambda: self._core.submit(request, arrived))

    def cancel(self, request_id: str) -> Future[bool]:
        """Ends a request, whose last output then has CANCELLED; False if it is not open."""
        return self._commands.ask(lambda: self._core.cancel(request_id))

    def install(self, generation: int, graph: Graph, slot_graph: SlotGraph | None = None) -> Future[None]:
        """Makes `graph`, bound to the cache and warmed up, available for its modes.

        `slot_graph` of the second engine, bound to its slots, may decode for it.
        FailedPreconditionError if one of them has a graph in this generation already.
        """
        return self._commands.ask(lambda: self._core.install(generation, graph, slot_graph))

    def install_slots(self, generation: int, slot_graph: SlotGraph) -> Future[None]:
        """Lets `slot_graph`, bound to its slots, decode for the installed graph of its modes."""
        return self._commands.ask(lambda: self._core.install_slots(generation, slot_graph))

    def flip(self, mode: PrecisionMode, generation: int, in_flight: InFlight) -> Future[FlipReport]:
        """Makes `mode` of `generation` the active one; FailedPreconditionError if it has no graph.

        MIGRATE: open requests without a precision of their own use it from the next step on; those with one keep their
        mode, and use the graph that the new generation has for it, if any. FINISH: all open requests stay as they are.
        """
        return self._commands.ask(lambda: self._core.flip(mode, generation, in_flight))

    def retire(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[bool]:
        """Drops these graphs, unless an open request uses one of them; whether they were dropped.

        FailedPreconditionError if one of them is active or not installed.
        """
        return self._commands.ask(lambda: self._core.retire(generation, modes))

    def suspend(self, generation: int, modes: frozenset[PrecisionMode]) -> Future[None]:
        """Holds all steps and forgets these graphs, so that they can be released; open and new requests wait.

        FailedPreconditionError if one of the graphs is not installed.
        """
        return self._commands.ask(lambda: self._core.suspend(generation, modes))

    def resume(self) -> Future[None]:
        """Ends `suspend`; requests whose graph has not been installed again end with UnavailableError."""
        return self._commands.ask(self._core.resume)

    def set_rules(self, rules: ModeRules, repair: bool) -> Future[None]:
        """Chooses the modes of steps by `rules` from the next one on.

        `repair`: sequences whose mode rises by it read all their tokens again in the new mode.
        """
        return self._commands.ask(lambda: self._core.set_rules(rules, repair))

    def escalate(self, request_id: str, mode: PrecisionMode, repair: bool) -> Future[bool]:
        """Serves an open request in at least `mode` to its end; False if it is not open or chose its own precision."""
        return self._commands.ask(lambda: self._core.escalate(request_id, mode, repair))

    def set_scoring(self, plan: ScoringPlan | None) -> Future[None]:
        """Measures answers by `plan`; None: not at all."""
        return self._commands.ask(lambda: self._core.set_scoring(plan))

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Does `work` on the loop's thread, which serves nobody meanwhile."""
        return self._commands.ask(work)

    def set_preparing(self, is_preparing: bool) -> Future[None]:
        """Tells whether a graph is being built beside the loop: measuring takes less time then."""
        return self._commands.ask(lambda: self._core.set_preparing(is_preparing))

    def snapshot(self) -> LoopSnapshot:
        """The state after some recent step."""
        return self._core.snapshot

    # The thread

    def apply_commands(self) -> None:
        """Applies what was asked for. For the loop's thread, or for whoever drives a loop that was not started."""
        if self._commands.apply_all():
            self._core.settle()

    def run_one_step(self) -> None:
        """Runs one step if there is work. For the loop's thread, or for whoever drives a loop that was not started."""
        if self._core.has_work:
            if not self._core.is_idle:
                self._core.step()
                self._core.settle()
                self._core.explore()
            self._core.score()

    def _run(self) -> None:
        reason: Exception = UnavailableError("the model is being unloaded")
        try:
            while not self._stopping:
                self._wait_for_work()
                self.apply_commands()
                self.run_one_step()
        except Exception:
            self._core.log.exception("step loop ended by a bug")
            reason = InternalError("the step loop of the model ended by a bug; the log tells more")
        self._commands.close(reason)
        self._core.abandon(reason)
        self._core.close()

    def _wait_for_work(self) -> None:
        if not self._core.has_work:
            self._core.check()
            self._commands.wait()

    def _note_stop(self) -> None:
        self._stopping = True
