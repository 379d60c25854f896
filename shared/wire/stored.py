"""Valkey's hashes as records: the one place that knows their field names besides the scripts."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import msgpack
from redis.exceptions import ResponseError

from shared.config import structure
from shared.wire.codec import decode_trajectory
from shared.wire.prompts import EvalItem, decode_eval_item
from shared.wire.records import (
    Counts,
    EvalRecord,
    Fenced,
    IllegalTransition,
    RunOver,
    RunRecord,
    StoredReward,
    StoreError,
    TrajectoryRecord,
    UnknownRun,
)
from shared.wire.run import RunConfig, RunState
from shared.wire.types import State

Fields = Mapping[bytes, bytes]


def refusal(error: ResponseError, run: str) -> StoreError | ResponseError:
    """The typed error behind what a script answered; anything else stays what it is."""
    word, _, rest = str(error).partition(" ")
    match word:
        case "UNKNOWN_RUN":
            return UnknownRun(f"no run {run}")
        case "RUN_OVER":
            return RunOver(run, RunState(rest))
        case "FENCED":
            return Fenced(f"run {run} was taken over by another trainer: {rest}. This one must stop")
        case "SUPERSEDED":
            return IllegalTransition(f"run {run} was followed by run {rest}, whose versions the replicas serve now")
        case "BEHIND":
            return IllegalTransition(
                f"run {run} is durable up to step {rest}: a checkpoint older than that can't be resumed, its prompts are gone"
            )
    return error


def text(value: bytes | None, default: str = "") -> str:
    return default if value is None else value.decode()


def reward_json(value: float, revision: int) -> str:
    """Equal bodies are equal strings."""
    return json.dumps({"revision": revision, "value": float(value)})


def run_record(run: str, fields: Fields) -> RunRecord:
    """Raises UnknownRun when the hash is empty."""
    if not fields:
        raise UnknownRun(f"no run {run}")
    return RunRecord(
        config=_run_config(fields[b"config"]),
        state=RunState(text(fields[b"state"])),
        reason=text(fields[b"reason"]),
        detail=text(fields[b"detail"]),
        created=float(fields[b"created"]),
        step=int(fields[b"step"]),
        durable_step=int(fields[b"durable_step"]),
        lineage=int(fields[b"lineage"]),
        epoch=int(fields[b"epoch"]),
    )


# It never changes, and a run is looked at a hundred times a second.
@functools.lru_cache(maxsize=16)
def _run_config(data: bytes) -> RunConfig:
    return structure(RunConfig, json.loads(data))


def trajectory_record(
    trajectory_id: str, fields: Fields, *, metadata: Mapping[str, Any], with_tokens: bool = True
) -> TrajectoryRecord:
    """Args:
    fields: the hash `R:t:{trajectory_id}`, not empty.
    metadata: of its prompt or evaluation item.
    """
    named = {name.decode(): value for name, value in fields.items()}
    times = {name[3:]: float(value) for name, value in named.items() if name.startswith("at:")}
    rewards = {
        name[7:]: StoredReward(**json.loads(value)) for name, value in named.items() if name.startswith("reward:")
    }
    state = State(text(named["state"]))
    awaiting = state is State.AWAITING_REWARD
    return TrajectoryRecord(
        trajectory_id=trajectory_id,
        group_id=text(named["group"]),
        prompt_id=text(named.get("prompt_id")),
        number=int(named["number"]),
        sample_index=int(named["sample"]),
        state=state,
        reason=text(named.get("reason")),
        step=int(named["step"]) if "step" in named else None,
        rewards=rewards,
        sources=tuple(json.loads(named["sources"])) if "sources" in named else tuple(rewards),
        deadline=times["awaiting_reward"] + float(named["deadline_s"]) if awaiting else None,
        timestamps=times,
        metadata=metadata,
        sampler=text(named.get("sampler")),
        trajectory=decode_trajectory(named["record"]) if with_tokens and "record" in named else None,
    )


def metadata(data: bytes | None) -> Mapping[str, Any]:
    """Of an encoded prompt or evaluation item."""
    return msgpack.unpackb(data, raw=False)["metadata"] if data is not None else {}


def eval_record(run: str, eval_id: int, fields: Fields) -> EvalRecord:
    """Without the samples."""
    num_items = int(fields[b"num_items"])
    return EvalRecord(
        run=run,
        eval=eval_id,
        created=float(fields[b"created"]),
        step=int(fields[b"step"]),
        digest=text(fields[b"digest"]),
        seed=int(fields[b"seed"]),
        num_items=num_items,
        num_trajectories=int(fields[b"num_trajectories"]),
        num_finished=int(fields[b"num_finished"]),
        metadata=json.loads(fields[b"metadata"]),
        items=tuple(decode_eval_item(fields[b"item:%d" % i]) for i in range(num_items) if b"item:%d" % i in fields),
    )


def eval_samples(run: str, eval_id: int, items: tuple[EvalItem, ...]) -> list[tuple[str, EvalItem]]:
    """(trajectory id, its item), in item order."""
    return [(f"{run}.e{eval_id}.{i}.{s}", item) for i, item in enumerate(items) for s in range(item.n)]


def counts(fields: Fields, queue_depth: int) -> Counts:
    by_name = {name.decode(): int(value) for name, value in fields.items()}

    def below(prefix: str) -> dict[str, int]:
        return {name[len(prefix) :]: n for name, n in by_name.items() if name.startswith(prefix) and n}

    return Counts(
        accepted=by_name.get("accepted", 0),
        by_state={State(name): n for name, n in below("state:").items()},
        dropped=below("dropped:"),
        rewards_late=by_name.get("rewards_late", 0),
        ingested=by_name.get("ingested", 0),
        replaced=by_name.get("replaced", 0),
        queue_depth=queue_depth,
        eval_accepted=by_name.get("eval:accepted", 0),
        eval_by_state={State(name): n for name, n in below("eval:state:").items()},
    )
