"""Groups that were sampled elsewhere, on their way into a run: a prompt, all its samples, and the rewards known already."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.wire.codec import encode_trajectory
from shared.wire.prompts import PromptItem, fingerprint
from shared.wire.types import SpanKind, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestedGroup:
    """One prompt with every sample of it. It enters a run generated, and is never dispatched."""

    prompt: PromptItem
    trajectories: tuple[Trajectory, ...]
    """In sample order, `prompt.n` of them, each with the same `sampler`."""
    rewards: tuple[Mapping[str, float], ...]
    """Per sample, by source; what is missing is awaited."""

    @property
    def sampler(self) -> str:
        return self.trajectories[0].sampler

    @property
    def fingerprint(self) -> str:
        """Equal for equal bodies. Ask before `sampled_by`: the version is not the body's."""
        digest = hashlib.sha256(fingerprint(self.prompt).encode())
        for trajectory, rewards in zip(self.trajectories, self.rewards, strict=True):
            digest.update(encode_trajectory(trajectory))
            digest.update(repr(sorted(rewards.items())).encode())
        return digest.hexdigest()[:32]

    def sampled_by(self, *, lineage: int, step: int, digest: str) -> IngestedGroup:
        """The same with the version's full name on every sampled token."""
        return replace(
            self,
            trajectories=tuple(
                replace(
                    t,
                    spans=tuple(
                        replace(s, lineage=lineage, policy_step=step, manifest_digest=digest)
                        if s.kind is SpanKind.SAMPLED
                        else s
                        for s in t.spans
                    ),
                )
                for t in self.trajectories
            ),
        )
