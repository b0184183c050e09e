"""dskctl against a scripted daemon on a real socket: every verb, in tables and JSON, every error and exit code."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dskapi.v1 import common_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from dskctl.address import checked_address, default_address
from dskctl.answer import MarkedAnswer
from dskctl.cli import main
from dskctl.daemon import Daemon, open_channel, relayed
from dskctl.exits import ExitCode, UsageError
from dskctl.quant_file import toml_string
from dskctl.tables import table
from dskctl.verbs.history import as_text as history_as_text
from dskctl.words import printable

INT4, INT8, FP32 = (common_pb2.PRECISION_MODE_INT4, common_pb2.PRECISION_MODE_INT8, common_pb2.PRECISION_MODE_FP32)
WAIT_S = 20.0
"""Upper bound of a wait for an event that comes at once; it is never slept through."""


class ScriptedDaemon(control_pb2_grpc.ControlServicer, inference_pb2_grpc.InferenceServicer):
    """Answers each call with what `replies` holds for its name, and records the requests."""

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.called = threading.Event()
        self.cancelled = threading.Event()

    def _reply(self, name: str, request: Message, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        reply = self.replies[name]
        if isinstance(reply, Status):
            context.abort_with_status(rpc_status.to_status(reply))
        if reply == "hang":
            context.add_callback(self.cancelled.set)
            self.called.set()
            self.cancelled.wait(WAIT_S)
            context.abort(grpc.StatusCode.CANCELLED, "the client went away")
        return reply

    def _stream(self, name: str, request: Message, context: grpc.ServicerContext) -> Iterator[Any]:
        """A list may end with "hang" or a Status."""
        for item in self._reply(name, request, context):
            if isinstance(item, Message) and not isinstance(item, Status):
                yield item
            else:
                self.replies[name] = item
                self._reply(name, request, context)

    def SwitchPrecision(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("switch", request, context)

    def ApplyConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("apply", request, context)

    def Rollback(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("rollback", request, context)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("status", request, context)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("models", request, context)

    def LoadModel(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("load", request, context)

    def UnloadModel(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("unload", request, context)

    def GetHistory(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._reply("history", request, context)

    def WatchEvents(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._stream("watch", request, context)

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._stream("generate", request, context)


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "d.sock"
    monkeypatch.setenv("DSKD_ADDRESS", f"unix://{path}")
    return path


@pytest.fixture
def daemon(socket: Path) -> Iterator[ScriptedDaemon]:
    scripted = ScriptedDaemon()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    control_pb2_grpc.add_ControlServicer_to_server(scripted, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, server)
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    yield scripted
    scripted.cancelled.set()
    server.stop(None).wait()


def time_of(seconds: int) -> Timestamp:
    return Timestamp(seconds=seconds)


def response(text: str, *modes: int, **fields: Any) -> inference_pb2.GenerateResponse:
    """A response with one token for each of `modes`."""
    tokens = [
        inference_pb2.GeneratedToken(id=7, precision=mode, generation=2, engine="openvino")  # type: ignore[arg-type]
        for mode in modes
    ]
    return inference_pb2.GenerateResponse(request_id="r1", model="smollm2", text=text, tokens=tokens, **fields)


def last_response(text: str, *modes: int) -> inference_pb2.GenerateResponse:
    return response(
        text,
        *modes,
        finish_reason=inference_pb2.FINISH_REASON_END_OF_TEXT,
        usage=inference_pb2.Usage(prompt_tokens=5, generated_tokens=4),
        timings=inference_pb2.Timings(queue_ms=1, time_to_first_token_ms=84.6, total_ms=200, tokens_per_second=41.25),
    )


ANSWER = [response("Once ", INT4), response("upon ", INT4), response("a ", INT8), last_response("time", FP32)]


def rich_error(code: grpc.StatusCode, message: str, *details: Message) -> Status:
    status = Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


STATUS = control_pb2.GetStatusResponse(
    version="0.1.0",
    pid=4242,
    started=time_of(1_700_000_000),
    rss_bytes=3 * 2**29,
    available_bytes=20 * 2**30,
    models=[
        control_pb2.ModelStatus(
            name="smollm2",
            state=control_pb2.MODEL_STATE_SERVING,
            engine="openvino",
            mode=INT4,
            generation=2**40,
            modes=[
                control_pb2.ModeStatus(mode=INT4, resident=True, bytes=150 * 2**20, tokens=1234, requests=2),
                control_pb2.ModeStatus(mode=FP32),
            ],
            running_requests=2,
            waiting_requests=1,
            kv_blocks_total=512,
            kv_blocks_free=400,
            kv_cache_bytes=2**30,
            context_length=8192,
            change_in_progress="preparing fp32",
            generations=[
                control_pb2.GenerationStatus(
                    number=2**40,
                    parameter_set="9f86d081884c7d659a2f",
                    committed=time_of(1_700_000_000),
                    active=True,
                    resident=True,
                    kl={"int8": 0.0029, "int4": 0.205},
                ),
                control_pb2.GenerationStatus(number=7, parameter_set="5e884898da28", resident=True, kl={"int4": 0.25}),
                control_pb2.GenerationStatus(number=3, parameter_set="2c26b46b68ff"),
            ],
        )
    ],
)


# ---- status, models, load, unload


def test_status_shows_daemon_models_and_modes(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["status"] = STATUS
    assert main(["status", "smollm2"]) == ExitCode.DONE
    assert daemon.requests == [control_pb2.GetStatusRequest(model="smollm2")]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "pid 4242" in " ".join(rows[0])
    assert "memory 1.50 GiB, available 20.00 GiB" in " ".join(rows[0])
    model = ["smollm2", "serving", "int4", str(2**40), "2", "1", "400/512", "1.00", "GiB", "8,192", "openvino"]
    assert model in rows
    assert ["smollm2", "int4", "yes", "150", "MiB", "1,234", "2"] in rows
    assert ["smollm2", "fp32", "no", "-", "0", "0"] in rows
    assert ["smollm2:", "in", "progress:", "preparing", "fp32"] in rows


def test_status_shows_the_generations_a_rollback_can_return_to(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["status"] = STATUS
    assert main(["status"]) == ExitCode.DONE
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    date, time = rows[rows_index(rows, "active")][4:6]
    assert ["smollm2", str(2**40), "active", "9f86d081884c", date, time, "int4", "0.2050,", "int8", "0.0029"] in rows
    assert date == "2023-11-14"
    assert rows[rows_index(rows, "resident")][-2:] == ["int4", "0.2500"]
    assert rows[rows_index(rows, "stored")][1:4] == ["3", "stored", "2c26b46b68ff"]


def rows_index(rows: list[list[str]], state: str) -> int:
    """The row of the generation in this state."""
    (index,) = (index for index, row in enumerate(rows) if row[2:3] == [state])
    return index


def test_status_json_has_proto_names_short_enums_and_numbers(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["status"] = STATUS
    assert main(["--json", "status"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["started"] == "2023-11-14T22:13:20Z"
    model = document["models"][0]
    assert (model["state"], model["mode"], model["generation"]) == ("serving", "int4", 2**40)
    figures = {"resident": False, "bytes": 0, "tokens": 0, "requests": 0}
    assert model["modes"][1] == {"mode": "fp32", **figures, "engine": "", "engines": []}


def test_status_compares_two_engines_and_says_what_each_does(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    status = control_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    second = status.models[0].second_engine
    second.name, second.use, second.slots_total, second.slots_used, second.moves = "onnxruntime", "auto", 8, 3, 1234
    second.tokens.update({"openvino": 10, "onnxruntime": 20_000})
    second.graphs.add(mode=common_pb2.PRECISION_MODE_FP16, reason="onnxruntime does not have it")
    for engine, rows, ms in (("openvino", 1, 55.25), ("openvino", 2, 60.0), ("onnxruntime", 1, 32.0)):
        second.step_times.add(engine=engine, mode=INT4, rows=rows, ms=ms)
    daemon.replies["status"] = status
    assert main(["status"]) == ExitCode.DONE
    out = " ".join(capsys.readouterr().out.split())
    assert "MODEL MODE ENGINE 1 STREAM 2 STREAMS" in out
    assert "smollm2 int4 openvino 55.2 ms 60.0 ms smollm2 int4 onnxruntime 32.0 ms - " in out
    assert "smollm2: engines (auto): 3 of 8 slots of onnxruntime in use, 1,234 moves" in out
    assert "tokens by onnxruntime 20,000, openvino 10" in out
    assert "smollm2: fp16 is on openvino alone: onnxruntime does not have it" in out


def test_status_says_why_one_engine_serves_alone(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    status = control_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    status.models[0].second_engine.reason = "the KV slots need 1.0 GiB"
    daemon.replies["status"] = status
    assert main(["status"]) == ExitCode.DONE
    assert "smollm2: openvino serves alone: the KV slots need 1.0 GiB" in capsys.readouterr().out


def test_status_of_an_empty_daemon_says_so(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["status"] = control_pb2.GetStatusResponse(version="0.1.0")
    daemon.replies["models"] = control_pb2.ListModelsResponse()
    assert main(["status"]) == ExitCode.DONE
    assert capsys.readouterr().out.endswith("\nno model is loaded, and none is configured\n")


def test_status_without_a_loaded_model_names_those_that_can_be(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["status"] = control_pb2.GetStatusResponse(version="0.1.0")
    summaries = [control_pb2.ModelSummary(name=name) for name in ("a", "b")]
    daemon.replies["models"] = control_pb2.ListModelsResponse(models=summaries)
    assert main(["status"]) == ExitCode.DONE
    assert capsys.readouterr().out.endswith("\nno model is loaded; `dskctl load NAME` loads one of a, b\n")


MODELS = control_pb2.ListModelsResponse(
    models=[
        control_pb2.ModelSummary(
            name="smollm2",
            state=control_pb2.MODEL_STATE_UNLOADED,
            path="/srv/[b]smollm2",
            architecture="llama",
            resident=[INT4, INT8],
            parameters=134_515_008,
            context_length=8192,
        )
    ]
)


def test_models_lists_loaded_and_unloaded_ones(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["models"] = MODELS
    assert main(["models"]) == ExitCode.DONE
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["smollm2", "unloaded", "-", "int4,", "int8", "135", "M", "8,192", "llama", "/srv/[b]smollm2"]


def test_models_json_shortens_lists_of_enums(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["models"] = MODELS
    assert main(["models", "--json"]) == ExitCode.DONE
    model = json.loads(capsys.readouterr().out)["models"][0]
    assert model["resident"] == ["int4", "int8"]
    assert model["mode"] is None
    assert model["parameters"] == 134_515_008


def test_load_tells_mode_and_time(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["load"] = control_pb2.LoadModelResponse(model=STATUS.models[0], load_ms=1234.5)
    assert main(["load", "smollm2", "--path", "/srv/x"]) == ExitCode.DONE
    assert daemon.requests == [control_pb2.LoadModelRequest(model="smollm2", path="/srv/x")]
    assert capsys.readouterr().out == f"smollm2: serving in int4, generation {2**40}, loaded in 1,234 ms\n"


def test_load_json(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["load"] = control_pb2.LoadModelResponse(model=STATUS.models[0], load_ms=1234.5)
    assert main(["load", "smollm2", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["load_ms"], document["model"]["name"]) == (1234.5, "smollm2")


@pytest.mark.parametrize(
    ("aborted", "line"),
    [(0, "smollm2: unloaded in 88 ms\n"), (3, "smollm2: unloaded in 88 ms, 3 requests aborted\n")],
)
def test_unload_tells_time_and_aborted_requests(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str], aborted: int, line: str
) -> None:
    daemon.replies["unload"] = control_pb2.UnloadModelResponse(
        model="smollm2", aborted_requests=aborted, unload_ms=88.2
    )
    assert main(["unload", "smollm2"]) == ExitCode.DONE
    assert capsys.readouterr().out == line


def test_unload_json(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["unload"] = control_pb2.UnloadModelResponse(model="smollm2", unload_ms=88.25)
    assert main(["unload", "smollm2", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {"model": "smollm2", "aborted_requests": 0, "unload_ms": 88.25}


# ---- switch


def switched(**fields: Any) -> control_pb2.SwitchPrecisionResponse:
    return control_pb2.SwitchPrecisionResponse(model="smollm2", from_mode=INT4, to_mode=INT8, generation=3, **fields)


def test_switch_needs_no_model_name(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["switch"] = switched(resident=True, done=True, flip_us=12.34)
    assert main(["switch", "int8"]) == ExitCode.DONE
    assert daemon.requests == [
        control_pb2.SwitchPrecisionRequest(mode=INT8, in_flight=common_pb2.IN_FLIGHT_MIGRATE, wait=True)
    ]
    assert capsys.readouterr().out == "smollm2: int4 → int8, generation 3, resident, flip 12.3 µs\n"


def test_switch_to_a_mode_not_resident_tells_its_preparation(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["switch"] = switched(done=True, flip_us=9.0, prepare_ms=2345.6)
    assert main(["switch", "smollm2", "INT8", "--in-flight", "finish"]) == ExitCode.DONE
    assert daemon.requests[0].model == "smollm2"
    assert daemon.requests[0].in_flight == common_pb2.IN_FLIGHT_FINISH
    assert "prepared in 2,346 ms, flip 9.0 µs" in capsys.readouterr().out


def test_switch_that_goes_on_in_the_background_does_not_wait(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["switch"] = switched(done=False)
    assert main(["switch", "int8", "--no-wait"]) == ExitCode.DONE
    assert daemon.requests[0].wait is False
    assert "int4 → int8, being prepared in the background" in capsys.readouterr().out


def test_switch_json(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["switch"] = switched(resident=True, done=True, flip_us=12.5, total_ms=1.5)
    assert main(["switch", "int8", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {
        "model": "smollm2",
        "from_mode": "int4",
        "to_mode": "int8",
        "generation": 3,
        "resident": True,
        "done": True,
        "flip_us": 12.5,
        "prepare_ms": 0.0,
        "total_ms": 1.5,
    }


# ---- history, watch


PROOFS = [
    control_pb2.ModeProof(mode=INT4, kl_before=0.414, kl_after=0.205, agreement=0.812),
    control_pb2.ModeProof(mode=INT8, kl_after=0.0029, agreement=0.971),
]
HISTORY = control_pb2.GetHistoryResponse(
    entries=[
        control_pb2.HistoryEntry(
            sequence=10,
            time=time_of(1_700_000_000),
            model="smollm2",
            kind="apply",
            actor="watch:a.toml,b.toml",
            from_mode=INT4,
            to_mode=INT4,
            from_generation=2,
            generation=3,
            hash="9f86d081884c7d659a2feaa0",
            parameter_set="5e884898da28047151d0e56f",
            in_flight=common_pb2.IN_FLIGHT_FINISH,
            outcome="committed",
            phases_ms={"extra": 0.5, "prove": 20.0, "build": 1000.0, "validate": 2.0},
            flip_us=18.2,
            proofs=PROOFS,
        ),
        control_pb2.HistoryEntry(
            sequence=9,
            time=time_of(1_700_000_000),
            model="smollm2",
            kind="switch",
            actor="rpc:unix",
            from_mode=INT4,
            to_mode=FP32,
            from_generation=2,
            generation=2,
            in_flight=common_pb2.IN_FLIGHT_MIGRATE,
            outcome="committed",
            phases_ms={"prove": 20.0, "build": 1000.0},
            flip_us=11.0,
        ),
        control_pb2.HistoryEntry(sequence=8, model="smollm2", kind="load", outcome="rejected", reason="no memory"),
    ]
)


def test_history_shows_one_row_for_each_change_and_the_reasons_below(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["history"] = HISTORY
    assert main(["history", "smollm2", "--limit", "3"]) == ExitCode.DONE
    assert daemon.requests == [control_pb2.GetHistoryRequest(model="smollm2", limit=3)]
    header, apply_row, switch_row, load_row, blank, reason = capsys.readouterr().out.splitlines()
    columns = ["#", "TIME", "MODEL", "KIND", "GEN", "MODE", "HASH", "KL", "TOOK", "OUTCOME", "BY"]
    assert header.split() == columns
    told = "smollm2 apply 2 → 3 int4 9f86d081 0.4140 → 0.2050 1,022 ms committed watch:a.toml,b.toml"
    assert " ".join(apply_row.split()[3:]) == told
    assert " ".join(switch_row.split()[3:]) == "smollm2 switch 2 int4 → fp32 - - 1,020 ms committed rpc:unix"
    assert " ".join(load_row.split()[3:]) == "smollm2 load - - - - - rejected"
    assert (blank, reason) == ("", "#8: no memory")


def test_history_has_no_columns_that_are_empty_throughout(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["history"] = control_pb2.GetHistoryResponse(entries=HISTORY.entries[1:2])
    assert main(["history"]) == ExitCode.DONE
    header = capsys.readouterr().out.splitlines()[0].split()
    assert header == ["#", "TIME", "MODEL", "KIND", "GEN", "MODE", "TOOK", "OUTCOME", "BY"]


def test_history_keeps_every_value_whole_on_a_line_of_120_columns() -> None:
    console = Console(file=io.StringIO(), width=120, _environ={})
    console.print(history_as_text(HISTORY))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "0.4140 → 0.2050" in lines[1]
    assert "committed" in lines[1]
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert len(lines) <= 7  # only the name of who asked may be folded


def test_what_does_not_fit_in_a_table_is_folded_and_not_cut() -> None:
    console = Console(file=io.StringIO(), width=20, _environ={})
    made = table("PATH")
    made.add_row("/a" * 15)
    console.print(made)
    assert "".join(console.file.getvalue().split()) == "PATH" + "/a" * 15  # type: ignore[attr-defined]


def test_history_in_full_shows_everything_and_phases_in_the_order_they_ran(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["history"] = HISTORY
    assert main(["history", "--full"]) == ExitCode.DONE
    applied, switched_, loaded = capsys.readouterr().out.split("\n\n")
    lines = [" ".join(line.split()) for line in applied.splitlines()]
    assert lines[0].startswith("#10 2023-11-14 ")
    assert lines[1:] == [
        "model smollm2",
        "kind apply",
        "by watch:a.toml,b.toml",
        "outcome committed",
        "generation 2 → 3",
        "hash 9f86d081884c7d659a2feaa0",
        "parameter set 5e884898da28047151d0e56f",
        "mode int4",
        "in flight finish",
        "KL int4 0.4140 → 0.2050 nats per token, same most probable token at 81.2%",
        "KL int8 0.0029 nats per token, same most probable token at 97.1%",
        "phases validate 2.0 ms, build 1,000 ms, prove 20.0 ms, extra 0.5 ms",
        "flip 18.2 µs",
    ]
    assert "int4 → fp32" in switched_
    assert loaded.rstrip().splitlines()[-1].split() == ["reason", "no", "memory"]


def test_history_json(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["history"] = HISTORY
    assert main(["history", "--json"]) == ExitCode.DONE
    applied, switch, load = json.loads(capsys.readouterr().out)["entries"]
    assert switch["phases_ms"] == {"build": 1000.0, "prove": 20.0}
    assert (switch["in_flight"], load["in_flight"]) == ("migrate", None)
    assert switch["sequence"] == 9
    assert (applied["from_generation"], applied["parameter_set"]) == (2, "5e884898da28047151d0e56f")
    int4, int8 = applied["proofs"]
    assert int4 == {"mode": "int4", "kl_before": 0.414, "kl_after": 0.205, "agreement": 0.812}
    assert "kl_before" not in int8


def test_history_of_nothing_says_so(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["history"] = control_pb2.GetHistoryResponse()
    assert main(["history"]) == ExitCode.DONE
    assert capsys.readouterr().out == "nothing has been changed yet\n"


def event(sequence: int) -> control_pb2.Event:
    made = control_pb2.Event(
        sequence=sequence, time=time_of(1), kind="switch.committed", model="smollm2", message="int4 -> int8"
    )
    made.fields["flip_us"] = 12.5
    return made


def test_watch_prints_a_line_for_each_event(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["watch"] = [event(1), event(2)]
    assert main(["watch", "smollm2"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("switch.committed  smollm2  int4 -> int8")


def test_watch_json_is_one_object_a_line(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["watch"] = [event(1), event(2)]
    assert main(["watch", "--json"]) == ExitCode.DONE
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["sequence"] for item in events] == [1, 2]
    assert events[0]["fields"] == {"flip_us": 12.5}


# ---- apply, rollback


CHANGED = control_pb2.ChangeResponse(
    model="smollm2",
    from_generation=3,
    to_generation=4,
    from_mode=INT4,
    to_mode=INT4,
    hash="9f86d081884c7d659a2feaa0",
    parameter_set="5e884898da28047151d0e56f",
    changed=True,
    done=True,
    proofs=PROOFS,
    phases_ms={"commit": 3.25, "prove": 410.2, "build": 2300.4, "validate": 12.1},
    flip_us=18.2,
    total_ms=2731.5,
)
CONFIG = 'model = "smollm2"\nprecision = "int8"  # sûr\n'


def changed(**fields: Any) -> control_pb2.ChangeResponse:
    """CHANGED with other fields."""
    made = control_pb2.ChangeResponse()
    made.CopyFrom(CHANGED)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def parameter_set(tmp_path: Path) -> Path:
    """A directory whose name needs care, with a manifest."""
    directory = tmp_path / "set \"x\" \\ 'ü' [b]\x7f\t$HOME"
    directory.mkdir()
    (directory / "manifest.json").write_bytes(b"{}")
    return directory


SHA256_OF_MANIFEST = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
"""Of the two bytes "{}", by sha256sum."""


def test_apply_sends_the_text_of_a_config_and_where_its_paths_start(
    daemon: ScriptedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.replies["apply"] = CHANGED
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.toml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["apply", "sub/a.toml"]) == ExitCode.DONE
    assert daemon.requests == [
        control_pb2.ApplyConfigRequest(config=CONFIG, base_directory=str(tmp_path / "sub"), wait=True)
    ]


def test_apply_reads_a_config_from_stdin_whose_paths_start_where_one_is(
    daemon: ScriptedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.replies["apply"] = CHANGED
    set_stdin(monkeypatch, CONFIG.encode())
    monkeypatch.chdir(tmp_path)
    assert main(["apply", "-", "--dry-run", "--no-wait"]) == ExitCode.DONE
    assert daemon.requests == [
        control_pb2.ApplyConfigRequest(config=CONFIG, base_directory=str(tmp_path), dry_run=True)
    ]


@pytest.mark.parametrize("named", ["directory", "manifest"])
def test_apply_writes_the_config_for_a_parameter_set(daemon: ScriptedDaemon, parameter_set: Path, named: str) -> None:
    daemon.replies["apply"] = CHANGED
    path = parameter_set if named == "directory" else parameter_set / "manifest.json"
    assert main(["apply", str(path), "--model", 'm"\\', "--in-flight", "finish"]) == ExitCode.DONE
    (request,) = daemon.requests
    assert tomli.loads(request.config) == {
        "model": 'm"\\',
        "in_flight": "finish",
        "params": {"file": str(parameter_set), "sha256": SHA256_OF_MANIFEST},
    }
    assert (request.base_directory, request.wait) == ("", True)


def test_apply_of_a_set_asks_the_daemon_for_its_only_model(
    daemon: ScriptedDaemon, parameter_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.replies |= {"status": STATUS, "apply": CHANGED}
    monkeypatch.chdir(parameter_set)
    assert main(["apply", "."]) == ExitCode.DONE
    _, request = daemon.requests
    assert tomli.loads(request.config) == {
        "model": "smollm2",
        "params": {"file": str(parameter_set), "sha256": SHA256_OF_MANIFEST},
    }


@pytest.mark.parametrize(("names", "told"), [((), "none"), (("a", "b"), "a, b")])
def test_apply_of_a_set_needs_the_model_unless_exactly_one_serves(
    daemon: ScriptedDaemon,
    parameter_set: Path,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
    told: str,
) -> None:
    serving = [control_pb2.ModelStatus(name=name, state=control_pb2.MODEL_STATE_SERVING) for name in names]
    failed = control_pb2.ModelStatus(name="c", state=control_pb2.MODEL_STATE_FAILED)
    daemon.replies["status"] = control_pb2.GetStatusResponse(models=[*serving, failed])
    assert main(["apply", str(parameter_set)]) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(f"--model is needed, unless exactly one model serves; serving: {told}\n")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_as_a_string_of_toml(text: str) -> None:
    assert tomli.loads(f"x = {toml_string(text)}") == {"x": text}


def test_apply_tells_what_changed_and_what_it_took(
    daemon: ScriptedDaemon, parameter_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["apply"] = CHANGED
    assert main(["apply", str(parameter_set), "--model", "smollm2"]) == ExitCode.DONE
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "model smollm2",
        "generation 3 → 4",
        "mode int4",
        "parameter set 5e884898da28",
        "KL int4 0.4140 → 0.2050 nats per token, same most probable token at 81.2%",
        "KL int8 0.0029 nats per token, same most probable token at 97.1%",
        "phases validate 12.1 ms, build 2,300 ms, prove 410 ms, commit 3.2 ms",
        "flip 18.2 µs",
        "total 2,732 ms",
    ]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_apply_of_what_serves_already_says_so(
    daemon: ScriptedDaemon, parameter_set: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    daemon.replies["apply"] = changed(changed=False, from_generation=4)
    assert main(["apply", str(parameter_set), "--model", "smollm2", *options]) == ExitCode.DONE
    line = "smollm2: already serving: generation 4, int4, parameter set 5e884898da28\n"
    assert capsys.readouterr().out == line


def test_a_dry_run_says_that_nothing_was_changed_and_what_would_be(
    daemon: ScriptedDaemon, parameter_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["apply"] = control_pb2.ChangeResponse(
        model="smollm2", from_generation=3, to_generation=4, from_mode=INT4, to_mode=INT8, changed=True
    )
    assert main(["apply", str(parameter_set), "--model", "smollm2", "--dry-run"]) == ExitCode.DONE
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "dry run: nothing was changed; this is what would be",
        "model smollm2",
        "generation 3 → 4",
        "mode int4 → int8",
    ]


def test_apply_without_waiting_says_that_it_goes_on(
    daemon: ScriptedDaemon, parameter_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["apply"] = changed(done=False)
    assert main(["apply", str(parameter_set), "--model", "smollm2", "--no-wait"]) == ExitCode.DONE
    assert daemon.requests[0].wait is False
    assert capsys.readouterr().out.startswith("smollm2: goes on in the background; `dskctl watch` tells how it ends\n")


@pytest.mark.parametrize("verb", ["apply", "rollback"])
def test_changes_as_json_hold_everything(
    daemon: ScriptedDaemon, parameter_set: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    daemon.replies[verb] = CHANGED
    arguments = [str(parameter_set), "--model", "smollm2"] if verb == "apply" else []
    assert main([verb, *arguments, "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {
        "model": "smollm2",
        "from_generation": 3,
        "to_generation": 4,
        "from_mode": "int4",
        "to_mode": "int4",
        "hash": "9f86d081884c7d659a2feaa0",
        "parameter_set": "5e884898da28047151d0e56f",
        "changed": True,
        "done": True,
        "proofs": [
            {"mode": "int4", "kl_before": 0.414, "kl_after": 0.205, "agreement": 0.812},
            {"mode": "int8", "kl_after": 0.0029, "agreement": 0.971},
        ],
        "phases_ms": {"validate": 12.1, "build": 2300.4, "prove": 410.2, "commit": 3.25},
        "flip_us": 18.2,
        "total_ms": 2731.5,
    }


def test_rollback_returns_to_the_generation_before_unless_told_otherwise(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["rollback"] = changed(from_generation=4, to_generation=3)
    assert main(["rollback"]) == ExitCode.DONE
    assert main(["rollback", "smollm2", "--to", "3", "--in-flight", "finish", "--no-wait"]) == ExitCode.DONE
    assert daemon.requests == [
        control_pb2.RollbackRequest(in_flight=common_pb2.IN_FLIGHT_MIGRATE, wait=True),
        control_pb2.RollbackRequest(model="smollm2", generation=3, in_flight=common_pb2.IN_FLIGHT_FINISH),
    ]
    assert "generation     4 → 3" in capsys.readouterr().out


def test_a_refused_config_names_every_wrong_field(
    daemon: ScriptedDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation
    wrong = error_details_pb2.BadRequest(
        field_violations=[
            violation(field="params.file", description="is missing"),
            violation(field="layers[0].match", description="must not be \x1b[2J empty"),
        ]
    )
    daemon.replies["apply"] = rich_error(grpc.StatusCode.INVALID_ARGUMENT, "two fields are wrong", wrong)
    (tmp_path / "a.toml").write_text(CONFIG, encoding="utf-8")
    assert main(["apply", str(tmp_path / "a.toml")]) == ExitCode.REFUSED
    assert capsys.readouterr() == (
        "",
        "dskctl: params.file: is missing\ndskctl: layers[0].match: must not be \ufffd[2J empty\n",
    )


def wrong_files(directory: Path) -> dict[str, str]:
    """Paths below `directory` that cannot be applied, and what is said of each."""
    (directory / "empty").mkdir()
    (directory / "x.toml").mkdir()
    (directory / "notes.txt").touch()
    (directory / "latin.toml").write_bytes(b"model = 'caf\xe9'")
    (directory / "set").mkdir()
    (directory / "set" / "manifest.json").mkdir()
    return {
        "empty": "no parameter set: the directory has no manifest.json",
        "x.toml": "no parameter set: the directory has no manifest.json",
        "notes.txt": "neither a quant config (*.toml) nor a parameter set (a directory)",
        "latin.toml": "not valid UTF-8 (byte 12)",
        "absent.toml": "No such file or directory",
        "absent": "neither a quant config (*.toml) nor a parameter set (a directory)",
        "gone/manifest.json": "No such file or directory",
        "set": "Is a directory",
    }


def test_what_cannot_be_applied_is_named_with_the_reason(
    daemon: ScriptedDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["status"] = STATUS
    for name, reason in wrong_files(tmp_path).items():
        assert main(["apply", str(tmp_path / name)]) == ExitCode.USAGE
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"dskctl: {tmp_path / name}")
        assert err.endswith(f": {reason}\n")
    assert {type(request) for request in daemon.requests} <= {control_pb2.GetStatusRequest}


def test_a_config_on_stdin_that_is_no_text_is_wrong_usage(
    socket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"ab\xff")
    assert main(["apply", "-"]) == ExitCode.USAGE
    assert capsys.readouterr().err == "dskctl: the quant config on stdin is not valid UTF-8 (byte 2)\n"


@pytest.mark.parametrize("option", [["--model", "m"], ["--in-flight", "finish"]])
def test_what_a_config_says_itself_is_no_option(
    socket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    (tmp_path / "a.toml").write_text(CONFIG, encoding="utf-8")
    assert main(["apply", str(tmp_path / "a.toml"), *option]) == ExitCode.USAGE
    assert "a quant config says them itself" in capsys.readouterr().err


def test_a_terminal_shows_what_the_daemon_does_while_it_waits(daemon: ScriptedDaemon, parameter_set: Path) -> None:
    building = event(1)
    building.message = "building \x1b[31mint4"
    daemon.replies |= {"watch": [building, "hang"], "apply": "hang"}
    terminal = Terminal("apply", str(parameter_set), "--model", "smollm2")
    try:
        terminal.expect("smollm2: building \ufffd[31mint4")
        assert daemon.called.wait(WAIT_S)
        terminal.type("\x03")
        assert terminal.program.wait(WAIT_S) == ExitCode.INTERRUPTED
    finally:
        terminal.close()


MORTAL_DAEMON = """
import os, sys
from concurrent import futures
import grpc
from dskapi.v1 import control_pb2_grpc

