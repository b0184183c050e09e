"""What went wrong, in a line or two on stderr, and the exit code that says so."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from dskctl.address import UNIX
from dskctl.exits import ExitCode
from dskctl.words import printable

_EXIT_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.TIMED_OUT,
}


_START_ONE = "start one with `dskd serve`, or name its address with --address or $DSKD_ADDRESS"
_OUT_OF_TIME = "timed out; --timeout gives it more time"
_STILL_GOING = (
    "timed out waiting; the daemon goes on with what it has begun: `dskctl watch` or `dskctl history` tell how it ends"
)
_BROKEN_HANDSHAKES = {
    "WRONG_VERSION_NUMBER": ("it does not speak TLS", "leave out --tls-ca, or configure [server.tls] for the daemon"),
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not trusted",
        "--tls-ca must name the authority that signed the certificate of the daemon",
    ),
    "Hostname Verification Check failed": (
        "its certificate is for another name",
        "use a name of the certificate's subjectAltName in --address",
    ),
    "Socket closed": (
        "it closed the connection at once",
        "it may want TLS (--tls-ca), or a certificate of this client too (--tls-cert, --tls-key)",
    ),
}
"""What gRPC's text holds when the two ends do not agree on TLS: the reason in plain words, and what to do."""


def explained(error: grpc.RpcError, address: str, goes_on: bool = False) -> tuple[ExitCode, list[str]]:
    """Exit code and lines for people. A status with details was made by the daemon: it is alive and said no.

    `goes_on`: what was asked for does not end with the call that asked for it.
    """
    code = error.code()
    status = rpc_status.from_call(error) if isinstance(error, grpc.Call) else None
    if status is not None and code != grpc.StatusCode.DEADLINE_EXCEEDED:
        return ExitCode.REFUSED, [printable(line) for line in status_lines(status)]
    exit_code = _EXIT_BY_CODE.get(code, ExitCode.REFUSED)
    text = printable(error.details() or "no reason given")
    if exit_code is ExitCode.UNREACHABLE:
        return exit_code, _unreachable_lines(text, address)
    if exit_code is ExitCode.TIMED_OUT:
        return exit_code, [_STILL_GOING if goes_on else _OUT_OF_TIME]
    return exit_code, [f"{code.name.lower().replace('_', ' ')}: {text}"]


def _unreachable_lines(text: str, address: str) -> list[str]:
    reason, hint = _reason_and_hint(text, address)
    return [f"no daemon reached at {address}: {reason}", hint]


def _reason_and_hint(text: str, address: str) -> tuple[str, str]:
    """gRPC's text nests its reasons; the last one is the system's."""
    if text.startswith("failed to connect") and not address.startswith(UNIX):
        for mark, reason_and_hint in _BROKEN_HANDSHAKES.items():
            if mark in text:
                return reason_and_hint
    return text.removesuffix(": OK").rpartition(": ")[2].rstrip("] "), _START_ONE


def status_lines(status: Status) -> list[str]:
    """The fields at fault if there are any, else the message; then what the details add to it."""
    violations, additions = [], []
    for detail in _details(status):
        if isinstance(detail, details_pb2.BadRequest):
            violations += [f"{item.field}: {item.description}" for item in detail.field_violations]
        else:
            additions += [line for line in _addition(detail) if line not in status.message]
    return (violations or [status.message]) + additions


_KNOWN_DETAILS = (
    details_pb2.BadRequest,
    details_pb2.PreconditionFailure,
    details_pb2.QuotaFailure,
    details_pb2.ResourceInfo,
    details_pb2.RetryInfo,
)


def _details(status: Status) -> Iterator[object]:
    for packed in status.details:
        for kind in _KNOWN_DETAILS:
            detail = kind()
            if packed.Unpack(detail):
                yield detail


def _addition(detail: object) -> list[str]:
    """What a detail says beyond the message of its status."""
    if isinstance(detail, details_pb2.RetryInfo):
        return [f"try again in {detail.retry_delay.ToTimedelta().total_seconds():g} s"]
    if isinstance(detail, details_pb2.ResourceInfo):
        return [detail.description] if detail.description else []
    if isinstance(detail, details_pb2.PreconditionFailure | details_pb2.QuotaFailure):
        return [item.description for item in detail.violations if item.description]
    return []
