"""Errors that reach a client. Each carries its gRPC status and the details a client can act on.

`dskd.rpc.status` maps them.
"""

from __future__ import annotations

from collections.abc import Iterable

from dskquant.errors import QuantError


class DskdError(Exception):
    """Base of all errors the daemon answers with on purpose."""

    code = "INTERNAL"


class InvalidArgumentError(DskdError):
    """A field of a request has a value that is not allowed."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class InvalidFieldsError(DskdError):
    """Several fields of a request have values that are not allowed.

    `violations` are fields and descriptions; there are `more` that are not told.
    """

    code = "INVALID_ARGUMENT"

    def __init__(self, violations: Iterable[tuple[str, str]], more: int = 0) -> None:
        self.violations = tuple(violations)
        self.more = more
        told = [f"{field}: {description}" for field, description in self.violations]
        super().__init__("; ".join([*told, *([f"and {more} more"] if more else [])]))


class UnknownModelError(DskdError):
    """No model of that name."""

    code = "NOT_FOUND"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"no model {name!r}; known: {', '.join(self.known) or 'none'}")


class FailedPreconditionError(DskdError):
    """The daemon is not in a state in which this can be done; `subject` says what stands in the way."""

    code = "FAILED_PRECONDITION"

    def __init__(self, subject: str, description: str) -> None:
        super().__init__(description)
        self.subject = subject


class ResourceExhaustedError(DskdError):
    """Something ran out; try again after `retry_after_s` seconds (None: not before something is given back)."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, resource: str, description: str, retry_after_s: float | None = None) -> None:
        super().__init__(description)
        self.resource = resource
        self.retry_after_s = retry_after_s


class UnavailableError(DskdError):
    """The daemon is shutting down, or the model is on its way in or out.

    Try again after `retry_after_s` seconds (None: it will not be better).
    """

    code = "UNAVAILABLE"

    def __init__(self, description: str, retry_after_s: float | None = None) -> None:
        super().__init__(description)
        self.retry_after_s = retry_after_s


class InternalError(DskdError):
    """Something that should not happen did; the log tells more."""


EXPECTED_ERRORS = (DskdError, QuantError)
"""Raised on purpose, with a message that is the whole story: a client gets it, and the log has no traceback of it."""
