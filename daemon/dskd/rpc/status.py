"""The one place that turns errors into gRPC statuses with details (google.rpc, google/rpc/error_details.proto)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status

from dskd.errors import (
    EXPECTED_ERRORS,
    DskdError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidFieldsError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownModelError,
)
from dskd.rpc.convert import sendable
from dskquant.errors import ParameterSetError, QuantError

LONGEST_MESSAGE = 800  # bytes; message and details travel in HTTP/2 headers, which hold 8 KiB
LONGEST_FIELD = 100  # bytes
LONGEST_VIOLATIONS = 2000  # bytes, of all violations of a request together
DOMAIN = "dskd"


def status_of(error: Exception, error_id: str) -> Status:
    """The status a client gets for `error`; of an unexpected one it learns `error_id` alone, which the log explains."""
    if not isinstance(error, EXPECTED_ERRORS):
        message = f"internal error {error_id}; the log tells more"
        status = Status(code=grpc.StatusCode.INTERNAL.value[0], message=message)
        _attach(status, details.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"error_id": error_id}))
        return status
    status = Status(code=_code(error).value[0], message=_cut(str(error)))
    for detail in _details(error):
        _attach(status, detail)
    return status


def _code(error: Exception) -> grpc.StatusCode:
    """A model or its store that is not as it should be (QuantError) has to be repaired before trying again."""
    return grpc.StatusCode[error.code] if isinstance(error, DskdError) else grpc.StatusCode.FAILED_PRECONDITION


def _details(error: Exception) -> Iterator[Message]:
    text = _cut(str(error))
    if isinstance(error, InvalidArgumentError):
        yield _bad_request([(error.field, error.description)])
    elif isinstance(error, InvalidFieldsError):
        yield _bad_request(error.violations, error.more)
    elif isinstance(error, UnknownModelError):
        known = _cut(f"known: {', '.join(error.known) or 'none'}")
        yield details.ResourceInfo(resource_type="model", resource_name=_cut(error.name), description=known)
    elif isinstance(error, FailedPreconditionError):
        yield _precondition("STATE", error.subject, text)
    elif isinstance(error, ParameterSetError):
        yield _precondition("PARAMETER_SET", error.rule, text)
    elif isinstance(error, QuantError):
        yield _precondition("MODEL", type(error).__name__, text)
    elif isinstance(error, ResourceExhaustedError):
        violation = details.QuotaFailure.Violation(subject=error.resource, description=text)
        yield details.QuotaFailure(violations=[violation])
    if isinstance(error, ResourceExhaustedError | UnavailableError) and error.retry_after_s is not None:
        yield _retry_info(error.retry_after_s)


def _retry_info(after_s: float) -> details.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(round(after_s * 1e3))
    return details.RetryInfo(retry_delay=delay)


def _bad_request(violations: Sequence[tuple[str, str]], more: int = 0) -> details.BadRequest:
    """As many violations as the headers have room for, and how many more there are."""
    told = details.BadRequest()
    for field, description in violations:
        if told.ByteSize() > LONGEST_VIOLATIONS:
            break
        told.field_violations.add(field=_cut(field, LONGEST_FIELD), description=_cut(description))
    if left := more + len(violations) - len(told.field_violations):
        told.field_violations.add(description=f"{left} more fields are wrong")
    return told


def _precondition(kind: str, subject: str, description: str) -> details.PreconditionFailure:
    violation = details.PreconditionFailure.Violation(type=kind, subject=subject, description=description)
    return details.PreconditionFailure(violations=[violation])


def _attach(status: Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _cut(text: str, longest: int = LONGEST_MESSAGE) -> str:
    text = sendable(text)
    encoded = text.encode()
    return text if len(encoded) <= longest else encoded[:longest].decode(errors="ignore") + "..."