class Control(control_pb2_grpc.ControlServicer):
    def ApplyConfig(self, request, context):
        os._exit(9)

server = grpc.server(futures.ThreadPoolExecutor(1))
control_pb2_grpc.add_ControlServicer_to_server(Control(), server)
server.add_insecure_port(sys.argv[1])
server.start()
print("listening", flush=True)
server.wait_for_termination()
"""
"""Dies of the first config it is sent."""


def test_a_daemon_that_dies_in_the_middle_is_unreachable(
    parameter_set: Path, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", MORTAL_DAEMON, f"unix://{socket}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as mortal:
        assert mortal.stdout is not None
        assert mortal.stdout.readline() == b"listening\n"
        assert main(["apply", str(parameter_set), "--model", "smollm2"]) == ExitCode.UNREACHABLE
    assert capsys.readouterr().err.startswith(f"dskctl: no daemon reached at unix://{socket}: ")


def test_a_change_that_takes_longer_than_the_deadline_times_out(daemon: ScriptedDaemon) -> None:
    daemon.replies["rollback"] = "hang"
    assert main(["rollback", "--timeout", "0.2"]) == ExitCode.TIMED_OUT
    assert daemon.cancelled.wait(WAIT_S)


# ---- generate


def test_generate_marks_where_the_mode_changes_and_sums_up(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "smollm2", "Tell"]) == ExitCode.DONE
    text, summary = capsys.readouterr().out.splitlines()
    assert text == "⟦int4⟧Once upon ⟦int8⟧a ⟦fp32⟧time"
    assert summary == "4 tokens (int4 2, int8 1, fp32 1) · first token 85 ms · 41.2 tokens/s · end of text"


def test_generate_sends_every_option(daemon: ScriptedDaemon) -> None:
    daemon.replies["generate"] = ANSWER
    options = "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.75 --min-p 0.25 --repetition-penalty 1.5 --seed 3"
    more = "--stop A --stop B --precision fp32 --logprobs 2 --ignore-eos"
    assert main(["generate", *options.split(), *more.split(), "smollm2", "Tell"]) == ExitCode.DONE
    assert daemon.requests == [
        inference_pb2.GenerateRequest(
            model="smollm2",
            prompt="Tell",
            max_new_tokens=9,
            sampling=inference_pb2.Sampling(
                temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, repetition_penalty=1.5, seed=3
            ),
            stop=["A", "B"],
            precision=FP32,
            top_logprobs=2,
            ignore_eos=True,
        )
    ]


def test_generate_leaves_what_is_not_said_to_the_daemon(daemon: ScriptedDaemon) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "Tell"]) == ExitCode.DONE
    request = daemon.requests[0]
    assert request.prompt == "Tell"
    assert not request.HasField("max_new_tokens")
    assert request.sampling == inference_pb2.Sampling()


def test_generate_takes_token_ids_in_place_of_a_prompt(daemon: ScriptedDaemon) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "smollm2", "--tokens", "1,2,3"]) == ExitCode.DONE
    assert daemon.requests[0].model == "smollm2"
    assert daemon.requests[0].tokens.ids == [1, 2, 3]


def test_generate_as_chat_wraps_the_prompt_in_messages(daemon: ScriptedDaemon) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "--system", "Be brief.", "Why?"]) == ExitCode.DONE
    messages = [(message.role, message.content) for message in daemon.requests[0].chat.messages]
    assert messages == [("system", "Be brief."), ("user", "Why?")]


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_generate_reads_the_prompt_from_stdin(daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.replies["generate"] = ANSWER
    set_stdin(monkeypatch, "zwölf\nBoxkämpfer".encode())
    assert main(["generate", "-"]) == ExitCode.DONE
    assert daemon.requests[0].prompt == "zwölf\nBoxkämpfer"


def test_generate_raw_is_the_text_alone(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "--raw", "Tell"]) == ExitCode.DONE
    assert capsys.readouterr().out == "Once upon a time"


def test_generate_json_is_one_object_for_each_response(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = ANSWER
    assert main(["generate", "--json", "Tell"]) == ExitCode.DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(line["text"] for line in lines) == "Once upon a time"
    assert [line["tokens"][0]["precision"] for line in lines] == ["int4", "int4", "int8", "fp32"]
    assert [line["finish_reason"] for line in lines] == [None, None, None, "end_of_text"]
    assert lines[-1]["usage"]["generated_tokens"] == 4
    assert "usage" not in lines[0]


def test_generate_shows_logprobs_after_the_answer(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    answer = last_response("time", INT4)
    answer.tokens[0].logprob = -0.25
    answer.tokens[0].top_logprobs.add(id=7, logprob=-0.25, text=" time")
    daemon.replies["generate"] = [answer]
    assert main(["generate", "--logprobs", "1", "Tell"]) == ExitCode.DONE
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split() == ["7", "int4", "-0.250", "'", "time'", "-0.250"]


def test_an_answer_that_breaks_off_ends_its_line_before_the_error(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = [response("Once ", INT4), rich_error(grpc.StatusCode.UNAVAILABLE, "shutting down")]
    assert main(["generate", "Tell"]) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert captured.out == "⟦int4⟧Once \n"
    assert captured.err == "dskctl: shutting down\n"


def test_a_coloured_terminal_gets_legend_and_colours_but_no_control_characters_of_the_model() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", _environ={})
    view = MarkedAnswer(console)
    for part in [response("Once", INT4), last_response("\x1b]0;title\x07[bold]", INT8)]:
        view.write(part)
    view.end()
    legend, text, _ = output.getvalue().splitlines()
    assert [mode in legend for mode in ("int4", "int8", "fp16", "fp32")] == [True] * 4
    yellow, bold_green, green, reset = "\x1b[33m", "\x1b[1;32m", "\x1b[32m", "\x1b[0m"
    assert text.endswith(f"{yellow}Once{reset}{bold_green}⟦int8⟧{reset}{green}\ufffd]0;title\ufffd[bold]{reset}")


def test_a_terminal_gets_every_character_that_is_no_control_character() -> None:
    assert printable("a\u00a0b\u3000c\u200dd\te\n") == "a\u00a0b\u3000c\u200dd\te\n"
    assert printable("\x1b[2J\r\x9b1m\x7f") == "\ufffd[2J\ufffd\ufffd1m\ufffd"


def test_what_is_no_terminal_gets_the_text_as_it_is() -> None:
    output = io.StringIO()
    view = MarkedAnswer(Console(file=output, width=80, _environ={}))
    view.write(response("a\tb\r\n" + "x" * 100, INT4))
    assert output.getvalue() == "⟦int4⟧a\tb\r\n" + "x" * 100


def test_no_color_gets_markers_without_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    view = MarkedAnswer(Console(file=output, force_terminal=True, no_color=True, color_system=None, _environ={}))
    view.write(response("Once", INT4))
    view.end()
    assert output.getvalue() == "⟦int4⟧Once\n"


def test_text_held_back_by_the_tokenizer_belongs_to_the_mode_that_completed_it() -> None:
    output = io.StringIO()
    view = MarkedAnswer(Console(file=output, width=80, _environ={}))
    for part in [response("", INT4), response("é", INT8), response("!", finish_reason=1)]:
        view.write(part)
    assert output.getvalue() == "⟦int8⟧é!"


# ---- chat


def test_chat_keeps_the_conversation_and_takes_commands(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = [last_response("Yes.", INT4)]
    daemon.replies["switch"] = switched(resident=True, done=True, flip_us=1.0)
    script = ["First?", "/switch int8", "/system Be brief.", "", "Second?", "/reset", "Third?", "/quit", "Never."]
    set_stdin(monkeypatch, "\n".join(script).encode())
    assert main(["chat", "smollm2", "--max-tokens", "5"]) == ExitCode.DONE
    first, switch, second, third = daemon.requests
    assert (switch.model, switch.mode, switch.wait) == ("smollm2", INT8, False)
    assert [message.content for message in first.chat.messages] == ["First?"]
    assert [message.content for message in second.chat.messages] == ["Be brief.", "First?", "Yes.", "Second?"]
    assert [message.role for message in second.chat.messages] == ["system", "user", "assistant", "user"]
    assert [message.content for message in third.chat.messages] == ["Be brief.", "Third?"]
    assert third.max_new_tokens == 5
    assert "int4 → int8" in capsys.readouterr().out


def test_chat_names_a_command_it_does_not_know(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"/swich int8\n")
    assert main(["chat"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("no command /swich; there are: /switch MODE")
    assert daemon.requests == []


def test_chat_help_names_the_commands_and_when_they_count(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"/help\n")
    assert main(["chat"]) == ExitCode.DONE
    commands, when, _ = capsys.readouterr().out.splitlines()
    assert commands.split(" · ") == ["/switch MODE", "/system TEXT", "/reset", "/help", "/quit"]
    assert when.startswith("Commands count between answers; `dskctl switch` in another terminal")
    assert daemon.requests == []


def test_chat_json_is_one_object_for_each_response(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = ANSWER
    daemon.replies["switch"] = switched(done=True)
    set_stdin(monkeypatch, b"/switch int8\nHello\n")
    assert main(["chat", "--json"]) == ExitCode.DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["to_mode"] == "int8"
    assert [line["text"] for line in lines[1:]] == ["Once ", "upon ", "a ", "time"]


def test_chat_with_piped_input_ends_with_the_first_refusal(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["generate"] = rich_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests")
    set_stdin(monkeypatch, b"One\nTwo\n")
    assert main(["chat"]) == ExitCode.REFUSED
    assert len(daemon.requests) == 1
    assert capsys.readouterr().err == "dskctl: too many requests\n"


class Terminal:
    """A program in a terminal of its own, which is its controlling one: Ctrl-C becomes SIGINT."""

    TAKE_TERMINAL = (
        "import os, sys; os.open(os.ttyname(0), os.O_RDWR); from dskctl.__main__ import main; sys.exit(main())"
    )

    def __init__(self, *arguments: str) -> None:
        self._screen, program_side = pty.openpty()
        command = [sys.executable, "-c", self.TAKE_TERMINAL, *arguments]
        self.program = subprocess.Popen(
            command, stdin=program_side, stdout=program_side, stderr=program_side, start_new_session=True
        )
        os.close(program_side)
        self._unread = b""

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def expect(self, text: str) -> str:
        """Everything up to and with `text`, waiting until it comes."""
        while text.encode() not in self._unread:
            ready, _, _ = select.select([self._screen], [], [], WAIT_S)
            assert ready, f"{text!r} does not come after {self._unread!r}"
            self._unread += os.read(self._screen, 4096)
        before, _, self._unread = self._unread.partition(text.encode())
        return before.decode() + text

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self._screen)


@pytest.fixture
def chat_terminal(daemon: ScriptedDaemon) -> Iterator[Terminal]:
    terminal = Terminal("chat")
    terminal.expect("> ")
    yield terminal
    terminal.close()


def test_chat_on_a_terminal_goes_on_after_a_refusal(daemon: ScriptedDaemon, chat_terminal: Terminal) -> None:
    daemon.replies["generate"] = rich_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests")
    chat_terminal.type("One\n")
    chat_terminal.expect("too many requests")
    chat_terminal.expect("> ")
    daemon.replies["generate"] = [last_response("Yes.", INT4)]
    chat_terminal.type("Two\n")
    chat_terminal.expect("Yes.")
    assert [message.content for message in daemon.requests[1].chat.messages] == ["Two"]


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves_the_chat(daemon: ScriptedDaemon, chat_terminal: Terminal) -> None:
    daemon.replies["generate"] = [response("Once", INT4), "hang"]
    chat_terminal.type("One\n")
    chat_terminal.expect("Once")
    assert daemon.called.wait(WAIT_S)
    chat_terminal.type("\x03")
    assert daemon.cancelled.wait(WAIT_S)
    chat_terminal.expect("> ")
    daemon.replies["generate"] = [last_response("Yes.", INT4)]
    chat_terminal.type("Two\n")
    chat_terminal.expect("Yes.")
    chat_terminal.expect("> ")
    assert [message.content for message in daemon.requests[-1].chat.messages] == ["One", "Once", "Two"]
    chat_terminal.type("\x04")
    assert chat_terminal.program.wait(WAIT_S) == ExitCode.DONE


def test_ctrl_c_at_the_prompt_of_the_chat_only_clears_the_line(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = iter([KeyboardInterrupt, "One", EOFError])

    def read_line(_: str) -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read_line)
    daemon.replies["generate"] = [last_response("Yes.", INT4)]
    assert main(["chat"]) == ExitCode.DONE
    assert len(daemon.requests) == 1
    assert "Yes." in capsys.readouterr().out


# ---- errors and exit codes


def test_an_invalid_field_is_named(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    violations = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
        ]
    )
    daemon.replies["generate"] = rich_error(grpc.StatusCode.INVALID_ARGUMENT, "invalid request", violations)
    assert main(["generate", "--top-p", "7", "Tell"]) == ExitCode.REFUSED
    assert capsys.readouterr() == ("", "dskctl: sampling.top_p: must be in (0, 1]\n")


def test_an_unknown_model_comes_with_the_known_ones(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    info = error_details_pb2.ResourceInfo(resource_type="model", resource_name="x", description="known: smollm2")
    daemon.replies["status"] = rich_error(grpc.StatusCode.NOT_FOUND, "no model 'x'", info)
    assert main(["status", "x"]) == ExitCode.REFUSED
    assert capsys.readouterr().err == "dskctl: no model 'x'\ndskctl: known: smollm2\n"


def test_what_ran_out_comes_with_the_time_to_try_again(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "256 requests wait already"
    quota = error_details_pb2.QuotaFailure(
        violations=[error_details_pb2.QuotaFailure.Violation(subject="queue", description=text)]
    )
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    daemon.replies["generate"] = rich_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text, quota, retry)
    assert main(["generate", "Tell"]) == ExitCode.REFUSED
    assert capsys.readouterr().err == f"dskctl: {text}\ndskctl: try again in 1.5 s\n"


def test_an_unmet_precondition_tells_what_stands_in_the_way(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = error_details_pb2.PreconditionFailure(
        violations=[error_details_pb2.PreconditionFailure.Violation(subject="fp16", description="needs 300 MiB")]
    )
    daemon.replies["switch"] = rich_error(grpc.StatusCode.FAILED_PRECONDITION, "fp16 does not fit", failure)
    assert main(["switch", "fp16"]) == ExitCode.REFUSED
    assert capsys.readouterr().err == "dskctl: fp16 does not fit\ndskctl: needs 300 MiB\n"


def test_a_daemon_that_shuts_down_refuses_but_is_not_unreachable(daemon: ScriptedDaemon) -> None:
    daemon.replies["status"] = rich_error(grpc.StatusCode.UNAVAILABLE, "shutting down")
    assert main(["status"]) == ExitCode.REFUSED


def test_an_error_without_details_names_its_kind(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["status"] = "no message at all"
    assert main(["status"]) == ExitCode.REFUSED
    assert capsys.readouterr().err.startswith("dskctl: internal: ")


def test_no_daemon_names_the_address_and_how_to_start_one(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == ExitCode.UNREACHABLE
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"dskctl: no daemon reached at unix://{socket}: No such file or directory"
    assert "dskd serve" in second


def test_a_port_nobody_listens_on_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "127.0.0.1:1", "status"]) == ExitCode.UNREACHABLE
    assert "127.0.0.1:1: Connection refused" in capsys.readouterr().err


def test_the_deadline_ends_a_call_and_the_daemon_learns_of_it(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["status"] = "hang"
    assert main(["--timeout", "0.2", "status"]) == ExitCode.TIMED_OUT
    assert capsys.readouterr().err == "dskctl: timed out; --timeout gives it more time\n"
    assert daemon.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("command", ["switch int8", "apply -", "rollback", "load m", "unload m"])
def test_the_deadline_of_a_change_says_that_the_daemon_goes_on(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    verb, *arguments = command.split()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'model = "m"')))
    daemon.replies[verb] = "hang"
    assert main(["--timeout", "0.2", verb, *arguments]) == ExitCode.TIMED_OUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dskctl: timed out waiting; the daemon goes on with what it has begun: `dskctl watch`")


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("verb", [["status"], ["generate", "Tell"], ["watch"]])
def test_ctrl_c_however_often_cancels_the_call_and_exits_130(
    daemon: ScriptedDaemon, verb: list[str], times: int
) -> None:
    daemon.replies[verb[0]] = "hang"
    command = [sys.executable, "-m", "dskctl", *verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert daemon.called.wait(WAIT_S)
        for _ in range(times):
            child.send_signal(signal.SIGINT)
        output = child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.INTERRUPTED
    assert output == (b"", b"")
    assert daemon.cancelled.wait(WAIT_S)


def test_ctrl_c_while_modules_are_imported_exits_130_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "dskctl", "status"]
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"importing\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=WAIT_S) == (b"", b"")
    assert child.returncode == ExitCode.INTERRUPTED


class Call:
    """A call of gRPC that has no responses and waits to be cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[str]:
        self.cancelled.wait(WAIT_S)
        return iter(())

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def obeys_ctrl_c() -> Iterator[None]:
    """Shells start what runs in the background with Ctrl-C ignored, and the tests may run so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("obeys_ctrl_c")
def test_a_call_that_ctrl_c_strikes_before_it_has_begun_is_cancelled_when_it_has() -> None:
    call, struck = Call(), threading.Event()

    def start() -> Call:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        struck.wait(WAIT_S)
        return call

    with pytest.raises(KeyboardInterrupt):
        next(relayed(start))
    assert not call.cancelled.is_set()
    struck.set()
    assert call.cancelled.wait(WAIT_S)


def test_a_stream_over_a_closed_channel_raises_instead_of_waiting(socket: Path) -> None:
    channel = open_channel(f"unix://{socket}")
    daemon = Daemon.over(channel)
    channel.close()
    with pytest.raises(ValueError, match="closed"):
        next(daemon.watch_events(control_pb2.WatchEventsRequest()))


@pytest.mark.parametrize("form", [["--raw"], ["--json"], []])
def test_a_reader_that_goes_away_is_no_error(daemon: ScriptedDaemon, form: list[str]) -> None:
    daemon.replies["generate"] = [response("word " * 20_000, INT4), response("word " * 20_000, INT4)]
    command = [sys.executable, "-m", "dskctl", "generate", *form, "Tell"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(WAIT_S) == ExitCode.DONE
        assert child.stderr is not None
        assert child.stderr.read() == b""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["switch"],
        ["switch", "int3"],
        ["switch", "smollm2", "int4", "x"],
        ["apply"],
        ["apply", "a.toml", "b.toml"],
        ["apply", "a.toml", "--in-flight", "later"],
        ["apply", "\udcff.toml"],
        ["apply", "absent.toml"],
        ["rollback", "smollm2", "3"],
        ["rollback", "--to", "0"],
        ["rollback", "--to", "first"],
        ["generate"],
        ["generate", "a", "b", "c"],
        ["generate", "a", "b", "--tokens", "1"],
        ["generate", "--tokens", "1,x"],
        ["generate", "--tokens", f"{2**31}"],
        ["generate", "--seed", "-1", "Tell"],
        ["generate", "--max-tokens", "many", "Tell"],
        ["generate", "--raw", "--json", "Tell"],
        ["generate", "\udcff"],
        ["--timeout", "0", "status"],
        ["--timeout", "soon", "status"],
        ["--address", "nowhere", "status"],
        ["--address", "host:0", "status"],
        ["--address", "unix://relative.sock", "status"],
        ["--address", f"unix:///{'x' * 107}", "status"],
        ["--tls-cert", "c.pem", "status"],
        ["--tls-ca", "/nonexistent/ca.pem", "--address", "localhost:1", "status"],
        ["--tls-cert", "c.pem", "--tls-key", "k.pem", "status"],
        ["--tls-ca", "ca.pem", "--address", "unix:///x.sock", "status"],
    ],
)
def test_wrong_usage_exits_2_without_a_traceback(
    arguments: list[str], socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as exit_of_argparse:
        code = int(exit_of_argparse.code or 0)
    assert code == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("dskctl")


def test_a_prompt_on_stdin_that_is_no_text_is_wrong_usage(
    socket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"ab\xff")
    assert main(["generate", "-"]) == ExitCode.USAGE
    assert capsys.readouterr().err == "dskctl: the prompt on stdin is not valid UTF-8 (byte 2)\n"


# ---- address, TLS, imports


def test_the_address_comes_from_the_environment_then_the_user_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dskctl.address.SYSTEM_SOCKET", tmp_path / "system.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv("DSKD_ADDRESS", raising=False)
    assert default_address() == "unix:///run/user/7/dskd.sock"
    (tmp_path / "system.sock").touch()
    assert default_address() == f"unix://{tmp_path}/system.sock"
    monkeypatch.setenv("DSKD_ADDRESS", "models.example:7443")
    assert default_address() == "models.example:7443"


@pytest.mark.parametrize("address", ["unix:///run/x.sock", "localhost:1", "[::1]:7411", "10.0.0.1:65535"])
def test_addresses_that_can_be(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize("address", ["", "host", ":1", "host:65536", "::1:7411", "http://host:1", "unix:x"])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(UsageError):
        checked_address(address)


def test_a_bare_path_is_told_how_a_socket_is_written() -> None:
    with pytest.raises(UsageError, match=r"write unix:///run/dskd\.sock"):
        checked_address("/run/dskd.sock")


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def tls_daemon(tmp_path: Path) -> Iterator[tuple[int, Path, Path]]:
    """Port, certificate (its own authority) and key of a daemon that wants the client's certificate too."""
    certificate, key = make_certificate(tmp_path)
    scripted = ScriptedDaemon()
    scripted.replies["status"] = STATUS
    server = grpc.server(futures.ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(scripted, server)
    pair = (key.read_bytes(), certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], certificate.read_bytes(), require_client_auth=True)
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    yield port, certificate, key
    server.stop(None).wait()


