"""What every service process does alike: JSON logs, stop on SIGTERM, exit codes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import Any, NoReturn

import structlog

from shared.masking import masked

EXIT_REFUSED = 3
"""The process is healthy but may not serve this run (other numerics, cache too small)."""
EXIT_FAULT = 70
"""A loop failed; the log's last line says why."""


def setup_logging(service: str, *, level: str = "info") -> None:
    """One JSON object a line on stderr, from structlog and from libraries that use `logging`. Credentials are masked."""

    def add_service(_logger: Any, _method: str, event: Any) -> Any:
        # Not a context variable: those are lost in threads that other libraries start.
        return {"service": service, **event}

    def mask(_logger: Any, _method: str, event: Any) -> Any:
        return masked(event)

    before: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        add_service,
        mask,
    ]
    render = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[*before, render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *before],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, getattr(logging, level.upper())), force=True)
    logging.captureWarnings(True)


def settle_heap() -> None:
    """Call it when what lives long is loaded, and `gc.unfreeze` at its end: native libraries report what is left at exit.

    A collection that walks what torch or transformers leave behind stops every thread for 0.2 to 0.4 s, and a batch's objects
    cause one every few steps. Called again it collects what has died of the last time's as well.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def end_process(code: int) -> NoReturn:
    """The last call of a process with native threads that nobody joins: gloo's, which live as long as FSDP holds the group, a
    fetch, a kernel. One that needs the interpreter while that ends would abort the process, whatever it has done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
