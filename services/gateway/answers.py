"""What clients get: response bodies of the HTTP API. `services.gateway.views` builds them from records."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PlainSerializer, WithJsonSchema

from services.gateway.problems import ProblemDocument

RawBytes = Annotated[
    bytes,
    PlainSerializer(lambda data: base64.b64encode(data).decode(), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}, mode="serialization"),
]
"""Bytes in msgpack, base64 in JSON."""


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Run(Answer):
    run: str
    state: Literal["running", "paused", "completed", "stopped", "failed"]
    reason: str = Field(description="Why paused, stopped or failed: one word (operator, missing_reward, mismatch, ...)")
    detail: str
    created: float
    step: int = Field(description="Next step to train")
    durable_step: int = Field(description="Batches below it are covered by a durable checkpoint")
    lineage: int
    config: dict[str, Any]


class RunPage(Answer):
    runs: list[Run]
    next_cursor: str | None


class PromptResult(Answer):
    index: int
    status: int = Field(
        description="202 accepted; 200 accepted before with an equal body; 429 gate closed; 4xx refused"
    )
    number: int | None = None
    prompt_id: str | None = None
    group_id: str | None = None
    trajectory_ids: list[str] = []
    problem: ProblemDocument | None = None


class PromptResults(Answer):
    items: list[PromptResult]


class CancelledGroup(Answer):
    group_id: str
    number: int
    dropped: int = Field(description="Samples dropped now; 0: they were before")


class Reward(Answer):
    value: float
    revision: int


class RewardAnswer(Answer):
    trajectory_id: str
    source: str
    value: float
    revision: int
    applied: bool = Field(description="False: the very same reward was recorded before")


class RewardResult(Answer):
    index: int
    status: int
    trajectory_id: str | None = None
    source: str | None = None
    applied: bool = False
    problem: ProblemDocument | None = None


class RewardResults(Answer):
    items: list[RewardResult]


class SpanView(Answer):
    start: int
    end: int
    kind: Literal["prompt", "sampled", "tool"]
    lineage: int
    policy_step: int
    manifest_digest: str
    kv: Literal["fresh", "mixed"]


class SamplingView(Answer):
    temperature: float
    max_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    top_p: float
    top_k: int
    min_p: float


class TrajectorySummary(Answer):
    trajectory_id: str
    group_id: str
    prompt_id: str
    number: int = Field(description="Of the prompt; of an evaluation the item's place")
    sample_index: int
    state: str
    reason: str = Field(description="Why dropped")
    step: int | None = Field(description="Training step that leased or trained it")
    reward: float | None = Field(description="Sum over the sources once all are there")
    rewards: dict[str, Reward]
    sources: list[str]
    deadline: float | None = Field(
        description="Unix time after which a missing reward pauses the run or, under max_lag, drops the sample"
    )
    timestamps: dict[str, float] = Field(description="Unix seconds at which each state was entered")
    metadata: dict[str, JsonValue]
    sampler: str | None = Field(description="Engine that sampled it, where it was ingested; null: ours")


class Trajectory(TrajectorySummary):
    """The fields below are null before the sample is generated. Text is derived from the ids, never the other way."""

    seed: int | None = None
    sampling: SamplingView | None = None
    token_ids: list[int] | None = Field(default=None, description="Prompt and sampled tokens")
    num_prompt_tokens: int | None = None
    logprobs: list[float] | None = Field(
        default=None, description="Of the sampled tokens. JSON only: decimals that round-trip to the same float32"
    )
    logprobs_f32: RawBytes | None = Field(default=None, description="The same as raw little-endian float32")
    top1: list[int] | None = Field(default=None, description="The engine's argmax per sampled token")
    loss_mask: list[int] | None = None
    spans: list[SpanView] | None = None
    finish_reason: Literal["stop", "length", "aborted"] | None = None
    fingerprint: str | None = Field(default=None, description="Numerics of the replicas that sampled it")
    replicas: list[str] | None = None
    prompt_text: str | None = None
    text: str | None = Field(default=None, description="The sampled tokens, decoded without special tokens")


class TrajectoryPage(Answer):
    trajectories: list[Trajectory] | list[TrajectorySummary]
    next_cursor: str | None = Field(description="Null: the last page. A page may be empty and still have a cursor")


class VersionName(Answer):
    step: int
    digest: str = Field(description="Empty: whatever is published as this step")


class EvalSample(Answer):
    trajectory_id: str
    sample_index: int
    state: str
    reason: str
    token_ids: list[int] | None = Field(description="Sampled tokens")
    logprobs_f32: RawBytes | None
    text: str | None
    finish_reason: str | None
    rewards: dict[str, Reward]


class EvalItemView(Answer):
    index: int
    prompt_token_ids: list[int]
    metadata: dict[str, JsonValue]
    samples: list[EvalSample]


class EvalSummary(Answer):
    eval_id: int
    run: str
    state: Literal["running", "completed"]
    created: float
    version: VersionName
    seed: int
    num_items: int
    num_samples: int
    num_finished: int
    metadata: dict[str, JsonValue]


class Eval(EvalSummary):
    items: list[EvalItemView]


class EvalPage(Answer):
    evals: list[EvalSummary]
    next_cursor: str | None


class Version(Answer):
    step: int
    lineage: int
    digest: str
    published_at: float
    nbytes: int
    replicas_ready: int


class TensorView(Answer):
    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    digest: str


class VersionDetail(Version):
    fingerprint: str = Field(description="Numerics of the trainer")
    tensors: list[TensorView]


class Versions(Answer):
    versions: list[Version]


class Step(Answer):
    cursor: str
    step: int = Field(description="Trained again after a restart: it appears again, and the last one counts")
    epoch: int
    metrics: dict[str, Any]


class Steps(Answer):
    steps: list[Step]
    next_cursor: str | None = Field(description="Null: nothing more now")


class Gate(Answer):
    limit: int = Field(description="Prompt numbers below it are admitted")
    in_flight: int = Field(description="Trajectories that are accepted and neither trained nor dropped")


class Metrics(Answer):
    run: str
    state: str
    step: int
    durable_step: int
    accepted: int
    ingested: int = Field(description="Of those accepted, the ones that were sampled elsewhere")
    replaced: int = Field(description="Groups sampled again because too few of their samples were left (max_lag)")
    trained: int
    dropped: dict[str, int]
    live: int
    states: dict[str, int]
    rewards_late: int
    queue_depth: int
    evaluations: dict[str, int]
    gate: Gate
    replicas: dict[str, int] = Field(description="Registered replicas by state")
    latest_step: Step | None


class Health(Answer):
    status: Literal["ok"]


class Readiness(Answer):
    status: Literal["ready"]
    checks: dict[str, str]


class StreamEvent(Answer):
    """`data` of one server-sent event; its `id` is the cursor, its `event` the type."""

    type: str = Field(description="`trajectory.<state>` or `run.<state>`")
    cursor: str
    trajectory_id: str
    group_id: str
    reason: str
