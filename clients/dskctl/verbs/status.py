"""`dskctl status`"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table

from dskapi.v1.control_pb2 import (
    EngineStatus,
    GenerationStatus,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
    ModelStatus,
    ModeStatus,
)
from dskctl.daemon import Daemon
from dskctl.options import add_model
from dskctl.printer import Printer
from dskctl.tables import dense_table, table
from dskctl.verb import Verb
from dskctl.words import (
    MODES,
    NOTHING,
    age_words,
    is_ratio,
    local_time,
    mode_word,
    printable,
    proven_words,
    short_hash,
    size_words,
    state_word,
)


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    status = daemon.get_status(GetStatusRequest(model=args.model))
    known = [] if status.models else daemon.list_models(ListModelsRequest()).models
    printer.show(status, partial(as_text, loadable=[model.name for model in known]))


def as_text(status: GetStatusResponse, loadable: Sequence[str] = ()) -> RenderableType:
    """The daemon, its models, their modes; or the models that can be loaded, where none is."""
    parts: list[RenderableType] = [_daemon_line(status), ""]
    if not status.models:
        remedy = f"; `dskctl load NAME` loads one of {', '.join(loadable)}" if loadable else ", and none is configured"
        return Group(*parts, f"no model is loaded{remedy}")
    times = [*_step_times(status), *_run_times(status)]
    tables = [models_table(status), "", modes_table(status), *_generations(status), *times]
    return Group(*parts, *tables, *_remarks(status))


def _daemon_line(status: GetStatusResponse) -> str:
    return (
        f"dskd {status.version} · pid {status.pid} · up {age_words(status.started)} · "
        f"memory {size_words(status.rss_bytes)}, available {size_words(status.available_bytes)}"
    )


def models_table(status: GetStatusResponse) -> Table:
    """One row for each model."""
    numbers = ("GENERATION", "RUNNING", "WAITING", "KV BLOCKS FREE", "KV CACHE", "CONTEXT")
    made = table("MODEL", "STATE", "MODE", *numbers, "ENGINE", right=numbers)
    for model in status.models:
        made.add_row(*_model_row(model))
    return made


def _model_row(model: ModelStatus) -> list[str]:
    return [
        model.name,
        state_word(model.state),
        mode_word(model.mode),
        str(model.generation),
        str(model.running_requests),
        str(model.waiting_requests),
        f"{model.kv_blocks_free}/{model.kv_blocks_total}" if model.kv_blocks_total else NOTHING,
        size_words(model.kv_cache_bytes) if model.kv_cache_bytes else NOTHING,
        f"{model.context_length:,}" if model.context_length else NOTHING,
        model.engine or NOTHING,
    ]


def modes_table(status: GetStatusResponse) -> Table:
    """One row for each mode of each model; modes that share a graph each tell the whole of its memory."""
    numbers = ("MEMORY", "TOKENS", "REQUESTS")
    has_engines = any(mode.engine for model in status.models for mode in model.modes)
    made = table("MODEL", "MODE", "RESIDENT", *numbers, *(["ENGINE"] if has_engines else []), right=numbers)
    for model in status.models:
        for mode in model.modes:
            made.add_row(model.name, *_mode_cells(mode), *([mode.engine or NOTHING] if has_engines else []))
    return made


def _mode_cells(mode: ModeStatus) -> list[str]:
    memory = size_words(mode.bytes) if mode.resident else NOTHING
    resident = "yes" if mode.resident else "no"
    return [mode_word(mode.mode), resident, memory, f"{mode.tokens:,}", str(mode.requests)]


def _generations(status: GetStatusResponse) -> list[RenderableType]:
    """One row for each generation that a rollback can return to, and the present one."""
    rows = [_generation_row(model, state) for model in status.models for state in model.generations]
    noise = "NOISE" if any(is_ratio(model.measure) for model in status.models) else "KL"
    columns = ("MODEL", "GENERATION", "STATE", "PARAMETER SET", "COMMITTED", noise)
    return ["", dense_table(columns, rows, right=("GENERATION",))] if rows else []


def _generation_row(model: ModelStatus, state: GenerationStatus) -> list[str]:
    noise = [f"{mode} {proven_words(state.kl[mode], model.measure)}" for mode in MODES if mode in state.kl]
    return [
        model.name,
        str(state.number),
        "active" if state.active else "resident" if state.resident else "stored",
        short_hash(state.parameter_set),
        local_time(state.committed),
        ", ".join(noise) or NOTHING,
    ]


def _step_times(status: GetStatusResponse) -> list[RenderableType]:
    """Milliseconds a step, by number of streams; one row for each mode on each of two engines."""
    models = [model for model in status.models if model.second_engine.step_times]
    if not models:
        return []
    streams = sorted({step.rows for model in models for step in model.second_engine.step_times})
    columns = [f"{count} STREAMS" if count > 1 else "1 STREAM" for count in streams]
    made = table("MODEL", "MODE", "ENGINE", *columns, right=columns)
    for model in models:
        for (mode, engine), ms in _steps_of(model).items():
            cells = [f"{ms[count]:.1f} ms" if count in ms else NOTHING for count in streams]
            made.add_row(model.name, mode_word(mode), engine, *cells)
    return ["", made]


def _steps_of(model: ModelStatus) -> dict[tuple[int, str], dict[int, float]]:
    """By mode and engine: the milliseconds of a step by its number of streams."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for step in model.second_engine.step_times:
        found.setdefault((step.mode, step.engine), {})[step.rows] = step.ms
    return found


