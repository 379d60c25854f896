"""Versions on their way in: fetched, verified and built while the engine serves another, then handed to its loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from services.rollout.blocking import in_thread
from services.rollout.config import RolloutConfig
from services.rollout.engine import CommitResult
from services.rollout.loop import EngineLoop
from services.rollout.samples import GivenUp, InvalidRequest, OtherVersion, UnservableRun
from services.rollout.sources import Sources, SourceUnavailable
from services.rollout.weights import Numerics, ServedModel, ServedRun, build_model, certified, raw_tensors
from shared.kernels import current_device
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.tensors import RawTensor
from shared.wire.weights import fetch

log = structlog.get_logger()


class Staging:
    """At most one version beside the one that is served."""

    def __init__(self, config: RolloutConfig, loop: EngineLoop) -> None:
        self._config, self._loop = config, loop
        self._lock = asyncio.Lock()
        self._numerics: tuple[tuple, Numerics] | None = None
        self._sources: Sources | None = None
        self._coming: tuple[str, asyncio.Future[ServedModel]] | None = None
        """Digest that is being fetched, and its model once it is there."""
        self.staged: ServedModel | None = None

    @property
    def staged_digest(self) -> str:
        return self.staged.version.digest if self.staged else ""

    async def prepare(self, manifest: Manifest, *, timeout_s: float) -> ServedModel:
        """Brings a version into staging; what was staged before is dropped. Returns at once if the replica has its weights.

        Raises: BadManifest, UnservableRun, GivenUp, and what `fetch` raises.
        """
        digest = manifest.version.digest
        begin = time.monotonic()
        async with self._lock:
            run = ServedRun.of(manifest)
            self._require_room(run)
            numerics = await self._numerics_for(run)
            if run.config.numerics == "exact" and manifest.fingerprint != numerics.fingerprint:
                raise UnservableRun(
                    f"the trainer computes with [{manifest.fingerprint}], this replica with [{numerics.fingerprint}]; exact mode "
                    "needs the same build, machine type and thread count on both sides"
                )
            for model in (self.staged, self._loop.engine.model):
                if model is not None and model.run == run and model.version.digest == digest:
                    self.staged = replace(model, manifest=manifest)
                    return self.staged
            base = self._base_of(manifest)
            self.staged = None
            left_s = timeout_s - (time.monotonic() - begin)
            self._coming = digest, in_thread(lambda: self._load(manifest, run, numerics, base, left_s))
            try:
                self.staged = await self._coming[1]
            finally:
                self._coming = None
            return self.staged

    async def commit(self, digest: str, *, mode: str, on_commit: Callable[[CommitResult], None]) -> CommitResult:
        """Serves the staged version; once more proves the one that is served, if that is asked for.

        Args:
            mode: reprefill (or empty) | drain | keep.
            on_commit: called at the swap, whether or not somebody still waits for the answer.

        Raises: InvalidRequest, OtherVersion when the version is not staged, GivenUp.
        """
        if mode not in ("", "reprefill", "drain", "keep"):
            raise InvalidRequest(f"mode must be 'reprefill', 'drain' or 'keep', got {mode!r}")
        held = self._loop.engine.model
        model = next((m for m in (self.staged, held) if m is not None and m.version.digest == digest), None)
        if model is None:
            raise OtherVersion(
                f"version {digest} is not staged (staged: {self.staged_digest or 'none'}); prepare it first"
            )
        event_loop = asyncio.get_running_loop()

        def committed(result: CommitResult) -> None:
            if self.staged is model:
                self.staged = None
            on_commit(result)

        def swapped(done: Future[CommitResult]) -> None:
            if not done.cancelled() and not done.exception():
                event_loop.call_soon_threadsafe(committed, done.result())

        commit = self._loop.commit(model, is_drain=mode == "drain", keeps_kv=mode == "keep")
        commit.add_done_callback(swapped)
        return await asyncio.wrap_future(commit)

    def abort(self, digest: str) -> None:
        """Drops the version from staging, wherever it is: coming, staged, or waiting for the replica to drain."""
        if self._coming is not None and digest in ("", self._coming[0]) and not self._coming[1].done():
            self._coming[1].set_exception(GivenUp(f"version {self._coming[0]} was given up while it was fetched"))
        if digest in ("", self.staged_digest):
            self.staged = None
        self._loop.give_up_commit(digest)

    async def _numerics_for(self, run: ServedRun) -> Numerics:
        key = (run.config.numerics, run.dtype, run.model.linear_shapes, run.model.heads, run.model.window_in_use)
        if self._numerics is None or self._numerics[0] != key:
            device = self._loop.engine.config.device
            numerics = await asyncio.wrap_future(self._loop.call(lambda: certified(run, device)))
            self._numerics = key, numerics
            log.info("kernels certified", fingerprint=numerics.fingerprint, products=numerics.ops.describe()["linear"])
        return self._numerics[1]

    def _base_of(self, manifest: Manifest) -> ServedModel | None:
        """The version that the manifest's delta is against, if it is served or staged here."""
        held = (self._loop.engine.model, self.staged)
        return next((m for m in held if m is not None and m.version.digest == manifest.base_digest), None)

    def _load(
        self, manifest: Manifest, run: ServedRun, numerics: Numerics, base: ServedModel | None, timeout_s: float
    ) -> ServedModel:
        end = time.monotonic() + timeout_s
        device = numerics.ops.device
        with current_device(device):
            tensors: Mapping[str, RawTensor | Tensor] | None = self._from_source(manifest, device, timeout_s)
            if tensors is None:
                held = raw_tensors(base) if base else None
                left_s = end - time.monotonic()
                tensors = fetch(manifest, address=self._config.weight_sync, deadline_s=left_s, base=held)
            return build_model(manifest, run, numerics, tensors, device=device)

    def _from_source(self, manifest: Manifest, device: torch.device, timeout_s: float) -> dict[str, Tensor] | None:
        """From the trainer's memory, where it offers that; None: weight_sync has to be asked."""
        if not manifest.HasField("source"):
            return None
        if self._sources is None:
            self._sources = Sources(self._config.replica, device)
        try:
            # Time must be left for weight_sync when this does not work out.
            tensors = self._sources.copy(manifest, deadline_s=timeout_s / 2)
        except SourceUnavailable as error:
            metric(names.SOURCE_FALLBACKS).labels(manifest.source.transport, error.reason).inc()
            log.warning("fetching from weight_sync", transport=manifest.source.transport, reason=str(error))
            return None
        metric(names.WEIGHT_SYNC_BYTES).labels(manifest.source.transport).inc(sum(e.nbytes for e in manifest.tensors))
        return tensors

    def _require_room(self, run: ServedRun) -> None:
        capacity = self._config.kv_capacity_tokens
        if capacity < run.config.max_model_len:
            raise UnservableRun(
                f"the KV cache holds {capacity} tokens, one sequence of run {run.config.run} may have "
                f"{run.config.max_model_len}; raise kv_cache_tokens"
            )
