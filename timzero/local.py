"""Every service on this machine as a process of its own, watched and restarted: `timzero up`, `timzero train --local`, tests.

    with LocalStack(Path("runs/demo"), num_replicas=2) as stack:
        client = Client(stack.base_url)
        stack["rollout-0"].kill(signal.SIGKILL)

Everything that must survive lies in the run directory: a stack started on it again goes on where the last one ended.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.config import EXIT_CONFIG
from shared.process import EXIT_REFUSED
from shared.wire.embedded import EmbeddedValkey
from shared.wire.ports import HeldPort
from shared.wire.rpc import channel
from timzero.job import LocalTable
from timzero.supervisor import Process, ProcessState, Spec, SupervisionError

HOST = "127.0.0.1"
STOP_DEADLINE_S = 15.0
"""From SIGTERM to SIGKILL, for all services together."""


class LocalStack:
    """Args:
    run_dir: data of Valkey, weights, checkpoints and logs.
    num_replicas: rollout processes, `rollout-0` and so on.
    trainer_world_size: ranks of the trainer; above 1 they run under torchrun.
    threads: OMP_NUM_THREADS of every process.
    port: of the gateway's HTTP API; 0 picks one.
    gateway, rollout, trainer, weight_sync: keys of that service's configuration.
    announce: is told, in one line, whatever happens to a process.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_replicas: int = 1,
        trainer_world_size: int = 1,
        threads: int = 1,
        port: int = 0,
        gateway: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        weight_sync: Mapping[str, Any] | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.run_dir = run_dir.resolve()
        self.announcements: list[str] = []
        self._announce_to = announce
        self._env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._threads = threads
        self._overrides = {"gateway": gateway, "rollout": rollout, "trainer": trainer, "weight_sync": weight_sync}
        self._ports: list[HeldPort] = []
        self._processes: dict[str, Process] = {}
        self._lock = threading.Lock()
        self.valkey = EmbeddedValkey(self.run_dir / "valkey")
        self.gateway_port = port or self._pick_port()
        self.weight_sync_address = f"{HOST}:{self._pick_port()}"
        self._add(
            Spec(
                name="valkey",
                launch=lambda: self.valkey.start().process,
                is_ready=lambda _: True,
                address=self.valkey_url,
            )
        )
        self._add(self._weight_sync_spec())
        self._add(self._trainer_spec(trainer_world_size))
        for index in range(num_replicas):
            self._add(self._rollout_spec(f"rollout-{index}"))
        self._add(self._gateway_spec())

    @property
    def base_url(self) -> str:
        """Of the gateway's HTTP API."""
        return f"http://{HOST}:{self.gateway_port}"

    @property
    def valkey_url(self) -> str:
        return self.valkey.url

    def __getitem__(self, name: str) -> Process:
        """A process: `valkey`, `weight_sync`, `trainer`, `gateway`, `rollout-0`, ..."""
        return self._processes[name]

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def __enter__(self) -> LocalStack:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> LocalStack:
        """Returns when every process serves. Raises SupervisionError with the end of the log of one that does not."""
        self._processes["valkey"].start()
        self._processes["valkey"].wait_ready()
        others = [p for p in self if p.name != "valkey"]
        for process in others:
            process.start()
        for process in others:
            process.wait_ready()
        return self

    def add_replica(self, **keys: Any) -> Process:
        """Starts one more rollout process and returns when it serves. `keys` are of its configuration alone."""
        taken = {p.name for p in self}
        name = next(f"rollout-{i}" for i in range(len(taken) + 1) if f"rollout-{i}" not in taken)
        process = self._add(self._rollout_spec(name, keys))
        process.start()
        process.wait_ready()
        return process

    def remove_replica(self, name: str) -> None:
        """Ends a rollout process for good and returns when it has ended."""
        process = self._processes[name]
        process.terminate()
        if not process.join(STOP_DEADLINE_S):
            self._announce(f"{name} did not stop within {STOP_DEADLINE_S:.0f} s and was killed")

    def failed(self) -> list[Process]:
        """Processes that were given up."""
        return [p for p in self if p.state is ProcessState.FAILED]

    def check(self) -> None:
        """Raises SupervisionError when a process was given up."""
        for process in self.failed():
            raise SupervisionError(f"{process.name} was given up; end of {process.log_path}:\n{process.tail()}")

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what remains after the deadline; Valkey last, since the others write to it."""
        others = [p for p in self if p.name != "valkey"]
        for process in others:
            process.terminate()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for process in others:
            if not process.join(deadline - time.monotonic()):
                self._announce(f"{process.name} did not stop within {STOP_DEADLINE_S:.0f} s and was killed")
        self._processes["valkey"].terminate()
        self._processes["valkey"].join(STOP_DEADLINE_S)

    def _pick_port(self) -> int:
        self._ports.append(HeldPort())
        return self._ports[-1].port

    def _add(self, spec: Spec) -> Process:
        process = Process(spec, self.run_dir / "logs" / f"{spec.name}.log", self._announce)
        self._processes[spec.name] = process
        return process

    def _announce(self, line: str) -> None:
        with self._lock:
            self.announcements.append(line)
            if self._announce_to is not None:
                self._announce_to(line)

    def _service(
        self,
        service: str,
        name: str,
        port: int,
        keys: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Spec:
        keys = {**keys, **(self._overrides[service] or {}), **(own or {})}
        words = list(_words(keys))
        prefix = spec.pop("prefix", [sys.executable])
        return Spec(
            name=name,
            argv=[*prefix, "-m", f"services.{service}", *words],
            env=self._env,
            address=f"{HOST}:{port}",
            fatal_exit_codes=frozenset({EXIT_CONFIG, EXIT_REFUSED}),
            **spec,
        )

    def _weight_sync_spec(self) -> Spec:
        port = int(self.weight_sync_address.rsplit(":", 1)[1])
        keys = {"port": port, "data_dir": self.run_dir / "weight_sync"}
        return self._service("weight_sync", "weight_sync", port, keys, is_ready=_answers_health(port))

    def _trainer_spec(self, world_size: int) -> Spec:
        port = self._pick_port()
        keys = {
            "port": port,
            "redis_url": self.valkey_url,
            "weight_sync": self.weight_sync_address,
            "run_dir": self.run_dir / "trainer",
            "threads": self._threads,
        }
        prefix = [sys.executable, *(torchrun(world_size) if world_size > 1 else [])]
        return self._service("trainer", "trainer", port, keys, is_ready=_answers_health(port), prefix=prefix)

    def _rollout_spec(self, name: str, own: Mapping[str, Any] | None = None) -> Spec:
        port = self._pick_port()
        keys = {"replica": name, "port": port, "weight_sync": self.weight_sync_address, "threads": self._threads}
        # A GPU is shared with the trainer and other replicas.
        keys["kv_memory_share"] = 0.4
        return self._service("rollout", name, port, keys, own, is_ready=_answers_health(port))

    def _gateway_spec(self) -> Spec:
        keys = {"port": self.gateway_port, "valkey": self.valkey_url, "weight_sync": self.weight_sync_address}
        return self._service("gateway", "gateway", self.gateway_port, keys, is_ready=self._answers_healthz)

    def _answers_healthz(self, timeout_s: float) -> bool:
        """Not /readyz: that may ask for a ready replica too, whose absence is no reason to kill the gateway."""
        try:
            return httpx.get(f"{self.base_url}/healthz", timeout=timeout_s).status_code == 200
        except httpx.TransportError:
            time.sleep(0.1)
            return False


def stack_of(table: LocalTable, run_dir: Path, *, announce: Callable[[str], None], port: int = 0) -> LocalStack:
    """The stack that a configuration's `[local]` table describes; not started."""
    return LocalStack(
        run_dir,
        num_replicas=table.replicas,
        trainer_world_size=table.trainer_world_size,
        threads=table.threads,
        port=port,
        gateway=table.gateway,
        rollout=table.rollout,
        trainer=table.trainer,
        weight_sync=table.weight_sync,
        announce=announce,
    )


def torchrun(num_ranks: int) -> list[str]:
    """Words of Python that start ranks on this machine, each with Python's words that follow. A rank dies with torchrun."""
    # Without an address ranks meet under the host's name, which need not be one that anybody resolves.
    return ["-m", "torch.distributed.run", "--standalone", f"--local-addr={HOST}", f"--nproc-per-node={num_ranks}",
            "--no-python", sys.executable, "-m", "timzero.child", "0", sys.executable]  # fmt: skip


def _answers_health(port: int) -> Callable[[float], bool]:
    """Whether gRPC health answers at all: trainer and replicas serve only once there is a run, but they are up."""

    def is_ready(timeout_s: float) -> bool:
        with channel(f"{HOST}:{port}") as connection:
            stub = health_pb2_grpc.HealthStub(connection)
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
            except grpc.RpcError:
                return False
            return True

    return is_ready


def _words(keys: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """`key=value` of every key; those of a table within have its name before theirs."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _words(value, f"{table}{key}.")
        else:
            yield f"{table}{key}={_word(value)}"


def _word(value: Any) -> str:
    """A configuration value as it is written after `key=`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(f'"{v}"' if isinstance(v, str) else _word(v) for v in value) + "]"
    return str(value)
