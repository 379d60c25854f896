"""A sample while it is generated: chunks in, one trajectory out. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from shared.wire.lifecycle import PendingGroup
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.pb import weight_sync_pb2 as ws
from shared.wire.prompts import PromptItem
from shared.wire.types import (
    FinishReason,
    Kv,
    Span,
    SpanKind,
    Trajectory,
    float32_array,
    int32_array,
)


class ProtocolViolation(Exception):
    """A replica sent what no replica may send; nothing of the chunk was taken."""


@dataclass(slots=True, kw_only=True)
class PartialSample:
    """Tokens received so far, from one or several replicas in turn. S counts sampled tokens."""

    trajectory_id: str
    sample_index: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """float32, one array per chunk; together [S]."""
    top1: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """Of the sampled tokens, counted from the first of them; neighbours of one version are one span."""
    replicas: list[str] = field(default_factory=list)
    fingerprint: str = ""
    finish_reason: FinishReason | None = None

    @property
    def last_step(self) -> int:
        """Policy step that sampled the last token; -1 before the first one."""
        return self.spans[-1].policy_step if self.spans else -1

    def can_go_on(self, version: ws.Version, *, is_pinned: bool) -> bool:
        """Whether this version may sample the next token: it sampled all before it or, not pinned, comes behind those."""
        return all(
            s.lineage == version.lineage
            and (s.manifest_digest == version.digest if s.policy_step == version.step else not is_pinned)
            and s.policy_step <= version.step
            for s in self.spans
        )

    def add(
        self, chunk: pb.GenerateChunk, *, by: ws.Version, fingerprint: str, version: ws.Version, replica: str,
        is_pinned: bool = True,
    ) -> None:  # fmt: skip
        """Appends a chunk. Raises ProtocolViolation with what is wrong with it.

        Args:
            by, fingerprint: version that sampled it and numerics, as its message says.
            version: that samples every token or, not pinned, the next one, with later ones behind it.
        """
        token_ids = int32_array(chunk.token_ids).tolist()
        logprobs = float32_array(chunk.logprobs)
        top1 = int32_array(chunk.top1).tolist()
        self._check(chunk, token_ids, logprobs, top1, by, fingerprint, version, is_pinned)
        start = len(self.token_ids)
        if token_ids:
            self.token_ids += token_ids
            self.logprobs.append(logprobs)
            self.top1 += top1
            self._stamp(Span(
                start=start, end=start + len(token_ids), kind=SpanKind.SAMPLED, lineage=by.lineage,
                policy_step=by.step, manifest_digest=by.digest, kv=Kv(chunk.kv),
            ))  # fmt: skip
            self.fingerprint = fingerprint
            if replica not in self.replicas:
                self.replicas.append(replica)
        if chunk.finish_reason:
            self.finish_reason = FinishReason(chunk.finish_reason)

    def _check(
        self, chunk: pb.GenerateChunk, token_ids: list[int], logprobs: np.ndarray, top1: list[int], by: ws.Version,
        fingerprint: str, version: ws.Version, is_pinned: bool,
    ) -> None:  # fmt: skip
        problem = ""
        total = len(self.token_ids) + len(token_ids)
        if self.finish_reason is not None:
            problem = "a chunk behind the end"
        elif chunk.start != len(self.token_ids):
            problem = f"tokens start at {chunk.start}, expected {len(self.token_ids)}"
        elif by != version and (is_pinned or by.step <= version.step):
            problem = f"tokens of version {_name(by)}, asked for {_name(version)}"
        elif not self.can_go_on(by, is_pinned=is_pinned):
            problem = f"tokens of version {_name(by)} behind those of step {self.last_step}"
        elif not len(token_ids) == len(logprobs) == len(top1):
            problem = f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(top1)} top-1 ids"
        elif not np.isfinite(logprobs).all():
            problem = "a logprob that is not finite"
        elif total > self.max_tokens:
            problem = f"{total} tokens, at most {self.max_tokens} were asked for"
        elif self.fingerprint and token_ids and fingerprint != self.fingerprint:
            problem = f"numerics {fingerprint!r} behind tokens of {self.fingerprint!r}"
        elif token_ids and chunk.kv not in set(Kv):
            problem = f"kv is {chunk.kv!r}"
        elif not token_ids and not chunk.finish_reason:
            problem = "an empty chunk"
        elif chunk.finish_reason not in ("", FinishReason.STOP, FinishReason.LENGTH):
            problem = f"ended with {chunk.finish_reason!r}"
        elif chunk.finish_reason and not total:
            problem = "ended without a token"
        if problem:
            raise ProtocolViolation(f"trajectory {self.trajectory_id}: {problem}")

    def _stamp(self, span: Span) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and replace(span, start=last.start) == replace(last, end=span.end):
            self.spans[-1] = replace(last, end=span.end)
        else:
            self.spans.append(span)

    def trajectory(self, group: PendingGroup, *, run: str, seed: int) -> Trajectory:
        """The finished record: the prompt is the first span, every sampled token is trainable."""
        assert self.finish_reason is not None
        prompt = group.prompt
        num_prompt = len(prompt.token_ids)
        spans = [Span(start=0, end=num_prompt, kind=SpanKind.PROMPT)]
        spans += [replace(s, start=s.start + num_prompt, end=s.end + num_prompt) for s in self.spans]
        mask = np.zeros(num_prompt + len(self.token_ids), dtype=np.uint8)
        mask[num_prompt:] = 1
        named = prompt.prompt_id if isinstance(prompt, PromptItem) else ""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=group.group_id,
            prompt_id=named or group.group_id,
            sample_index=self.sample_index,
            run=run,
            seed=seed,
            sampling=prompt.sampling,
            token_ids=np.array([*prompt.token_ids, *self.token_ids], dtype=np.int32),
            logprobs=np.concatenate(self.logprobs),
            top1=np.array(self.top1, dtype=np.int32),
            loss_mask=mask,
            spans=tuple(spans),
            finish_reason=self.finish_reason,
            fingerprint=self.fingerprint,
            replicas=tuple(self.replicas),
        )


def _name(version: ws.Version) -> str:
    return f"{version.lineage}/{version.step}/{version.digest[:12]}"
