"""What rank 0 shows while it works: gRPC Status and health, and /metrics.

They run in threads of their own, so that a long step delays no answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.metrics import server as metrics_server
from shared.wire import rpc
from shared.wire.pb.trainer_pb2 import StatusReply, StatusRequest
from shared.wire.pb.trainer_pb2_grpc import TrainerServicer, add_TrainerServicer_to_server


class StatusBoard(TrainerServicer):
    """The loop writes, the server reads."""

    def __init__(self, *, world_size: int) -> None:
        self._lock = threading.Lock()
        self._reply = StatusReply(phase="waiting", world_size=world_size)

    def set(self, *, kernels: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Sets fields of StatusReply."""
        with self._lock:
            for name, value in fields.items():
                setattr(self._reply, name, value)
            if kernels is not None:
                self._reply.kernels.clear()
                self._reply.kernels.update(kernels)

    def Status(self, request: StatusRequest, context: grpc.ServicerContext) -> StatusReply:
        """The state now."""
        reply = StatusReply()
        with self._lock:
            reply.CopyFrom(self._reply)
        return reply


class StatusServer:
    """Serves a board until `stop`.

    Attributes: `port` and `metrics_port`, as bound. Raises OSError when an address is taken.
    """

    def __init__(self, board: StatusBoard, *, host: str, port: int, metrics_port: int) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=rpc.OPTIONS)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_TrainerServicer_to_server(board, self._server)
        self.port = rpc.bind(self._server, f"{host}:{port}")
        self._server.start()
        self.metrics_port = metrics_server.serve(host, metrics_port)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """NOT_SERVING, then no new calls; returns within a second."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=0.5).wait(1.0)
