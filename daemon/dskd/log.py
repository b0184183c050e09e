"""Logging: every line has a time, a level, an event, and what was bound to its context (model, request_id, ...)."""

from __future__ import annotations

import logging
import sys

import structlog

from dskd.config import LogConfig

SHARED_PROCESSORS: tuple[structlog.typing.Processor, ...] = (
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.stdlib.add_log_level,
    structlog.contextvars.merge_contextvars,
)
"""What each line goes through, those of libraries (grpc, asyncio) included."""


def configure_logging(config: LogConfig) -> None:
    """Sends the lines of this program and of its libraries to standard error."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *SHARED_PROCESSORS,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=SHARED_PROCESSORS,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(config.format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def _renderers(name: str) -> tuple[structlog.typing.Processor, ...]:
    if name == "json":
        return structlog.processors.format_exc_info, structlog.processors.JSONRenderer()
    # Plain tracebacks: prettier ones show local variables, and with them what users wrote.
    plain = structlog.dev.plain_traceback
    return (structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain),)
