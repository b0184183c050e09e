"""dskctl noise against a scripted daemon on a real socket: tables, lines, charts, JSON, pictures."""

from __future__ import annotations

import io
import json
import math
import statistics
import struct
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console, RenderableType
from tests.test_dskctl import WAIT_S, ScriptedDaemon, Terminal

from dskapi.v1 import common_pb2, control_pb2, control_pb2_grpc
from dskctl import noise_plot
from dskctl.cli import main
from dskctl.exits import ExitCode
from dskctl.noise_plot import running_mean
from dskctl.noise_samples import Polls, Recording
from dskctl.noise_view import LiveView, as_text
from dskctl.served_spans import ServedSpan, served_spans
from dskctl.sparkline import LEVELS, LogScale, bars, row_of
from dskctl.verbs.history import as_text as history_as_text
from dskctl.words import nats

INT4, INT8, FP32 = (common_pb2.PRECISION_MODE_INT4, common_pb2.PRECISION_MODE_INT8, common_pb2.PRECISION_MODE_FP32)
NAN = math.nan
START = 1_700_000_000
Snapshot = control_pb2.GetNoiseResponse


class NoisyDaemon(ScriptedDaemon):
    """Holds `total` samples of INT4, KL = 0.1 for the first, 0.2 for the second, ...; `step` more after each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 8
        self.step = 0
        self.window = 6

    def GetNoise(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if "noise" in self.replies:
            return self._reply("noise", request, context)
        self.requests.append(request)
        held = min(self.total, self.window)
        if request.samples > held:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "so many are not held")
        latest = samples(self.total)[self.total - request.samples :]
        answer = noise(int4(total_samples=self.total, samples=held, latest=latest))
        self.total += self.step if request.samples else 0
        return answer


def samples(count: int) -> list[control_pb2.NoisePoint]:
    """The first `count` samples, one a second."""
    return [
        control_pb2.NoisePoint(time=Timestamp(seconds=START + index), kl=(index + 1) / 10, agrees=True, generation=3)
        for index in range(count)
    ]


def int4(**fields: Any) -> control_pb2.ModeNoise:
    """A mode that has tripped."""
    known: dict[str, Any] = {
        "mode": INT4,
        "state": control_pb2.FALLBACK_STATE_TRIPPED,
        "cause": "disagreement",
        "trips": 2,
        "threshold": 0.41,
        "samples": 512,
        "mean_kl": 0.6123,
        "low": 0.5511,
        "high": 0.6789,
        "p50": 0.31,
        "p90": 1.4,
        "p99": 3.1,
        "agreement": 0.712,
        "total_samples": 1740,
        "evidence": 5.75,
        "evidence_needed": 11.5,
        "entropy": 2.414,
        "margin": 1.726,
        "unique_ngrams": 0.93,
    }
    return control_pb2.ModeNoise(**{**known, **fields})


INT8_UNSCORED = control_pb2.ModeNoise(
    mode=INT8,
    state=control_pb2.FALLBACK_STATE_HEALTHY,
    mean_kl=NAN,
    p50=NAN,
    p90=NAN,
    p99=NAN,
    agreement=NAN,
    entropy=NAN,
    margin=NAN,
    unique_ngrams=NAN,
)


def noise(*modes: control_pb2.ModeNoise, **fields: Any) -> Snapshot:
    return Snapshot(model="smollm2", generation=3, reference=FP32, modes=modes, **fields)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NoisyDaemon]:
    address = f"unix://{tmp_path / 'd.sock'}"
    monkeypatch.setenv("DSKD_ADDRESS", address)
    scripted = NoisyDaemon()
    scripted.replies["history"] = control_pb2.GetHistoryResponse(entries=[change(1, START - 9, "load", 0, INT4)])
    server = grpc.server(futures.ThreadPoolExecutor(4))
    control_pb2_grpc.add_ControlServicer_to_server(scripted, server)
    server.add_insecure_port(address)
    server.start()
    yield scripted
    scripted.cancelled.set()
    server.stop(None).wait()


def printed(shown: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, _environ={}, markup=False)
    console.print(shown)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def words(line: str) -> list[str]:
    return line.split()


# ---- the table


def test_the_table_shows_what_decides_and_the_samples(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["noise"] = noise(int4(non_finite=3), INT8_UNSCORED)
    assert main(["noise", "smollm2"]) == ExitCode.DONE
    assert daemon.requests == [control_pb2.GetNoiseRequest(model="smollm2")]
    rows = [words(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[2] == ["MODE", "STATE", "MEAN", "KL", "95", "%", "INTERVAL", "LIMIT", "EVIDENCE", "TRIPS", "CAUSE"]
    assert rows[3] == ["int4", "tripped", "0.61", "0.55–0.68", "0.41", "50%", "2", "disagreement"]
    assert rows[4] == ["int8", "healthy", *["-"] * 6]
    assert rows[7] == ["int4", "0.31", "1.4", "3.1", "71.2%", "512", "1,740", "3", "2.41", "1.73", "93.0%"]
    assert rows[8] == ["int8", *["-"] * 4, "0", "0", *["-"] * 4]


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_a_terminal_whole(width: int) -> None:
    lines = printed(as_text(noise(int4(mean_kl=0.00061, low=0.00055, high=0.00068, threshold=0.0012))), width)
    assert words(lines[-4]) == ["int4", "tripped", "0.00061", "0.00055–0.00068", "0.0012", "50%", "2", "disagreement"]
    assert max(map(len, lines)) <= width


def test_the_head_tells_what_keeps_a_model_from_its_mode() -> None:
    (line,) = printed(as_text(noise(int4(), fallback=INT8, pin=INT4, lowered=True, escalated_requests=2)), 200)[:1]
    assert line == (
        "smollm2 · generation 3 · KL in nats per token to fp32 · fallback: int8 serves · pinned to int4"
        " · lowered by load · 2 requests escalated"
    )


def test_a_model_without_samples_says_so(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["noise"] = Snapshot(model="smollm2", generation=3)
    assert main(["noise"]) == ExitCode.DONE
    out = capsys.readouterr().out.splitlines()
    assert out == ["smollm2 · generation 3 · no reference in memory", "no token was scored yet"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (4.2e-5, "4e-05"), (0.00291, "0.0029"), (0.3, "0.30"), (1.96, "2.0"), (12.7, "13"), (math.inf, "∞")],
)
def test_kl_is_told_with_two_digits_that_count(value: float, shown: str) -> None:
    assert nats(value) == shown


def test_json_has_null_for_what_is_not_known(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["noise"] = noise(int4(), INT8_UNSCORED)
    assert main(["noise", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    tripped, unscored = document["modes"]
    assert (tripped["state"], tripped["mean_kl"], tripped["low"], tripped["total_samples"]) == (
        "tripped",
        0.6123,
        0.5511,
        1740,
    )
    assert (unscored["mean_kl"], unscored["agreement"], unscored["samples"]) == (None, None, 0)
    assert "low" not in unscored
    assert document["fallback"] is None


# ---- gathering


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20))
def test_every_sample_that_a_daemon_still_holds_is_recorded_once(news: list[int], window: int) -> None:
    """`news` are the numbers of samples that were taken between two polls."""
    recording, total, expected = Recording(), 0, []
    for count in news:
        total += count
        told = recording.add(noise(int4(total_samples=total, latest=samples(total)[-window:])))
        new = samples(total)[total - min(count, window) :]
        assert list(told.modes[0].latest) == new
        expected += new
    assert recording.points[INT4] == expected
    assert recording.count == len(expected)


def test_a_model_that_was_loaded_again_counts_anew() -> None:
    recording = Recording()
    recording.add(noise(int4(total_samples=5, latest=samples(5))))
    again = recording.add(noise(int4(total_samples=2, latest=samples(2))))
    assert list(again.modes[0].latest) == samples(2)


def test_polls_end_when_they_are_cancelled() -> None:
    polls = Polls(Snapshot, interval_s=WAIT_S, total_s=None)
    answers = iter(polls)
    assert next(answers) == Snapshot()
    polls.cancel()
    assert list(answers) == []


def test_polls_of_no_time_at_all_ask_once() -> None:
    assert list(Polls(Snapshot, interval_s=WAIT_S, total_s=0.0)) == [Snapshot()]


def test_polls_that_end_before_the_interval_ask_once_more_at_their_end() -> None:
    assert list(Polls(Snapshot, interval_s=WAIT_S, total_s=0.01)) == [Snapshot()] * 2


# ---- live


def test_live_without_a_terminal_prints_a_line_for_each_mode_and_poll(
    daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["noise"] = noise(int4(samples=0), INT8_UNSCORED)
    assert main(["noise", "--live", "--interval", "60", "--seconds", "2"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2
    assert lines[2].endswith(
        "  smollm2  int4 tripped  KL 0.61 (0.55–0.68), limit 0.41  agree 71.2%  samples 0  evidence 50%"
    )
    assert lines[3].endswith("  smollm2  int8 healthy  KL - (-)  agree -  samples 0  evidence -")


def test_live_json_tells_each_sample_once(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.step = 2
    assert main(["noise", "--live", "--json", "--interval", "60", "--seconds", "2"]) == ExitCode.DONE
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [[point["kl"] for point in answer["modes"][0]["latest"]] for answer in (first, second)]
    assert told == [[0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.9, 1.0]]


def test_live_on_a_terminal_draws_until_ctrl_c(daemon: NoisyDaemon) -> None:
    terminal = Terminal("noise", "--live", "--interval", "60")
    try:
        terminal.expect("int4: KL of the latest 6 samples, log scale from 0.1 to 1")
        terminal.expect("limit 0.41")
        terminal.type("\x03")
        terminal.expect("\x1b[?25h")  # the cursor is back
        assert terminal.program.wait(WAIT_S) == ExitCode.INTERRUPTED
    finally:
        terminal.close()


def test_a_daemon_that_refuses_ends_the_live_view(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.replies["noise"] = "gone"
    assert main(["noise", "--live"]) == ExitCode.REFUSED
    assert "Traceback" not in capsys.readouterr().err


def test_seconds_alone_are_wrong_usage(daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["noise", "--seconds", "5"]) == ExitCode.USAGE
    assert capsys.readouterr().err == "dskctl: --seconds is for --live and --plot\n"


# ---- charts


def test_a_chart_draws_each_decade_as_high_as_the_next() -> None:
    scale = LogScale.of([0.001, 0.5])
    assert (scale.low, scale.high) == (0.001, 1.0)
    assert bars([0.00101, 0.0101, 0.101, 0.999], scale, 3) == ["  ▁█", " ▁██", "▁███"]


def test_what_is_off_the_scale_is_drawn_at_its_end() -> None:
    assert bars([0.0, math.inf], LogScale(0.01, 1.0), 2) == [" █", "▁█"]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_a_greater_value_is_never_drawn_lower(values: list[float]) -> None:
    scale = LogScale.of(values)
    heights = [scale.height(value, 3 * LEVELS) for value in sorted(values)]
    assert heights == sorted(heights)
    assert 1 <= heights[0] <= heights[-1] <= 3 * LEVELS


@given(st.floats(1e-6, 100), st.floats(1e-6, 100))
def test_the_limit_is_marked_in_the_line_that_a_bar_of_its_height_ends_in(limit: float, other: float) -> None:
    scale = LogScale.of([limit, other])
    marked = row_of(limit, scale, 3)
    lines = bars([limit], scale, 3)
    assert lines[marked] != " "
    assert all(line == " " for line in lines[:marked])
    assert all(line == "█" for line in lines[marked + 1 :])


@pytest.mark.parametrize("width", [60, 100])
def test_the_live_view_shows_the_latest_samples_as_wide_as_the_terminal(width: int) -> None:
    recording = Recording()
    told = recording.add(noise(int4(total_samples=200, latest=samples(200))))
    lines = printed(LiveView(told, recording), width)
    limited = next(line for line in lines if line.rstrip().endswith("limit 0.41"))
    assert len(limited.split()[0]) == width - 18
    assert all(len(line) <= width for line in lines)


# ---- the history behind the picture


def at(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def change(
    sequence: int, time: float, kind: str, from_mode: int, to_mode: int, **fields: Any
) -> control_pb2.HistoryEntry:
    known = {"generation": 3, "from_generation": 3, "outcome": "committed", "actor": "monitor", "model": "smollm2"}
    modes: dict[str, Any] = {"from_mode": from_mode, "to_mode": to_mode}
    return control_pb2.HistoryEntry(sequence=sequence, time=at(time), kind=kind, **{**known, **modes, **fields})


def test_the_picture_knows_what_served_and_when_it_was_a_fallback() -> None:
    history = [
        change(8, 80, "switch", INT8, INT4),
        change(7, 60, "switch", INT4, INT8),
        change(6, 55, "fallback", INT4, FP32, outcome="suppressed"),
        change(5, 50, "fallback", INT4, INT4),
        change(4, 40, "fallback", FP32, INT4),
        change(3, 30, "fallback", INT8, FP32),
        change(2, 20, "fallback", INT4, INT8),
        change(1, 10, "load", 0, INT4),
    ]
    assert served_spans(history, 15, 70) == [
        ServedSpan(15, 20, INT4, 3, "load", is_fallback=False),
        ServedSpan(20, 30, INT8, 3, "fallback", is_fallback=True),
        ServedSpan(30, 40, FP32, 3, "fallback", is_fallback=True),
        ServedSpan(40, 50, INT4, 3, "fallback", is_fallback=False),
        ServedSpan(50, 60, INT4, 3, "fallback", is_fallback=False),
        ServedSpan(60, 70, INT8, 3, "switch", is_fallback=False),
    ]


def test_a_history_that_does_not_reach_back_tells_the_mode_before_its_first_change() -> None:
    history = [change(9, 20, "apply", INT4, INT8, from_generation=2)]
    before, after = served_spans(history, 5, 30)
    assert before == ServedSpan(5, 20, INT4, 2, "", is_fallback=False)
    assert (after.start, after.mode, after.generation) == (20, INT8, 3)


def test_a_new_set_ends_a_fallback() -> None:
    history = [change(1, 10, "fallback", INT4, FP32), change(2, 20, "apply", FP32, INT4, generation=4)]
    assert [span.is_fallback for span in served_spans(history, 0, 30)] == [False, True, False]


def test_without_a_history_nothing_is_known_of_what_served() -> None:
    assert served_spans([], 0, 30) == []


def test_the_history_tells_fallbacks_and_the_numbers_that_decided() -> None:
    reason = "int4 healthy -> tripped: noise; mean KL 0.61 (0.55 to 0.68) over 512 samples, threshold 0.41"
    entries = [change(12, START, "fallback", INT4, FP32, reason=reason)]
    lines = printed(history_as_text(control_pb2.GetHistoryResponse(entries=entries)), 120)
    assert words(lines[1])[3:] == ["smollm2", "fallback", "3", "int4", "→", "fp32", "committed", "monitor"]
    assert lines[-1].startswith(f"#12: {reason}")


# ---- the picture


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 10))
def test_the_running_mean_is_that_of_the_latest_values(values: list[float], length: int) -> None:
    expected = [statistics.fmean(values[max(0, end - length) : end]) for end in range(1, len(values) + 1)]
    assert list(running_mean(values, length)) == pytest.approx(expected, abs=1e-9)


def test_the_running_mean_leaves_out_what_is_not_finite() -> None:
    means = list(running_mean([NAN, 2.0, NAN, 4.0], 50))
    assert math.isnan(means[0])
    assert means[1:] == [2.0, 2.0, 3.0]


def png_size(path: Path) -> tuple[int, int]:
    """Of the IHDR chunk (PNG specification, 11.2.2)."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def has_colour(path: Path, colour: tuple[int, int, int]) -> bool:
    """Whether any pixel of a picture has it; 8 bits a channel."""
    pixels = (imread(path)[:, :, :3] * 255).round()
    return bool((pixels == colour).all(axis=2).any())


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def test_a_picture_of_the_samples_the_daemon_holds_is_drawn(
    daemon: NoisyDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "noise.png"
    assert main(["noise", "--plot", str(path)]) == ExitCode.DONE
    assert png_size(path) == (1440, 810)
    assert has_colour(path, rgb(noise_plot.COLOURS["int4"]))  # the line of the running mean
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn into {path}: 6 samples"


def test_a_picture_shows_fallbacks_and_samples_that_were_not_finite(daemon: NoisyDaemon, tmp_path: Path) -> None:
    broken = control_pb2.NoisePoint(time=Timestamp(seconds=START + 8), kl=math.inf, generation=3)
    latest = [*samples(8), broken]
    daemon.replies["noise"] = noise(int4(samples=9, total_samples=9, latest=latest), INT8_UNSCORED)
    fallback = [change(1, START + 2, "fallback", INT4, FP32)]
    daemon.replies["history"] = control_pb2.GetHistoryResponse(entries=fallback)
    plain, marked = tmp_path / "plain.png", tmp_path / "marked.png"
    assert main(["noise", "--plot", str(marked)]) == ExitCode.DONE
    daemon.replies["history"] = control_pb2.GetHistoryResponse()
    assert main(["noise", "--plot", str(plain)]) == ExitCode.DONE
    reddish = (249, 229, 229)  # a tenth of the colour of a fallback on white
    assert has_colour(marked, reddish)
    assert not has_colour(plain, reddish)


def test_samples_are_gathered_before_a_picture_is_drawn(
    daemon: NoisyDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.step = 3
    path = tmp_path / "noise.svg"
    assert main(["noise", "--plot", str(path), "--interval", "60", "--seconds", "2"]) == ExitCode.DONE
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn into {path}: {6 + 3} samples"
    assert "<svg" in path.read_text()


def test_ctrl_c_ends_the_gathering_and_what_was_gathered_is_drawn(daemon: NoisyDaemon, tmp_path: Path) -> None:
    path = tmp_path / "noise.png"
    terminal = Terminal("noise", "--live", "--interval", "60", "--plot", str(path))
    try:
        terminal.expect("limit 0.41")
        terminal.type("\x03")
        assert terminal.program.wait(4 * WAIT_S) == ExitCode.DONE
    finally:
        terminal.close()
    assert png_size(path) == (1440, 810)


def test_nothing_scored_is_nothing_to_draw(
    daemon: NoisyDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.replies["noise"] = Snapshot(model="smollm2", generation=3)
    assert main(["noise", "--plot", str(tmp_path / "noise.png")]) == ExitCode.USAGE
    assert "nothing to draw" in capsys.readouterr().err
    assert list(tmp_path.glob("*.png")) == []


def test_a_client_without_matplotlib_says_how_to_get_it(
    daemon: NoisyDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["noise", "--plot", str(tmp_path / "noise.png")]) == ExitCode.USAGE
    assert capsys.readouterr().err == "dskctl: --plot needs matplotlib: pip install 'dskd[plot]'\n"
    assert daemon.requests == []


def test_a_picture_that_cannot_be_written_is_named(
    daemon: NoisyDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "noise.png"
    assert main(["noise", "--plot", str(path)]) == ExitCode.USAGE
    assert capsys.readouterr().err == f"dskctl: {path}: No such file or directory\n"


def test_a_format_that_cannot_be_drawn_is_refused_at_once(
    daemon: NoisyDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["noise", "--plot", "noise.gif"])
    assert ended.value.code == ExitCode.USAGE
    assert "'noise.gif' must end in one of .png, .svg, .pdf" in capsys.readouterr().err


# ---- the pin


@pytest.mark.parametrize(("options", "pin"), [([], False), (["--pin"], True)])
def test_a_switch_can_pin_its_mode(daemon: NoisyDaemon, options: list[str], pin: bool) -> None:
    daemon.replies["switch"] = control_pb2.SwitchPrecisionResponse(model="smollm2", done=True)
    assert main(["switch", "int8", *options]) == ExitCode.DONE
    assert daemon.requests[0].pin is pin
