"""`python -m services.gateway [CONFIG.toml] [key=value ...]`: the HTTP API, the dispatcher and the reward watcher.

One event loop runs them all. A fault of the dispatcher ends the process (exit code 70); SIGTERM closes event streams, lets
requests finish within `drain_s`, and ends with 0. API keys are made with `python -m services.gateway.auth NAME SCOPE ...`;
without one only loopback is bound (exit code 2 otherwise).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Iterator, Sequence

import structlog
import uvicorn

from services.gateway.assemble import create_app
from services.gateway.auth import Keyring, check_bind
from services.gateway.config import GatewayConfig
from services.gateway.context import Gateway
from services.gateway.dispatcher import Dispatcher
from services.gateway.events import Feeds
from services.gateway.progress import Progress
from services.gateway.tokenizer import Tokenizers
from shared.config import EXIT_CONFIG, ConfigError, load_or_exit
from shared.metrics import server as metrics
from shared.process import EXIT_FAULT, settle_heap, setup_logging, stop_event
from shared.wire import rpc
from shared.wire.pb.weight_sync_pb2_grpc import WeightSyncStub
from shared.wire.store import RunStore
from shared.wire.valkey import ValkeyRefused

log = structlog.get_logger()

STOP_S = 10.0
"""Beyond `drain_s`: deadline of the dispatcher's and the server's end."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: GatewayConfig, keyring: Keyring) -> None:
    """Serves until SIGTERM. Raises what the dispatcher failed with, ValkeyRefused, OSError when a port is taken."""
    stop = stop_event()
    # The dispatcher waits for a Valkey that restarts; a request is rather answered with 503.
    dispatcher_store = await RunStore.connect(config.valkey)
    store = await RunStore.connect(config.valkey, retries=config.valkey_retries)
    progress, tokenizers = Progress(), Tokenizers(config.tokenizer_timeout_s, on_load=settle_heap)

    async def decode(model: str, token_ids: Sequence[int]) -> str:
        return (await tokenizers.get(model)).decode(token_ids) or ""

    dispatcher = Dispatcher(
        dispatcher_store,
        config.weight_sync,
        max_inflight_samples=config.dispatcher.max_inflight_samples,
        stream_idle_s=config.dispatcher.stream_idle_s,
        max_group_failures=config.dispatcher.max_group_failures,
        no_replica_s=config.dispatcher.no_replica_s,
        rpc_timeout_s=config.rpc_timeout_s,
        decode=decode,
        on_chunk=progress.observe,
    )
    async with rpc.aio_channel(config.weight_sync) as channel:
        gateway = Gateway(
            config=config,
            keyring=keyring,
            store=store,
            weight_sync=WeightSyncStub(channel),
            tokenizers=tokenizers,
            feeds=Feeds(store),
            progress=progress,
            replicas=dispatcher.replicas_by_state,
        )
        await _run(gateway, dispatcher, stop)
    await store.close()
    await dispatcher_store.close()
    log.info("stopped")


async def _run(gateway: Gateway, dispatcher: Dispatcher, stop: asyncio.Event) -> None:
    """Binds everything, then runs HTTP and dispatcher until `stop` or a fault."""
    config = gateway.config
    listener = listen(config.host, config.port)
    health_server, health = rpc.aio_server()
    health_host = f"[{config.host}]" if ":" in config.host else config.host
    health_port = rpc.bind(health_server, f"{health_host}:{config.health_port}")
    metrics_port = metrics.serve(config.metrics_host, config.metrics_port)
    await health_server.start()
    await rpc.set_health(health, serving=True)
    server = HttpServer(_uvicorn_config(gateway))
    log.info("ready", port=listener.getsockname()[1], health_port=health_port, metrics_port=metrics_port)

    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    dispatch = asyncio.create_task(dispatcher.run(stop), name="dispatch")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((http, dispatch, stopping), return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await rpc.set_health(health, serving=False)
    await gateway.feeds.close()
    server.should_exit = True
    async with asyncio.timeout(config.drain_s + STOP_S):
        outcomes = await asyncio.gather(http, dispatch, return_exceptions=True)
    await health_server.stop(1.0)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _uvicorn_config(gateway: Gateway) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(gateway),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=gateway.config.drain_s,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with the address when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it every answer takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot bind {host}:{port}: {error}. Is another process using the port?") from error
    listener.listen(2048)
    return listener


def main() -> None:
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(__doc__)
    config = load_or_exit(GatewayConfig, service="gateway")
    setup_logging("gateway", level=config.log_level)
    try:
        keyring = Keyring(config.keys, config.keys_file)
        check_bind(config.host, keyring)
        asyncio.run(serve(config, keyring))
    except (ConfigError, ValkeyRefused) as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except Exception:  # the process's edge
        log.exception("gateway failed")
        sys.exit(EXIT_FAULT)
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    main()
