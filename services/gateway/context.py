"""What the routes work with: configuration, store, weight_sync, tokenizers, event feeds, and the fleet as it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.gateway.auth import Keyring
from services.gateway.config import GatewayConfig
from services.gateway.events import Feeds
from services.gateway.problems import Problem
from services.gateway.progress import Progress
from services.gateway.tokenizer import Tokenizer, Tokenizers
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.pb import weight_sync_pb2_grpc as pb_grpc
from shared.wire.records import RunRecord
from shared.wire.store import RunStore


@dataclass(slots=True, kw_only=True)
class Gateway:
    config: GatewayConfig
    keyring: Keyring
    store: RunStore
    weight_sync: pb_grpc.WeightSyncStub
    tokenizers: Tokenizers
    feeds: Feeds
    progress: Progress
    replicas: Callable[[], Mapping[str, int]]
    """Registered replicas by state, as the dispatcher's watch last said."""

    async def run(self, run: str) -> tuple[RunRecord, Tokenizer]:
        """Raises UnknownRun, Problem model-unavailable."""
        record = await self.store.get_run(run)
        return record, await self.tokenizers.get(record.config.model)

    async def versions(self, run: str) -> list[pb.VersionInfo]:
        """Published and retained versions of a run that exists, ascending. Raises UnknownRun, AioRpcError."""
        await self.store.get_run(run)
        reply = await self.weight_sync.ListVersions(pb.ListVersionsRequest(run=run), timeout=self.config.rpc_timeout_s)
        return sorted(reply.versions, key=lambda v: (v.version.step, v.version.lineage))

    async def version(self, run: str, step: int | None) -> pb.VersionInfo:
        """The version of a step, of the newest lineage; None: the newest step. Raises Problem version-unknown, not-ready."""
        versions = await self.versions(run)
        if step is None and not versions:
            raise Problem("not-ready", "no version is published yet: the trainer is still loading", retry_after_s=2)
        found = [v for v in versions if step is None or v.version.step == step]
        if not found:
            held = f"{versions[0].version.step} to {versions[-1].version.step}" if versions else "none"
            raise Problem("version-unknown", f"version {step} of run {run}; retained: {held}")
        return found[-1]

    def check_items(self, num_items: int) -> None:
        """Raises: Problem too-large."""
        if num_items > self.config.max_items:
            raise Problem(
                "too-large",
                f"{num_items} items, at most {self.config.max_items}; split them",
                limit=self.config.max_items,
            )
