"""`dskctl apply`"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from dskapi.v1.control_pb2 import MODEL_STATE_SERVING, ApplyConfigRequest, GetStatusRequest
from dskctl import change
from dskctl.daemon import Daemon
from dskctl.exits import UsageError
from dskctl.options import add_in_flight, add_wait, utf8
from dskctl.printer import Printer
from dskctl.quant_file import absolute, config_for_set, manifest_of, read_config
from dskctl.stdin import STDIN, text_of_stdin
from dskctl.verb import Verb


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        type=utf8,
        help="a quant config (*.toml, or - for stdin) or a parameter set (its directory or manifest.json)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", type=utf8, help="the model a parameter set is for, unless exactly one serves"
    )
    parser.add_argument("--dry-run", action="store_true", help="check it and say what would change; change nothing")
    add_in_flight(parser, default=None)
    add_wait(parser)


def run(args: argparse.Namespace, daemon: Daemon, printer: Printer) -> None:
    request = _request(args, daemon)
    request.dry_run, request.wait = args.dry_run, args.wait
    response = change.awaited(partial(daemon.apply_config, request), f"applying {args.file}", daemon, printer)
    printer.show(response, change.as_trial if args.dry_run else change.as_text)


def _request(args: argparse.Namespace, daemon: Daemon) -> ApplyConfigRequest:
    path = Path(args.file)
    manifest = None if args.file == STDIN else manifest_of(path)
    if manifest is not None:
        model = args.model or _only_model(daemon)
        return ApplyConfigRequest(config=config_for_set(manifest, model, args.in_flight))
    if args.model is not None or args.in_flight is not None:
        raise UsageError("--model and --in-flight are for a parameter set; a quant config says them itself")
    if args.file == STDIN:
        return ApplyConfigRequest(config=text_of_stdin("quant config"), base_directory=absolute(Path()))
    return ApplyConfigRequest(config=read_config(path), base_directory=absolute(path.parent))


def _only_model(daemon: Daemon) -> str:
    """The name of the model that serves. Raises UsageError unless it is exactly one."""
    models = daemon.get_status(GetStatusRequest()).models
    serving = [model.name for model in models if model.state == MODEL_STATE_SERVING]
    if len(serving) != 1:
        raise UsageError(f"--model is needed, unless exactly one model serves; serving: {', '.join(serving) or 'none'}")
    return serving[0]


VERB = Verb(
    name="apply",
    help="make a model serve with another parameter set, layer precisions or mode",
    examples=(
        "dskctl apply calibrated/",
        "dskctl apply calibrated/ --model smollm2 --dry-run",
        "dskctl apply smollm2.toml",
        "dskctl apply calibrated/manifest.json --in-flight finish --no-wait",
        "dskctl apply - < smollm2.toml",
    ),
    configure=configure,
    run=run,
    goes_on=True,
)
