"""`python -m services.rollout [CONFIG.toml] [key=value ...]`: one rollout replica."""

from __future__ import annotations

import asyncio
import gc
import sys
import uuid
from dataclasses import replace

import structlog
import torch

from services.rollout.calls import FrontProcess
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine
from services.rollout.loop import EngineLoop
from services.rollout.meters import Meters
from services.rollout.pipeline import Outputs, device_of
from services.rollout.server import RolloutService
from shared.config import EXIT_CONFIG, load_or_exit
from shared.metrics import server as metrics
from shared.process import EXIT_FAULT, EXIT_REFUSED, end_process, setup_logging, stop_event
from shared.wire import rpc
from shared.wire.weights import REPLICA_RPC_TIMEOUT_S, RefusedError, ReplicaLink, WeightSyncError

STREAMS_GRACE_S = 2.0
SWITCH_INTERVAL_S = 0.0001
"""How long the threads that send and answer may keep the engine's from running, each of the dozen times a step that it lets them
run; Python's own 5 ms are a whole step."""
YOUNG_OBJECTS = 20_000
"""Made before the collector looks for cycles among them. Python's own 700 are made by a quarter of a batch's samples, while the
device waits for its first step; nearly none of them are part of a cycle."""

log = structlog.get_logger()


async def serve(config: RolloutConfig) -> int:
    """Serves until SIGTERM, a refusal or a fault. Returns the exit code."""
    stop = stop_event()
    event_loop = asyncio.get_running_loop()
    front = await FrontProcess.start(f"{config.host}:{config.port}", log_level=config.log_level)
    address = config.advertised_address or f"{config.host}:{front.port}"
    link = ReplicaLink(
        config.weight_sync,
        replica=config.replica,
        incarnation=uuid.uuid4().hex,
        engine_address=address,
        kv_capacity_tokens=config.kv_capacity_tokens,
    )

    def deliver(outputs: Outputs) -> None:
        if outputs.chunks or outputs.failures:
            event_loop.call_soon_threadsafe(service.deliver, outputs)

    def end(fault: BaseException | None) -> None:
        event_loop.call_soon_threadsafe(service.end, fault)

    meters = Meters(config.replica)
    loop = EngineLoop(Engine(config), meters, deliver=deliver, on_end=end)
    service = RolloutService(config, loop, link, meters, front)
    loop.start()
    calls = asyncio.create_task(front.run(service))
    await rpc.set_health(front, serving=True)
    metrics_port = metrics.serve(config.metrics_host, config.metrics_port)
    registration = asyncio.create_task(link.run(stop))
    log.info(
        "ready", replica=config.replica, address=address, port=front.port, grpc_pid=front.pid, metrics_port=metrics_port
    )
    try:
        return await _until_over(stop, registration, service, calls)
    finally:
        stop.set()
        front.drain()
        await asyncio.wait([registration], timeout=REPLICA_RPC_TIMEOUT_S)
        if not await asyncio.to_thread(loop.stop, config.shutdown_s):
            log.error("the engine's last step did not end", waited_s=config.shutdown_s)
        # Streams heard from the loop's end; this lets their last messages out.
        await front.stop(STREAMS_GRACE_S)


async def _until_over(
    stop: asyncio.Event, registration: asyncio.Task[None], service: RolloutService, calls: asyncio.Task[None]
) -> int:
    """Waits for SIGTERM, the end of registration, engine or gRPC server, or a refusal. Returns the exit code."""
    stopped = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future] = [stopped, registration, service.refused, service.ended, calls]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if service.ended.done():
        log.error("engine loop ended, exiting", reason=str(service.ended.result()))
        return EXIT_FAULT
    if service.refused.done():
        log.error("this replica may not serve the run, exiting", reason=service.refused.result())
        return EXIT_REFUSED
    if stop.is_set():
        return 0
    if calls.done():
        if (error := calls.exception()) is not None:
            log.error("calls are no longer taken, exiting", reason=str(error))
        return EXIT_FAULT
    try:
        await registration
    except RefusedError as error:
        log.error("weight_sync refused this replica, exiting", reason=str(error))
        return EXIT_REFUSED
    except WeightSyncError as error:
        log.error("registration failed, exiting", reason=str(error))
    return EXIT_FAULT


def main() -> int:
    config = load_or_exit(RolloutConfig, service="rollout")
    setup_logging("rollout", level=config.log_level)
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        config = replace(config, device=device_of(config.device))
    except ValueError as error:
        log.error("not a configuration for this machine", reason=str(error))
        return EXIT_CONFIG
    try:
        return asyncio.run(serve(config))
    except OSError as error:
        log.error("cannot start", reason=str(error))
        return EXIT_CONFIG


if __name__ == "__main__":
    end_process(main())
