"""`python -m services.weight_sync [CONFIG.toml] [key=value ...]`: sets up, runs the distribution loop, shuts down."""

from __future__ import annotations

import asyncio
import sys

import structlog

from services.weight_sync.changes import Changes
from services.weight_sync.config import WeightSyncConfig
from services.weight_sync.distribute import Distributor
from services.weight_sync.registry import Registry
from services.weight_sync.server import Servicer
from services.weight_sync.store import Store
from shared.config import load_or_exit
from shared.metrics import server as metrics
from shared.process import EXIT_FAULT, setup_logging, stop_event
from shared.wire import rpc
from shared.wire.pb.weight_sync_pb2_grpc import add_WeightSyncServicer_to_server

log = structlog.get_logger()


async def serve(config: WeightSyncConfig) -> None:
    """Serves until SIGTERM. Raises what a loop failed with, OSError when a port or the data directory is taken."""
    stop = stop_event()
    store, changes = Store(config.data_dir), Changes()
    registry = Registry(lease_s=config.lease_s, retry_s=config.retry_s, num_attempts=config.num_attempts)
    registry.versions.epochs.update(store.load_epochs())
    for published in await asyncio.to_thread(lambda: list(store.load())):
        registry.versions.add(published)

    distributor = Distributor(config, registry, store, changes)
    server, health = rpc.aio_server()
    add_WeightSyncServicer_to_server(Servicer(config, registry, store, changes, distributor), server)
    port = rpc.bind(server, f"{config.host}:{config.port}")
    metrics_port = metrics.serve(config.metrics_host, config.metrics_port)
    await server.start()
    await rpc.set_health(health, serving=True)
    log.info("ready", port=port, metrics_port=metrics_port, versions=sum(map(len, registry.versions.by_run.values())))

    distribution = asyncio.create_task(distributor.run(), name="distribution")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((distribution, stopping), return_when=asyncio.FIRST_COMPLETED)
    await rpc.set_health(health, serving=False)
    changes.close()
    await server.stop(config.shutdown_s)
    stopping.cancel()
    await distribution
    store.close()
    log.info("stopped")


def main() -> None:
    config = load_or_exit(WeightSyncConfig, service="weight_sync")
    setup_logging("weight_sync", level=config.log_level)
    try:
        asyncio.run(serve(config))
    except Exception:  # the process's edge
        log.exception("weight_sync failed")
        sys.exit(EXIT_FAULT)


if __name__ == "__main__":
    main()
