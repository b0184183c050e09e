"""Text that comes on stdin in place of an argument."""

from __future__ import annotations

import sys

from dskctl.exits import UsageError

STDIN = "-"
"""The argument that stands for it."""


def text_of_stdin(what: str) -> str:
    """All of it. Raises UsageError, which says `what` it would have been, when it is no text."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} on stdin is not valid UTF-8 (byte {error.start})") from None
