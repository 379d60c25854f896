"""What every service process does alike: JSON logs, stop on SIGTERM, gRPC health, exit codes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

import structlog

EXIT_REFUSED = 3
"""The process is healthy but may not serve this run (other numerics, cache too small)."""
EXIT_FAULT = 70
"""A loop failed; the log's last line says why."""

_SECRET_WORDS = ("key", "token", "password", "secret", "authorization")
_NOT_SECRET = ("_tokens", "token_id", "key_id")


def setup_logging(service: str, *, level: str = "info") -> None:
    """One JSON object a line on stderr. Values whose key looks like a credential are masked."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _mask_secrets,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)


def _mask_secrets(_logger: Any, _method: str, event: Any) -> Any:
    for name in event:
        lowered = name.lower()
        if any(w in lowered for w in _SECRET_WORDS) and not any(w in lowered for w in _NOT_SECRET):
            event[name] = "***"
    return event


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
