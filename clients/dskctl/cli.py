"""`dskctl`: the command line client of dskd."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import grpc

from dskctl import verbs
from dskctl.address import ADDRESS_VARIABLE, SYSTEM_SOCKET, UNIX, USER_SOCKET, checked_address, default_address
from dskctl.daemon import Daemon, Tls, open_channel
from dskctl.errors import explained
from dskctl.exits import EXIT_CODES, ExitCode, UsageError
from dskctl.options import seconds
from dskctl.printer import JsonPrinter, TextPrinter
from dskctl.verb import Verb


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code."""
    try:
        args = build_parser().parse_args(argv)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal shows "?" for what it lacks
        return _run(args)
    except UsageError as error:
        return _fail(ExitCode.USAGE, [str(error)])
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return _reader_went_away()


def _run(args: argparse.Namespace) -> int:
    args.address = checked_address(args.address or default_address())
    try:
        with open_channel(args.address, _tls(args)) as channel:
            args.verb.run(args, Daemon.over(channel, args.timeout), JsonPrinter() if args.json else TextPrinter())
        sys.stdout.flush()
    except grpc.RpcError as error:
        return _fail(*explained(error, args.address, args.verb.goes_on))
    return ExitCode.DONE


def _tls(args: argparse.Namespace) -> Tls | None:
    if bool(args.tls_cert) != bool(args.tls_key):
        raise UsageError("--tls-cert and --tls-key go together")
    if args.tls_cert and not args.tls_ca:
        raise UsageError("--tls-cert needs --tls-ca, the authority that signed the daemon's certificate")
    return Tls(args.tls_ca, args.tls_cert, args.tls_key) if args.tls_ca else None


def _fail(code: ExitCode, lines: list[str]) -> int:
    for line in lines:
        print(f"dskctl: {line}", file=sys.stderr)
    return code


def _reader_went_away() -> int:
    """Whoever read our output has had enough: not an error. The interpreter must not flush into the pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. The options of all verbs may stand before or after the verb."""
    parser = argparse.ArgumentParser(
        prog="dskctl",
        description="Talk to a dskd: load models, switch their precision, apply parameter sets, generate, watch.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dskctl {_version()}")
    _add_common(parser)
    subparsers = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for verb in verbs.ALL:
        _add_verb(subparsers, verb)
    return parser


def _version() -> str:
    try:
        return metadata.version("dskd")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree


def _add_verb(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], verb: Verb) -> None:
    parser = subparsers.add_parser(
        verb.name,
        usage=verb.usage,
        help=verb.help,
        description=f"{verb.help[0].upper()}{verb.help[1:]}.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in verb.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.configure(parser)
    _add_common(parser, default=argparse.SUPPRESS)
    parser.set_defaults(verb=verb)


def _add_common(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """`default` SUPPRESS keeps what was given before the verb."""
    group = parser.add_argument_group("connection and output")
    group.add_argument(
        "--address",
        default=default,
        metavar="A",
        help=f"unix:///path or host:port (default: ${ADDRESS_VARIABLE}, else {UNIX}{SYSTEM_SOCKET} or, "
        f"where that is not, $XDG_RUNTIME_DIR/{USER_SOCKET})",
    )
    group.add_argument("--json", action="store_true", default=default or False, help="JSON instead of tables")
    group.add_argument(
        "--timeout", type=seconds, default=default, metavar="S", help="give up after S seconds (default: never)"
    )
    group.add_argument("--tls-ca", type=Path, default=default, metavar="F", help="PEM of the authority: use TLS")
    group.add_argument("--tls-cert", type=Path, default=default, metavar="F", help="PEM certificate of this client")
    group.add_argument("--tls-key", type=Path, default=default, metavar="F", help="PEM key of this client")


def _epilog() -> str:
    examples = (
        "dskctl status",
        'dskctl generate --chat --max-tokens 100 "Why is the sky blue?"',
        "dskctl switch int8",
        "dskctl apply calibrated/",
        "dskctl --address models.example:7411 --tls-ca ca.pem status",
    )
    codes = (f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    return "\n".join(["examples:", *(f"  {line}" for line in examples), "", "exit codes:", *codes])
