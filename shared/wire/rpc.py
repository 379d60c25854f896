"""gRPC channels and servers as every service makes them: bounded messages, keepalive, health, deadlines by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

MAX_MESSAGE_BYTES = 64 * 2**20
CHUNK_BYTES = 4 * 2**20
"""Size of one tensor chunk on the wire."""

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    # A peer that restarts is found again within seconds; the default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Otherwise a new channel to a peer that just came back inherits the pause of an older one that found it away.
    ("grpc.use_local_subchannel_pool", 1),
)


def aio_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=OPTIONS)


class Health(Protocol):
    """Where it is said whether a service serves: a HealthServicer, or what hands on to one."""

    async def set(self, service: str, status: Any) -> None: ...


async def set_health(health: Health, *, serving: bool, service: str = "") -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    await health.set(service, status)


def aio_server() -> tuple[grpc.aio.Server, HealthServicer]:
    """A server with grpc.health.v1 added. Until `set_health` says otherwise the empty name is SERVING and any other unknown."""
    server = grpc.aio.server(options=OPTIONS)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server, health


def bind(server: grpc.aio.Server | grpc.Server, address: str) -> int:
    """Binds and returns the port. Raises OSError with the address when it is taken."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot bind {address}: {error}. Is another process using the port?") from error
    if port == 0:
        raise OSError(f"cannot bind {address}. Is another process using the port?")
    return port
