"""From posted samples of another engine to groups of the run, generated already.

An ingested group takes the place of a prompt: its number says which batch trains it, and the run's lag which versions may
have sampled it. From there on it goes the way of every other group.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.gateway import answers, schemas
from services.gateway.context import Gateway
from services.gateway.ingest_schemas import Sample, SampledGroup, VersionClaim
from services.gateway.problems import Problem
from services.gateway.prompts import (
    Document,
    accept,
    attempt,
    check_distribution,
    checked_number,
    field_problem,
    reward_spec,
)
from services.gateway.rewards import exact_match
from services.gateway.tokenizer import Tokenizer
from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.ingest import IngestedGroup
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.prompts import EXACT_MATCH, PromptItem, RewardSpec
from shared.wire.records import AcceptResult
from shared.wire.run import RunConfig
from shared.wire.types import FinishReason, SamplingParams, Span, SpanKind, Trajectory, float32_array

UNKNOWN_TOP1 = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A group that is valid as far as that needs no store and no weight_sync."""

    body: str
    """Equal for equal bodies."""
    claim: VersionClaim
    group: IngestedGroup


async def post(
    gateway: Gateway, run: str, items: Sequence[SampledGroup | schemas.Refused], document: Document
) -> list[answers.PromptResult]:
    """One result per group, in order; what is accepted is on disk.

    Raises: UnknownRun, NotDurable, AioRpcError, Problem too-large; capacity-exhausted where the closed gate refuses every item.
    """
    gateway.check_items(len(items))
    record, tokenizer = await gateway.run(run)

    def prepare(item: SampledGroup) -> Offer:
        group = sampled_group(tokenizer, record.config, item)
        body = hashlib.sha256(f"{group.fingerprint} of {item.version}".encode()).hexdigest()[:32]
        return Offer(body=body, claim=item.version, group=group)

    async def store(run: str, offers: list[Offer]) -> list[AcceptResult]:
        return await gateway.store.accept_groups(run, [(o.body, o.group) for o in offers])

    prepared = await asyncio.to_thread(lambda: [attempt(prepare, item) for item in items])
    named = await _named(gateway, record.config, prepared)
    for problem in (p for p in named if isinstance(p, Problem)):
        metric(names.INGEST_REFUSED).labels(run=run, reason=problem.code).inc()
        metric(names.NONFINITE).labels(run=run).inc(problem.extra.get("nonfinite", 0))
    return await accept(gateway, run, items, named, store, document)


async def _named(gateway: Gateway, config: RunConfig, prepared: Sequence[Offer | Problem]) -> list[Offer | Problem]:
    """The same with the full name of each group's version, or why that is not to be had."""
    numbers = [p.group.prompt.number for p in prepared if isinstance(p, Offer)]
    bodies = await gateway.store.fingerprints(config.run, numbers)
    # What was posted before needs no version, which may be retired by now.
    taken = {number for number, body in zip(numbers, bodies, strict=True) if body is not None}
    versions = await gateway.versions(config.run) if set(numbers) - taken else []

    def name(offer: Offer | Problem) -> Offer | Problem:
        if isinstance(offer, Problem) or offer.group.prompt.number in taken:
            return offer
        try:
            version = _version(config, offer, versions)
        except Problem as problem:
            return problem
        named = offer.group.sampled_by(lineage=version.lineage, step=version.step, digest=version.digest)
        return replace(offer, group=named)

    return [name(p) for p in prepared]


