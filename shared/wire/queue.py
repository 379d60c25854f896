"""The training queue as the trainer's rank 0 sees it: leases whole batches in order, acknowledges with the checkpoint.

Synchronous redis-py, no torch. Only one trainer may act at a time: every call carries the fencing epoch that `take_over`
returned, and a newer `take_over` makes all older epochs raise Fenced.

>>> queue = TrainQueue.connect(url)
>>> config = queue.wait_for_run(deadline_s=60)
>>> epoch = queue.take_over(config.run, next_step=checkpoint_step)
>>> groups = queue.lease(config.run, step, epoch=epoch, deadline_s=600)  # prompt-number order
>>> queue.record_step(config.run, step, metrics, epoch=epoch)
>>> queue.commit_trained(config.run, durable_step=step + 1, epoch=epoch)  # the checkpoint is on disk
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from shared.wire import stored, valkey
from shared.wire.codec import CodecError, decode_group, encode_group
from shared.wire.durability import MARK
from shared.wire.records import Fenced, NotDurable, RunOver, RunRecord
from shared.wire.run import RunConfig, RunState
from shared.wire.types import DropReason, Group, SpanKind
from shared.wire.valkey import key

__all__ = ["Fenced", "RunOver", "TrainQueue"]

CONSUMER_GROUP = "trainer"
POISON_READS = 3
_SLICE_S = 1.0
"""Longest wait before the run's state and the fence are looked at again."""
_MOMENT_S = 0.005
"""Longest wait of a read ahead."""
_COUNT = 16
"""Groups per read; a group may be megabytes."""

log = structlog.get_logger()


