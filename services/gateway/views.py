"""Records of the store and messages of weight_sync as the answers that clients get."""

from __future__ import annotations

from typing import Any

from services.gateway import answers
from services.gateway.tokenizer import Tokenizer
from shared.config import unstructure
from shared.wire import records
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.types import Trajectory, float32_bytes


def run(record: records.RunRecord) -> answers.Run:
    return answers.Run(
        run=record.run,
        state=record.state.value,
        reason=record.reason,
        detail=record.detail,
        created=record.created,
        step=record.step,
        durable_step=record.durable_step,
        lineage=record.lineage,
        config=unstructure(record.config),
    )


def summary_fields(record: records.TrajectoryRecord) -> dict[str, Any]:
    return {
        "trajectory_id": record.trajectory_id,
        "group_id": record.group_id,
        "prompt_id": record.prompt_id,
        "number": record.number,
        "sample_index": record.sample_index,
        "state": record.state.value,
        "reason": record.reason,
        "step": record.step,
        "reward": record.reward,
        "rewards": rewards(record),
        "sources": list(record.sources),
        "deadline": record.deadline,
        "timestamps": dict(record.timestamps),
        "metadata": dict(record.metadata),
        "sampler": record.sampler or None,
    }


def rewards(record: records.TrajectoryRecord) -> dict[str, answers.Reward]:
    return {s: answers.Reward(value=r.value, revision=r.revision) for s, r in record.rewards.items()}


def summary(record: records.TrajectoryRecord) -> answers.TrajectorySummary:
    return answers.TrajectorySummary(**summary_fields(record))


def trajectory(record: records.TrajectoryRecord, tokenizer: Tokenizer, *, decimals: bool) -> answers.Trajectory:
    """Args: decimals: also give the logprobs as JSON numbers (float64 of the float32: exact both ways)."""
    fields = summary_fields(record)
    if (t := record.trajectory) is None:
        return answers.Trajectory(**fields)
    return answers.Trajectory(
        **fields,
        seed=None if t.sampler else t.seed,
        sampling=answers.SamplingView.model_validate(t.sampling, from_attributes=True),
        token_ids=t.token_ids.tolist(),
        num_prompt_tokens=t.num_prompt_tokens,
        logprobs=t.logprobs.astype("float64").tolist() if decimals else None,
        logprobs_f32=float32_bytes(t.logprobs),
        top1=None if len(t.top1) and t.top1.min() < 0 else t.top1.tolist(),
        loss_mask=t.loss_mask.tolist(),
        spans=[answers.SpanView.model_validate(s, from_attributes=True) for s in t.spans],
        finish_reason=t.finish_reason.value,
        fingerprint=t.fingerprint,
        replicas=list(t.replicas),
        prompt_text=tokenizer.decode(t.token_ids[: t.num_prompt_tokens].tolist()),
        text=tokenizer.decode(sampled_ids(t)),
    )


def sampled_ids(t: Trajectory) -> list[int]:
    return t.token_ids[t.num_prompt_tokens :].tolist()


def eval_fields(record: records.EvalRecord) -> dict[str, Any]:
    return {
        "eval_id": record.eval,
        "run": record.run,
        "state": "completed" if record.is_finished else "running",
        "created": record.created,
        "version": answers.VersionName(step=record.step, digest=record.digest),
        "seed": record.seed,
        "num_items": record.num_items,
        "num_samples": record.num_trajectories,
        "num_finished": record.num_finished,
        "metadata": dict(record.metadata),
    }


def eval_summary(record: records.EvalRecord) -> answers.EvalSummary:
    return answers.EvalSummary(**eval_fields(record))


def evaluation(record: records.EvalRecord, tokenizer: Tokenizer) -> answers.Eval:
    samples: dict[int, list[answers.EvalSample]] = {}
    for t in record.trajectories:
        samples.setdefault(t.number, []).append(eval_sample(t, tokenizer))
    items = [
        answers.EvalItemView(
            index=i, prompt_token_ids=list(item.token_ids), metadata=dict(item.metadata), samples=samples.get(i, [])
        )
        for i, item in enumerate(record.items)
    ]
    return answers.Eval(**eval_fields(record), items=items)


def eval_sample(record: records.TrajectoryRecord, tokenizer: Tokenizer) -> answers.EvalSample:
    t = record.trajectory
    ids = None if t is None else sampled_ids(t)
    return answers.EvalSample(
        trajectory_id=record.trajectory_id,
        sample_index=record.sample_index,
        state=record.state.value,
        reason=record.reason,
        token_ids=ids,
        logprobs_f32=None if t is None else float32_bytes(t.logprobs),
        text=None if ids is None else tokenizer.decode(ids),
        finish_reason=None if t is None else t.finish_reason.value,
        rewards=rewards(record),
    )


def step(record: records.StepRecord) -> answers.Step:
    return answers.Step(cursor=record.cursor, step=record.step, epoch=record.epoch, metrics=dict(record.metrics))


def version_fields(info: pb.VersionInfo) -> dict[str, Any]:
    return {
        "step": info.version.step,
        "lineage": info.version.lineage,
        "digest": info.version.digest,
        "published_at": info.published_at,
        "nbytes": info.nbytes,
        "replicas_ready": info.replicas_ready,
    }


def version_detail(info: pb.VersionInfo, manifest: pb.Manifest) -> answers.VersionDetail:
    tensors = [
        answers.TensorView(name=t.name, dtype=t.dtype, shape=list(t.shape), nbytes=t.nbytes, digest=t.digest)
        for t in manifest.tensors
    ]
    return answers.VersionDetail(**version_fields(info), fingerprint=manifest.fingerprint, tensors=tensors)


def event(record: records.Event) -> answers.StreamEvent:
    return answers.StreamEvent.model_validate(record, from_attributes=True)