def _version(config: RunConfig, offer: Offer, versions: Sequence[pb.VersionInfo]) -> pb.Version:
    """The published version that sampled the group: one that its batch may hold, and the one that the client names.

    Args: versions: of the run, ascending by step and lineage.

    Raises: Problem version-unknown, version-mismatch.
    """
    claim, number = offer.claim, offer.group.prompt.number
    newest = {v.version.step: v.version for v in versions}
    steps = [step for step in allowed_steps(config, number) if claim.step in (None, step)]
    published = [newest[step] for step in steps if step in newest]
    if not published:
        held = f"{versions[0].version.step} to {versions[-1].version.step}" if versions else "none"
        detail = f"version {_span(steps)} is not published; retained: {held}"
        raise field_problem("version-unknown", "version", detail)
    fitting = [v for v in published if claim.digest in (None, v.digest) and claim.lineage in (None, v.lineage)]
    if not fitting:
        given = ", ".join(f"{name} {value}" for name, value in claim if name != "step" and value is not None)
        expected = "; ".join(f"step {v.step} has digest {v.digest}, lineage {v.lineage}" for v in published[-3:])
        raise field_problem("version-mismatch", "version", f"got {given} for group {number}; {expected}")
    return fitting[-1]


def allowed_steps(config: RunConfig, number: int) -> range:
    """Policy steps whose samples the batch of this group may hold."""
    batch = config.batch_of(number)
    first = config.version_for(batch)
    return range(first, (first if config.max_lag is None else batch) + 1)


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def sampled_group(tokenizer: Tokenizer, config: RunConfig, item: SampledGroup) -> IngestedGroup:
    """The item as a group, without the name of its version. Raises: Problem with what the run does not allow."""
    number = checked_number(config, item.number)
    steps = allowed_steps(config, number)
    if item.version.step is not None and item.version.step not in steps:
        lag = f"lag {config.lag}" if config.max_lag is None else f"max_lag {config.max_lag}"
        raise field_problem(
            "version-mismatch",
            "version/step",
            f"got {item.version.step}; group {number} belongs to batch {config.batch_of(number)}, whose tokens are of version "
            f"{_span(steps)} ({lag})",
        )
    if len(item.samples) != config.samples_per_prompt:
        raise field_problem(
            "invalid-request",
            "samples",
            f"got {len(item.samples)}; the run's samples_per_prompt is {config.samples_per_prompt}",
        )
    sampling = SamplingParams(
        temperature=item.sampling.temperature,
        max_tokens=item.sampling.max_tokens or max(len(s.token_ids) for s in item.samples),
        top_p=item.sampling.top_p,
        top_k=item.sampling.top_k,
        min_p=item.sampling.min_p,
    )
    check_distribution(config, sampling)
    _check_ids(tokenizer, item.prompt_token_ids, "prompt_token_ids")
    prompt = PromptItem(
        number=number,
        token_ids=tuple(item.prompt_token_ids),
        n=config.samples_per_prompt,
        sampling=sampling,
        reward=reward_spec(config, item.reward),
        prompt_id=item.prompt_id or "",
        metadata=item.metadata,
    )
    for index, sample in enumerate(item.samples):
        _check_sample(tokenizer, config, prompt, sample, f"samples/{index}")
    return IngestedGroup(
        prompt=prompt,
        trajectories=tuple(_trajectory(config.run, prompt, item, steps[0], i) for i in range(len(item.samples))),
        rewards=tuple(_known_rewards(tokenizer, prompt.reward, s) for s in item.samples),
    )


def _check_sample(tokenizer: Tokenizer, config: RunConfig, prompt: PromptItem, sample: Sample, where: str) -> None:
    """Raises: Problem."""
    _check_ids(tokenizer, sample.token_ids, f"{where}/token_ids")
    num_tokens = len(sample.token_ids)
    if len(prompt.token_ids) + num_tokens > config.max_model_len or num_tokens > prompt.sampling.max_tokens:
        raise field_problem(
            "prompt-too-long",
            f"{where}/token_ids",
            f"{len(prompt.token_ids)} prompt tokens and {num_tokens} sampled ones exceed the run's max_model_len "
            f"{config.max_model_len} or max_tokens {prompt.sampling.max_tokens}",
        )
    if sample.top1 is not None:
        _check_ids(tokenizer, sample.top1, f"{where}/top1")
        if len(sample.top1) != num_tokens:
            raise field_problem("invalid-request", f"{where}/top1", f"got {len(sample.top1)} for {num_tokens} tokens")
    _check_logprobs(sample, f"{where}/{'logprobs' if sample.logprobs_f32 is None else 'logprobs_f32'}")
    given = sample.rewards.keys()
    if unexpected := given - (set() if prompt.reward.mode == EXACT_MATCH else set(prompt.reward.sources)):
        raise field_problem(
            "reward-source",
            f"{where}/rewards",
            f"got {', '.join(sorted(unexpected))}; the gateway grades itself"
            if prompt.reward.mode == EXACT_MATCH
            else f"got {', '.join(sorted(unexpected))}; reward/sources lists {', '.join(prompt.reward.sources)}",
        )