class TrainQueue:
    """Errors: redis.exceptions.RedisError when Valkey stays away for longer than about 30 s."""

    def __init__(self, client: valkey.SyncClient, blocking: valkey.SyncClient, *, consumer: str) -> None:
        self._client = client
        # Delivery is not idempotent: an entry whose reply got lost is pending, so these reads are not retried blindly.
        self._blocking = blocking
        self._consumer = consumer
        self._groups: dict[int, Group] = {}
        self._durable: tuple[int, str] = (0, "")
        """Step and archive of the newest checkpoint."""
        self._server_id = ""
        """Run id of the server that has everything up to the last sync."""

    @classmethod
    def connect(cls, url: str, *, consumer: str = "trainer-0") -> TrainQueue:
        """`consumer` is stable over restarts, so that a restarted trainer finds its own pending entries.

        Raises ValkeyRefused.
        """
        client = valkey.connect_sync(url)
        valkey.check(client.info())
        return cls(client, valkey.connect_sync(url, retries=0), consumer=consumer)

    def close(self) -> None:
        self._blocking.close()
        self._client.close()

    def wait_for_run(self, deadline_s: float) -> RunConfig | None:
        """The newest run that is not over, as soon as there is one; None at the deadline."""
        deadline = time.monotonic() + deadline_s
        while True:
            cursor = self._last(valkey.CREATED)
            names = self._client.zrange(valkey.RUNS, 0, 0, desc=True)
            if names and not (record := self.get_run(names[0].decode())).state.is_over:
                return record.config
            if not self._wait(valkey.CREATED, cursor, deadline):
                return None

    def get_run(self, run: str) -> RunRecord:
        """Raises UnknownRun."""
        return stored.run_record(run, self._client.hgetall(key(run, "run")))

    def take_over(self, run: str, *, next_step: int) -> int:
        """Call once after loading the checkpoint, before `lease`. Returns the new fencing epoch.

        Every trajectory of batches < next_step becomes TRAINED whatever its state (the checkpoint's ledger holds it),
        their entries are acknowledged and deleted, pending entries of whoever came before are taken over.
        Raises RunOver, NotDurable, and IllegalTransition when `next_step` is below what was durable before.
        """
        while True:
            server_id = self._client.info("server")["run_id"]
            self._create_group(run)
            epoch, num_trained = self._call("take_over", run, time.time(), next_step)
            # An epoch that a power cut took back would be given to the next trainer too.
            if self._sync() == server_id:
                break
        self._groups.clear()
        self._durable, self._server_id = (next_step, ""), server_id
        self._read_pending(run, epoch)
        self._claim_others(run, epoch)
        log.info("took the run over", run=run, epoch=epoch, next_step=next_step, newly_trained=num_trained,
                 pending_groups=len(self._groups))  # fmt: skip
        return epoch

    def lease(
        self, run: str, step: int, *, epoch: int, deadline_s: float, digests: Collection[str] | None = None
    ) -> list[Group] | None:
        """The complete batch `step` in prompt-number order; its trajectories become LEASED(step). None at the deadline.

        Blocks while the run is paused. Groups dropped by an operator's decision (poison, then resume) are missing from it.
        Under max_lag so are samples that no trainer can train, or whose reward did not come, and groups of which too few
        samples were left twice. Raises Fenced, RunOver, NotDurable.

        Args:
            digests: of the versions that the trainer holds; None: any.
        """
        config = self.get_run(run).config
        size = config.prompts_per_step
        numbers = range(step * size, (step + 1) * size)
        deadline = time.monotonic() + deadline_s
        while True:
            cursor = self._last(key(run, "events"))
            dropped = {int(n) for n in self._client.smembers(key(run, "dropped"))}
            batch = [n for n in numbers if n not in dropped]
            missing = [n for n in batch if n not in self._groups]
            if self._drop_unusable(config, [n for n in batch if n in self._groups], epoch, digests):
                continue
            # Without numbers the script only checks the fence and the run's state.
            answer = self._call("lease", run, time.time(), epoch, step, self._durable[0], *([] if missing else batch))
            if answer == b"forgotten":
                # Without it the gate stays where the checkpoint before left it, and the next one may be out of reach.
                log.warning(
                    "Valkey forgot the newest checkpoint, telling it again", run=run, durable_step=self._durable[0]
                )
                self.commit_trained(run, durable_step=self._durable[0], epoch=epoch, archive=self._durable[1])
                continue
            if answer == b"ok" and not missing:
                if config.max_lag is not None and not self._drops_are_durable(config, batch):
                    continue
                return [self._groups.pop(n) for n in batch]
            if time.monotonic() >= deadline:
                return None
            if not missing:
                self._wait(key(run, "events"), cursor, min(deadline, time.monotonic() + _SLICE_S))
            elif not self._read_new(run, epoch, deadline):
                self._fetch(run, epoch, missing)

    def read_ahead(self, run: str, *, epoch: int) -> None:
        """Reads and checks what is queued, so that the next lease has less to do; waits a moment where nothing is.

        Raises Fenced, RunOver.
        """
        while self._read_new(run, epoch, time.monotonic() + _MOMENT_S):
            pass

    def _drop_unusable(
        self, config: RunConfig, numbers: Sequence[int], epoch: int, digests: Collection[str] | None
    ) -> bool:
        """The hard check of max_lag. Whether a trajectory was dropped; what is left of its group is queued anew."""
        is_changed = False
        for number in numbers:
            group = self._groups[number]
            reasons = unusable(config, group, digests)
            if not reasons:
                continue
            rest = tuple(t for t in group.trajectories if t.trajectory_id not in reasons)
            is_enough = len(rest) >= config.least_survivors
            log.warning("trajectories dropped", run=config.run, number=number, reasons=reasons, left=len(rest))
            record = encode_group(replace(group, trajectories=rest)) if is_enough else b""
            dropped = [part for name, reason in reasons.items() for part in (name, reason.value)]
            self._call("drop_trajectories", config.run, time.time(), epoch, number, record, *dropped)
            del self._groups[number]
            is_changed = True
        return is_changed

    def _drops_are_durable(self, config: RunConfig, batch: Sequence[int]) -> bool:
        """Whether what the batch does without is on disk: otherwise a power cut could forget the drop of a sample, which the
        checkpoint would then make TRAINED. False: the server was restarted, look again."""
        partial = [n for n in batch if len(self._groups[n].trajectories) < config.samples_per_prompt]
        if not partial and len(batch) == config.prompts_per_step:
            return True
        before, self._server_id = self._server_id, self._sync()
        if self._server_id == before:
            return True
        for number in partial:
            del self._groups[number]
        return False

    def record_step(self, run: str, step: int, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Appends to the run's steps (JSON: finite numbers, strings, lists) and advances its `step` to step + 1.

        Raises ValueError (a number that is not finite), Fenced.
        """
        self._call("record_step", run, epoch, step, json.dumps(dict(metrics), allow_nan=False))

    def commit_trained(self, run: str, *, durable_step: int, epoch: int, archive: str = "") -> int:
        """The checkpoint with `durable_step` steps is on disk: batches < durable_step become TRAINED, their entries go.

        This is what opens the admission gate. With `archive` (a URI under which `shared.wire.archive.write_step` wrote
        every newly covered step) the token bytes leave Valkey too. Returns the number of newly trained trajectories.
        Allowed after the run is stopped. Raises Fenced.
        """
        self._durable = durable_step, archive
        return self._call("commit_trained", run, time.time(), epoch, durable_step, archive)

    def set_state(self, run: str, state: RunState, *, epoch: int, reason: str = "", detail: str = "") -> None:
        """completed, failed or paused. Raises Fenced, RunOver."""
        self._call("set_run_state", run, time.time(), state.value, reason, detail, epoch)

    # reading

    def _create_group(self, run: str) -> None:
        try:
            self._client.xgroup_create(key(run, "queue"), CONSUMER_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _read_new(self, run: str, epoch: int, deadline: float) -> bool:
        """Waits a slice for entries nobody was given yet. False: there were none."""
        block = max(1, int(min(_SLICE_S, deadline - time.monotonic()) * 1000))
        try:
            found = self._read_group(run, ">", block=block)
        except (ConnectionError, TimeoutError):
            log.warning("lost Valkey while waiting for groups", run=run)
            # With retries; what was delivered into the lost connection is pending now.
            self._create_group(run)
            self._read_pending(run, epoch)
            return True
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            # The group was lost with the server's data; from id 0 everything that is left is delivered once more.
            log.warning("recreating the lost consumer group", run=run)
            self._create_group(run)
            return True
        self._admit(run, epoch, found)
        return bool(found)

    def _read_group(self, run: str, after: str, *, block: int | None = None) -> list[tuple[bytes, Any]]:
        client = self._client if block is None else self._blocking
        streams = client.xreadgroup(
            CONSUMER_GROUP, self._consumer, {key(run, "queue"): after}, count=_COUNT, block=block
        )
        return streams[0][1] if streams else []

    def _read_pending(self, run: str, epoch: int) -> None:
        after = "0"
        while entries := self._read_group(run, after):
            after = entries[-1][0].decode()
            self._admit(run, epoch, entries)

    def _claim_others(self, run: str, epoch: int) -> None:
        """Fencing has made their owners harmless, so no idle time is waited for."""
        start = "0-0"
        while True:
            start, entries, _ = self._client.xautoclaim(
                key(run, "queue"), CONSUMER_GROUP, self._consumer, min_idle_time=0, start_id=start, count=_COUNT
            )
            self._admit(run, epoch, entries)
            if start == b"0-0":
                return

    def _fetch(self, run: str, epoch: int, numbers: list[int]) -> None:
        """Reads queued groups of this batch that were delivered before and are not held any more (a repeated lease)."""
        for entry_id in self._client.hmget(key(run, "queued"), numbers):
            if entry_id is not None:
                self._admit(run, epoch, self._client.xrange(key(run, "queue"), entry_id, entry_id))

    def _admit(self, run: str, epoch: int, entries: list[tuple[bytes, Any]]) -> None:
        config = None
        for entry_id, fields in entries:
            if not fields:  # pending, but deleted: its batch was committed
                self._client.xack(key(run, "queue"), CONSUMER_GROUP, entry_id)
                continue
            config = config or self.get_run(run).config
            for attempt in range(1, POISON_READS + 1):
                try:
                    group = _validated(config, fields)
                except CodecError as error:
                    log.warning("unreadable queue entry", run=run, entry=entry_id.decode(), attempt=attempt,
                                error=str(error))  # fmt: skip
                    reason = str(error)
                    fields = dict(self._client.xrange(key(run, "queue"), entry_id, entry_id)).get(entry_id) or fields
                else:
                    self._groups[group.prompt_number] = group
                    break
            else:
                number = stored.text(fields.get(b"number"))
                name = f"group {run}.{number}" if number.isdecimal() else f"queue entry {entry_id.decode()}"
                detail = f"{name} can't be read: {reason}. Resume to train its batch without it, or stop the run"
                self._call("poison", run, time.time(), epoch, number, entry_id, detail)

    # waiting

    def _sync(self) -> str:
        """Returns, when every earlier write is on disk, the id of the server that has them. Raises NotDurable after 10 s."""
        pipe = self._client.pipeline(transaction=False)
        pipe.incr(MARK)
        pipe.execute_command("WAITAOF", 1, 0, 10_000)
        pipe.info("server")
        _, (num_local, _), info = pipe.execute()
        if num_local < 1:
            raise NotDurable("Valkey's append-only file is not synced after 10 s: is its disk slow or full?")
        return info["run_id"]

    def _last(self, stream: str) -> str:
        newest = self._client.xrevrange(stream, count=1)
        return newest[0][0].decode() if newest else "0-0"

    def _wait(self, stream: str, cursor: str, deadline: float) -> bool:
        """Until the stream grows behind the cursor, 10 s at most. False: the deadline has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        self._client.xread({stream: cursor}, count=1, block=max(1, int(min(left, valkey.MAX_BLOCK_S) * 1000)))
        return True

    def _call(self, name: str, run: str, *args: Any) -> Any:
        try:
            return valkey.call_sync(self._client, name, run, *args)
        except ResponseError as error:
            raise stored.refusal(error, run) from error


def _validated(config: RunConfig, fields: Mapping[bytes, bytes]) -> Group:
    """Raises CodecError when the entry is no group of this run, or a token is not from the batch's version."""
    group = decode_group(fields.get(b"group", b""))
    if (group.run, str(group.prompt_number)) != (config.run, stored.text(fields.get(b"number"))):
        raise CodecError(f"entry of number {fields.get(b'number')!r} holds group {group.group_id} of run {group.run}")
    version = config.version_for(config.batch_of(group.prompt_number))
    for trajectory in group.trajectories:
        if trajectory.reward is None:
            raise CodecError(f"trajectory {trajectory.trajectory_id} has no reward")
        found = {s.policy_step for s in trajectory.spans if s.kind is SpanKind.SAMPLED} - {version}
        if found and config.max_lag is None:
            raise CodecError(f"trajectory {trajectory.trajectory_id} has tokens of versions {found}, not {version}")
    return group


def unusable(config: RunConfig, group: Group, digests: Collection[str] | None) -> dict[str, DropReason]:
    """Trajectories of a group that no step may train, by id, and why: under max_lag the oldest token is too old, or a version
    is none that exists.

    Args:
        digests: of the versions that the trainer holds when it is at the group's batch; None: any.
    """
    if config.max_lag is None:
        return {}
    batch = config.batch_of(group.prompt_number)
    reasons = {}
    for t in group.trajectories:
        spans = [s for s in t.spans if s.kind is SpanKind.SAMPLED]
        # Tokens of another engine are no version's of ours.
        ours = set() if t.sampler or digests is None else {s.manifest_digest for s in spans} - set(digests)
        if any(s.policy_step < config.version_for(batch) for s in spans):
            reasons[t.trajectory_id] = DropReason.STALE
        elif ours or any(s.policy_step > batch for s in spans):
            reasons[t.trajectory_id] = DropReason.ORPHAN_LINEAGE
    return reasons
