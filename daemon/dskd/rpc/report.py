"""States and records of the daemon as messages of the Control protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import structlog

from dskapi.v1 import control_pb2
from dskd.engine.request import LoopSnapshot
from dskd.engine.step_times import StepKind
from dskd.host import ServedModel, is_language
from dskd.manager.events import Event
from dskd.manager.types import (
    ChangeReport,
    EngineState,
    GenerationState,
    HistoryEntry,
    ManagerSnapshot,
    ModeProof,
    SecondEngineState,
    SwitchReport,
)
from dskd.registry import ModelEntry
from dskd.rpc.convert import IN_FLIGHT, MEASURES, MODES, STATES, sendable, timestamp
from dskquant.errors import StoreError
from dskquant.modes import LADDER
from dskquant.plain.store import is_plain_store
from dskquant.store import StoreManifest

PLAIN_GRAPH = "plain graph"
"""In place of the architecture; it has no context, and nobody has counted its parameters."""

FRAME_BYTES = 8
"""At most, in front of an entry of a list: its tag and its length."""

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger()


def model_status(entry: ModelEntry) -> control_pb2.ModelStatus:
    """All there is to know of a model; what only a loaded model has stays unset for the others."""
    status = control_pb2.ModelStatus(
        name=entry.name,
        state=STATES[entry.state],
        reason=sendable(entry.reason),
        engine=entry.config.engine.value,
        path=sendable(str(entry.config.path)),
    )
    if entry.host:
        status.architecture, status.context_length, _ = _shape(entry.host)
        _add_snapshot(status, entry.host.snapshot())
    return status


def _add_snapshot(status: control_pb2.ModelStatus, now: ManagerSnapshot) -> None:
    status.engine = now.engine
    status.mode = MODES[now.mode]
    status.generation = now.generation
    status.hash = now.hash
    status.parameter_set = now.parameter_set
    status.generations.extend(map(_generation_status, now.generations))
    status.running_requests = now.loop.running
    status.waiting_requests = now.loop.waiting
    status.kv_blocks_total = now.loop.blocks_total
    status.kv_blocks_free = now.loop.blocks_free
    status.kv_cache_bytes = now.kv_cache_bytes
    status.change_in_progress = now.change_in_progress
    if now.measure in MEASURES:
        status.measure = MEASURES[now.measure]
    if now.second:
        status.second_engine.CopyFrom(_second_engine(now.second, now.loop))
    for state in now.modes:
        status.modes.add(
            mode=MODES[state.mode],
            resident=state.resident,
            bytes=state.bytes,
            tokens=state.tokens,
            requests=state.requests,
            engine=state.engine,
            engines=map(_engine_status, state.engines),
        )


def _engine_status(state: EngineState) -> control_pb2.EngineStatus:
    ms = {rows: seconds * 1e3 for rows, seconds in state.seconds.items()}
    return control_pb2.EngineStatus(name=state.name, ms=ms, reason=state.reason)


def _generation_status(state: GenerationState) -> control_pb2.GenerationStatus:
    return control_pb2.GenerationStatus(
        number=state.number,
        hash=state.hash,
        parameter_set=state.parameter_set,
        committed=timestamp(state.committed),
        active=state.active,
        resident=state.resident,
        kl={mode.value: kl for mode, kl in state.kl.items()},
    )


def _second_engine(state: SecondEngineState, loop: LoopSnapshot) -> control_pb2.SecondEngineStatus:
    status = control_pb2.SecondEngineStatus(
        name=state.name,
        use=state.use.value,
        reason=state.reason,
        slots_total=state.num_slots,
        slots_used=loop.slots_used,
        moves=loop.moves,
        tokens=loop.tokens_by_engine,
    )
    for graph in state.graphs:
        status.graphs.add(mode=MODES[graph.mode], bytes=graph.bytes, reason=graph.reason)
    for kind, seconds in sorted(state.step_seconds.items(), key=_in_order):
        status.step_times.add(engine=kind.engine, mode=MODES[kind.mode], rows=kind.rows, ms=seconds * 1e3)
    return status


def _in_order(item: tuple[StepKind, float]) -> tuple[int, str, int]:
    kind, _ = item
    return LADDER.index(kind.mode), kind.engine, kind.rows


def model_summary(entry: ModelEntry) -> control_pb2.ModelSummary:
    """One line of a list of models; one whose store cannot be read has no shape."""
    summary = control_pb2.ModelSummary(
        name=entry.name, state=STATES[entry.state], path=sendable(str(entry.config.path))
    )
    if entry.host:
        now = entry.host.snapshot()
        summary.mode = MODES[now.mode]
        summary.resident.extend(MODES[state.mode] for state in now.modes if state.resident)
    shape = _shape(entry.host) if entry.host else _stored_shape(entry)
    if shape:
        summary.architecture, summary.context_length, summary.parameters = shape
    return summary


def _shape(host: ServedModel) -> tuple[str, int, int]:
    """Architecture, context length and number of parameters."""
    if is_language(host):
        return host.manifest.architecture, host.manifest.context_length, host.manifest.parameters
    return PLAIN_GRAPH, 0, 0


def _stored_shape(entry: ModelEntry) -> tuple[str, int, int] | None:
    if is_plain_store(entry.config.path):
        return PLAIN_GRAPH, 0, 0
    try:
        manifest = StoreManifest.read(entry.config.path)
        return manifest.architecture, manifest.context_length, manifest.parameters
    except StoreError as error:
        log.warning("store cannot be read", model=entry.name, reason=str(error))
        return None


def switch_response(model: str, report: SwitchReport) -> control_pb2.SwitchPrecisionResponse:
    return control_pb2.SwitchPrecisionResponse(
        model=model,
        from_mode=MODES[report.from_mode],
        to_mode=MODES[report.to_mode],
        generation=report.generation,
        resident=report.resident,
        done=report.done,
        flip_us=report.flip_us,
        prepare_ms=report.prepare_ms,
        total_ms=report.total_ms,
    )


def change_response(model: str, report: ChangeReport) -> control_pb2.ChangeResponse:
    return control_pb2.ChangeResponse(
        model=model,
        from_generation=report.from_generation,
        to_generation=report.to_generation,
        from_mode=MODES[report.from_mode],
        to_mode=MODES[report.to_mode],
        hash=report.hash,
        parameter_set=report.parameter_set,
        changed=report.changed,
        done=report.done,
        proofs=_mode_proofs(report.proofs),
        phases_ms=report.phases_ms,
        flip_us=report.flip_us,
        total_ms=report.total_ms,
    )


def _mode_proofs(proofs: Iterable[ModeProof]) -> Iterator[control_pb2.ModeProof]:
    for proof in proofs:
        yield control_pb2.ModeProof(
            mode=MODES[proof.mode],
            kl_before=proof.kl_before,
            kl_after=proof.kl_after,
            agreement=proof.agreement,
            measure=MEASURES.get(proof.measure),
        )


def history_response(entries: Iterable[HistoryEntry], most_bytes: int) -> control_pb2.GetHistoryResponse:
    """As many of `entries`, in their order, as fit into a message of `most_bytes`; the first in any case."""
    response = control_pb2.GetHistoryResponse()
    left = most_bytes
    for entry in entries:
        message = history_entry(entry)
        left -= message.ByteSize() + FRAME_BYTES
        if left < 0 and response.entries:
            break
        response.entries.append(message)
    return response


def history_entry(entry: HistoryEntry) -> control_pb2.HistoryEntry:
    return control_pb2.HistoryEntry(
        sequence=entry.sequence,
        time=timestamp(entry.time),
        model=sendable(entry.model),
        kind=sendable(entry.kind),
        actor=sendable(entry.actor),
        from_mode=MODES[entry.from_mode] if entry.from_mode else None,
        to_mode=MODES[entry.to_mode] if entry.to_mode else None,
        generation=entry.generation,
        hash=sendable(entry.hash),
        in_flight=IN_FLIGHT[entry.in_flight] if entry.in_flight else None,
        outcome=sendable(entry.outcome),
        reason=sendable(entry.reason),
        phases_ms=sendable(entry.phases_ms),
        flip_us=entry.flip_us,
        from_generation=entry.from_generation,
        parameter_set=sendable(entry.parameter_set),
        proofs=_mode_proofs(entry.proofs),
    )


def event_message(event: Event) -> control_pb2.Event:
    message = control_pb2.Event(
        sequence=event.sequence,
        time=timestamp(event.time),
        kind=event.kind,
        model=sendable(event.model),
        message=sendable(event.message),
    )
    message.fields.update(sendable(event.fields))
    return message