def _check_logprobs(sample: Sample, where: str) -> None:
    """Raises: Problem logprob-invalid. A number that is none never becomes another one."""
    raw = sample.logprobs_f32
    if raw is not None and len(raw) % 4:
        raise field_problem("logprob-invalid", where, f"{len(raw)} bytes are no whole number of float32")
    logprobs_S = _logprobs(sample)
    if len(logprobs_S) != len(sample.token_ids):
        raise field_problem(
            "logprob-invalid", where, f"got {len(logprobs_S)} logprobs for {len(sample.token_ids)} tokens"
        )
    bad = np.flatnonzero(~np.isfinite(logprobs_S) | (logprobs_S > 0))
    if len(bad):
        problem = field_problem(
            "logprob-invalid",
            where,
            f"{len(bad)} of {len(logprobs_S)} are not finite or above 0, the first is {logprobs_S[bad[0]]} at {bad[0]}",
        )
        problem.extra["nonfinite"] = int((~np.isfinite(logprobs_S)).sum())
        raise problem


def _logprobs(sample: Sample) -> np.ndarray:
    """[S] float32."""
    if sample.logprobs_f32 is not None:
        return float32_array(sample.logprobs_f32)
    # Beyond float32's range they become infinite, and are refused as such.
    with np.errstate(over="ignore"):
        return np.asarray(sample.logprobs, np.float64).astype(np.float32)


def _check_ids(tokenizer: Tokenizer, token_ids: Sequence[int], where: str) -> None:
    if (worst := max(token_ids)) >= tokenizer.vocab_size:
        raise field_problem(
            "token-out-of-range", where, f"token id {worst}; {tokenizer.model} has {tokenizer.vocab_size}, from 0"
        )


def _known_rewards(tokenizer: Tokenizer, spec: RewardSpec, sample: Sample) -> dict[str, float]:
    if spec.mode != EXACT_MATCH:
        return dict(sample.rewards)
    assert spec.answer is not None
    text = tokenizer.decode(sample.token_ids)
    if text is None:
        raise field_problem(
            "model-unavailable", "reward/mode", f"{tokenizer.model} has no tokenizer to compare text with"
        )
    return {EXACT_MATCH: exact_match(text, spec.answer)}


def _trajectory(run: str, prompt: PromptItem, item: SampledGroup, step: int, index: int) -> Trajectory:
    sample, group_id = item.samples[index], f"{run}.{prompt.number}"
    begin, num_sampled = len(prompt.token_ids), len(sample.token_ids)
    return Trajectory(
        trajectory_id=f"{group_id}.{index}",
        group_id=group_id,
        prompt_id=prompt.prompt_id or group_id,
        sample_index=index,
        run=run,
        seed=0,
        sampling=prompt.sampling,
        token_ids=np.asarray([*prompt.token_ids, *sample.token_ids], np.int32),
        logprobs=_logprobs(sample),
        top1=np.full(num_sampled, UNKNOWN_TOP1, np.int32) if sample.top1 is None else np.asarray(sample.top1, np.int32),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), (begin, num_sampled)),
        spans=(
            Span(start=0, end=begin, kind=SpanKind.PROMPT),
            Span(start=begin, end=begin + num_sampled, kind=SpanKind.SAMPLED, policy_step=step),
        ),
        finish_reason=FinishReason(sample.finish_reason),
        fingerprint="",
        sampler=item.sampler,
    )