def test_mutual_tls(tls_daemon: tuple[int, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    port, certificate, key = tls_daemon
    tls = ["--tls-ca", str(certificate), "--tls-cert", str(certificate), "--tls-key", str(key)]
    assert main(["--address", f"localhost:{port}", *tls, "status"]) == ExitCode.DONE
    assert "4242" in capsys.readouterr().out


@pytest.mark.parametrize("with_ca", [False, True])
def test_a_daemon_that_wants_tls_or_a_certificate_is_unreachable_without_it(
    tls_daemon: tuple[int, Path, Path], with_ca: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    port, certificate, _ = tls_daemon
    tls = ["--tls-ca", str(certificate)] if with_ca else []
    assert main(["--address", f"localhost:{port}", *tls, "status"]) == ExitCode.UNREACHABLE
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"dskctl: no daemon reached at localhost:{port}: it closed the connection at once"
    assert "--tls-ca" in second
    assert "--tls-cert" in second


def test_a_daemon_under_another_name_than_its_certificate_is_not_trusted(
    tls_daemon: tuple[int, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port, certificate, _ = tls_daemon
    assert main(["--address", f"127.0.0.1:{port}", "--tls-ca", str(certificate), "status"]) == ExitCode.UNREACHABLE
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("its certificate is for another name")
    assert "subjectAltName" in second


def test_a_certificate_of_another_authority_is_not_trusted(
    tls_daemon: tuple[int, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, _, _ = tls_daemon
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other")
    assert main(["--address", f"localhost:{port}", "--tls-ca", str(other), "status"]) == ExitCode.UNREACHABLE
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("its certificate is not trusted")
    assert "--tls-ca" in second


def test_tls_to_a_daemon_that_does_not_speak_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, _ = make_certificate(tmp_path)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("localhost:0")
    server.start()
    code = main(["--address", f"localhost:{port}", "--tls-ca", str(certificate), "status"])
    server.stop(None).wait()
    assert code == ExitCode.UNREACHABLE
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("it does not speak TLS")
    assert "--tls-ca" in second


def test_the_client_imports_no_engine_and_no_daemon() -> None:
    heavy = ["openvino", "numpy", "dskquant", "dskd", "tokenizers"]
    program = f"import sys, dskctl.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "verb",
    ["status", "models", "load", "unload", "switch", "apply", "rollback", "history", "watch", "generate", "chat"],
)
def test_every_help_text_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    assert f"examples:\n  dskctl {verb}" in capsys.readouterr().out


def test_options_of_the_connection_may_stand_before_or_after_the_verb(
    daemon: ScriptedDaemon, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSKD_ADDRESS")
    daemon.replies["status"] = STATUS
    assert main(["--address", f"unix://{socket}", "status", "--json"]) == ExitCode.DONE
    assert main(["status", "--address", f"unix://{socket}"]) == ExitCode.DONE