def _run_times(status: GetStatusResponse) -> list[RenderableType]:
    """Milliseconds a run of a plain graph, by its rows; one row for each mode on each engine that was measured."""
    measured = [(model, mode, engine) for model, mode, engine in _choices(status) if engine.ms]
    if not measured:
        return []
    sizes = sorted({rows for _, _, engine in measured for rows in engine.ms})
    columns = [f"{rows} ROWS" if rows > 1 else "1 ROW" for rows in sizes]
    made = table("MODEL", "MODE", "ENGINE", *columns, "SERVES", right=columns)
    for model, mode, engine in measured:
        cells = [f"{engine.ms[rows]:.1f} ms" if rows in engine.ms else NOTHING for rows in sizes]
        serves = "yes" if engine.name == mode.engine else "no"
        made.add_row(model.name, mode_word(mode.mode), engine.name, *cells, serves)
    return ["", made]


def _choices(status: GetStatusResponse) -> Iterator[tuple[ModelStatus, ModeStatus, EngineStatus]]:
    """The engines that each mode was to choose from."""
    for model in status.models:
        for mode in model.modes:
            for engine in mode.engines:
                yield model, mode, engine


def _second_engine(model: ModelStatus) -> Iterator[str]:
    """What became of it, in sentences."""
    second = model.second_engine
    if second.reason:
        yield f"{model.name}: {model.engine} serves alone: {printable(second.reason)}"
        return
    made = ", ".join(f"{engine} {count:,}" for engine, count in sorted(second.tokens.items()))
    yield (
        f"{model.name}: engines ({second.use}): {second.slots_used} of {second.slots_total} slots of {second.name} in "
        f"use, {second.moves:,} moves; tokens by {made or 'none'}"
    )
    for graph in second.graphs:
        if graph.reason:
            yield f"{model.name}: {mode_word(graph.mode)} is on {model.engine} alone: {printable(graph.reason)}"


def _remarks(status: GetStatusResponse) -> list[str]:
    remarks = [
        f"{model.name}: {engine.name} does not serve {mode_word(mode.mode)}: {printable(engine.reason)}"
        for model, mode, engine in _choices(status)
        if engine.reason
    ]
    for model in status.models:
        if model.change_in_progress:
            remarks.append(f"{model.name}: in progress: {printable(model.change_in_progress)}")
        if model.HasField("second_engine"):
            remarks += _second_engine(model)
        if model.reason:
            remarks.append(f"{model.name}: {printable(model.reason)}")
    return ["", *remarks] if remarks else []


VERB = Verb(
    name="status",
    help="show the daemon and its models",
    examples=("dskctl status", "dskctl status smollm2", "dskctl status --json"),
    configure=add_model,
    run=run,
)
