"""`python -m shared.wire.probe HOST:PORT`: exit code 0 when gRPC health says SERVING. For container health checks."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5.0


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """Whether the process at `address` (host:port) serves, and what it answered."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return False, f"{error.code().name}: {error.details()}"
    return reply.status == health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.ServingStatus.Name(
        reply.status
    )


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m shared.wire.probe HOST:PORT", file=sys.stderr)
        return 2
    serving, said = is_serving(argv[0])
    print(f"{argv[0]}: {said}")
    return 0 if serving else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
