"""The command `dskd`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dskd.address import FORMS
from dskd.config import SYSTEM_CONFIG, load_config
from dskd.typed_toml import ConfigError
from dskquant.version import VERSION

HISTORY = "history.jsonl"
"""In the state directory: what was changed, when, by whom and how it ended."""

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes; USAGE is that of argparse too."""

EXAMPLES = f"""\
examples:
  dskd serve --config etc/dskd.toml
  dskd serve --config etc/dskd.toml --listen unix:/tmp/dskd.sock --log-format console
  dskd doctor --config etc/dskd.toml

Addresses: {FORMS}.
Without --config, {SYSTEM_CONFIG} is read if it exists.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 1 failed, 2 wrong usage or configuration."""
    options = build_parser().parse_args(arguments)
    config_path = options.config or (SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None)
    try:
        return _doctor(config_path, options.json) if options.verb == "doctor" else _serve(config_path, options)
    except ConfigError as error:
        for problem in error.lines:
            where = f"{config_path or 'command line'}: "
            print(f"dskd: {where}{problem.removeprefix(where)}", file=sys.stderr)  # what cannot be read says its path
        return USAGE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="dskd",
        description="Serves language models on CPUs and switches their precision while answers are generated.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dskd {VERSION}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="serve | doctor")
    serve = verbs.add_parser("serve", help="run the daemon until SIGTERM or Ctrl-C")
    serve.add_argument("--listen", action="append", metavar="ADDRESS", help="instead of [server] listen; repeatable")
    serve.add_argument("--log-format", choices=("json", "console"), help="instead of [log] format")
    doctor = verbs.add_parser("doctor", help="check CPU, memory, engines, configuration and model stores")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    for verb in (serve, doctor):
        verb.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    return parser


def _serve(config_path: Path | None, options: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the C core writes to standard error, past our log
    # Imported here: `dskd doctor` has to work where the engines are not installed.
    from prometheus_client import CollectorRegistry

    from dskd.listen import StartupError
    from dskd.log import configure_logging
    from dskd.manager.history import History
    from dskd.model_host import host_factory
    from dskd.monitor.metrics import EventMetrics
    from dskd.server import serve

    config = load_config(config_path, _overrides(options))
    configure_logging(config.log)
    try:
        figures = CollectorRegistry()
        counters = EventMetrics(figures)
        make_host = host_factory(config, counters)  # from here on no other daemon writes into the state directory
        history = History(config.server.state_dir / HISTORY)
        return asyncio.run(_live(serve(config, make_host, history, figures, counters)))
    except StartupError as error:
        print(f"dskd: {error}", file=sys.stderr)
        return FAILED


async def _live(life: Coroutine[Any, Any, int]) -> int:
    """Ends the process with the exit code of `life`: leaving the event loop would wait for builds and other threads."""
    code = await life
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody may be reading any more
            stream.flush()
    os._exit(code)


def _overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the command line says instead of the file; relative socket paths start where the command was given."""
    overrides: dict[str, dict[str, Any]] = {}
    if options.listen:
        overrides["server"] = {"listen": [_from_here(address) for address in options.listen]}
    if options.log_format:
        overrides["log"] = {"format": options.log_format}
    return overrides


def _from_here(address: str) -> str:
    if not address.startswith("unix:"):
        return address
    return f"unix:{Path.cwd() / address.removeprefix('unix:').removeprefix('//')}"


def _doctor(config_path: Path | None, as_json: bool) -> int:
    from dskd import doctor

    findings = doctor.examine(config_path)
    print(doctor.as_json(findings) if as_json else doctor.as_text(findings))
    return FAILED if any(finding.level is doctor.Level.FAILED for finding in findings) else OK
