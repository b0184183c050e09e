"""`dskctl noise`"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path

from dskapi.v1.control_pb2 import GetHistoryRequest, GetNoiseRequest, GetNoiseResponse
from dskctl import noise_plot
from dskctl.daemon import Daemon, relayed
from dskctl.exits import UsageError
from dskctl.noise_samples import Polls, Recording, latest_noise
from dskctl.noise_view import LiveView, as_lines, as_text
from dskctl.options import add_only_model, seconds
from dskctl.printer import Printer
from dskctl.verb import Verb


def configure(parser: argparse.ArgumentParser) -> None:
    add_only_model(parser)
    add = parser.add_argument
    add("--live", action="store_true", help="go on until Ctrl-C, with a chart of the latest samples of each mode")
    add("--plot", type=picture, metavar="FILE", help=f"draw KL over time into FILE ({', '.join(noise_plot.FORMATS)})")
    add("--interval", type=seconds, default=1.0, metavar="S", help="ask the daemon every S seconds (default: 1)")
    add("--seconds", type=seconds, metavar="N", help="gather samples for N seconds (with --live or --plot)")


def picture(text: str) -> Path:
    """An argparse type: a file of a format that can be drawn."""
    path = Path(text)
    if path.suffix.removeprefix(".").lower() not in noise_plot.FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of .{', .'.join(noise_plot.FORMATS)}")
    return path


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    if args.seconds and not (args.live or args.plot):
        raise UsageError("--seconds is for --live and --plot")
    if args.plot:
        noise_plot.require_matplotlib()
        _run_plot(args, daemon, printer)
    elif args.live:
        _follow(args, daemon, printer, Recording())
    else:
        printer.show(daemon.get_noise(GetNoiseRequest(model=args.model)), as_text)


def _run_plot(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    """Ctrl-C ends the gathering; what was gathered is drawn."""
    recording = Recording()
    try:
        if args.live:
            _follow(args, daemon, printer, recording)
        else:
            _gather(args, daemon, printer, recording)
    except KeyboardInterrupt:
        if not recording.count:
            raise
    if not recording.count:
        raise UsageError(f"{recording.last.model}: no token was scored yet: there is nothing to draw")
    history = daemon.get_history(GetHistoryRequest(model=recording.last.model))
    noise_plot.draw(args.plot, recording, history.entries)
    printer.note(f"drawn into {args.plot}: {recording.count:,} samples")


def _follow(args: argparse.Namespace, daemon: Daemon, printer: Printer, recording: Recording) -> None:
    view = partial(LiveView, recording=recording)
    with printer.renewing(view, as_lines) as show, closing(_polled(args, daemon, args.seconds)) as responses:
        for response in responses:
            show(recording.add(response))


def _gather(args: argparse.Namespace, daemon: Daemon, printer: Printer, recording: Recording) -> None:
    for_s = args.seconds or 0.0
    waiting = printer.waiting(f"gathering samples for {for_s:g} s")
    with waiting, closing(_polled(args, daemon, for_s)) as responses:
        for response in responses:
            recording.add(response)
    printer.show(recording.last, as_text)


def _polled(args: argparse.Namespace, daemon: Daemon, for_s: float | None) -> Generator[GetNoiseResponse, None, None]:
    polls = Polls(partial(latest_noise, daemon, args.model), args.interval, for_s)
    return relayed(lambda: polls)


VERB = Verb(
    name="noise",
    help="show how far live answers are from the reference, and what was done about it",
    examples=(
        "dskctl noise",
        "dskctl noise smollm2 --live",
        "dskctl noise --live --json > noise.jsonl",
        "dskctl noise --plot noise.png",
        "dskctl noise --seconds 120 --plot noise.png",
    ),
    configure=configure,
    run=run,
)
