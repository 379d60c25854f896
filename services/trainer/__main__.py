"""`python -m services.trainer [CONFIG.toml] [key=value ...]`, or the same under torchrun for several ranks."""

from __future__ import annotations

import os
import signal

import structlog
import torch

from services.trainer.config import TrainerConfig
from services.trainer.distributed import join, leave
from services.trainer.link import Link, Refused, Stopping
from services.trainer.loop import serve
from services.trainer.server import StatusBoard, StatusServer
from shared.config import load_or_exit
from shared.process import EXIT_FAULT, EXIT_REFUSED, end_process, setup_logging

log = structlog.get_logger()


def main() -> int:
    """Returns the exit code: 0 after SIGTERM or the last run, EXIT_REFUSED, EXIT_FAULT."""
    config = load_or_exit(TrainerConfig, service="trainer")
    # All ranks do the same; rank 0 tells of it.
    setup_logging("trainer", level=config.log_level if os.environ.get("RANK", "0") == "0" else "warning")
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would write NaN into every fresh tensor, a fifth of a step's time; kernels write what they allocate.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(config.threads)
    world = join(config.device, timeout_s=config.collective_timeout_s)
    structlog.contextvars.bind_contextvars(rank=world.rank)
    link = Link(config, world)
    # Before it says that it is ready: whoever reads that may stop it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, link.on_sigterm)
    board, server = StatusBoard(world_size=world.size), None
    if world.is_leader:
        server = StatusServer(board, host=config.host, port=config.port, metrics_port=config.metrics_port)
        log.info("ready", port=server.port, metrics_port=server.metrics_port, world_size=world.size)
    try:
        serve(config, link, board, world)
    except Stopping:
        log.info("stopped")
    except Refused as error:
        log.error("refused", reason=str(error))
        return EXIT_REFUSED
    except Exception:
        log.exception("trainer failed")
        return EXIT_FAULT
    finally:
        link.close()
        if server is not None:
            server.stop()
        leave()
    return 0


if __name__ == "__main__":
    end_process(main())
