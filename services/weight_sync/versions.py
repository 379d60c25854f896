"""Which versions of which run exist, who may add to them, and which of them may go. No I/O."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field


class FencedError(Exception):
    """The caller's epoch is older than one already seen."""


class ConflictError(Exception):
    """This step exists in this lineage with another digest."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    run: str
    lineage: int
    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.run}/{self.lineage}-{self.step}-{self.digest[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What has to be known of a stored version to distribute it."""

    version: Version
    fingerprint: str
    is_exact: bool
    max_model_len: int
    num_probe_logprobs: int
    nbytes: int
    published_at: float
    """Unix seconds."""


@dataclass(slots=True)
class Versions:
    by_run: dict[str, dict[tuple[int, int], Published]] = field(default_factory=dict)
    """By run, then (lineage, step)."""
    epochs: dict[str, int] = field(default_factory=dict)
    oldest_steps: dict[str, int] = field(default_factory=dict)

    def fence(self, run: str, epoch: int) -> bool:
        """True when the epoch is a new one. Raises FencedError when it is an old one."""
        seen = self.epochs.get(run, 0)
        if epoch < seen:
            raise FencedError(
                f"run {run} belongs to epoch {seen}, got {epoch}: another trainer has taken over, or data_dir is that of "
                "an earlier run of this name"
            )
        self.epochs[run] = epoch
        return epoch > seen

    def holds(self, version: Version) -> bool:
        """Whether this version is published. Raises ConflictError when its step is, with another digest."""
        found = self.by_run.get(version.run, {}).get((version.lineage, version.step))
        if found and found.version != version:
            raise ConflictError(
                f"step {version.step} of run {version.run} exists in lineage {version.lineage} with digest "
                f"{found.version.digest}, got {version.digest}: publish it under a new lineage"
            )
        return found is not None

    def add(self, published: Published) -> None:
        """A version whose bytes are stored. Idempotent. Raises ConflictError."""
        v = published.version
        if not self.holds(v):
            self.by_run.setdefault(v.run, {})[v.lineage, v.step] = published

    def retain(self, run: str, oldest_step: int) -> None:
        """Steps below this one will not be asked for again. Never goes back."""
        self.oldest_steps[run] = max(oldest_step, self.oldest_steps.get(run, 0))

    def collect(self, pinned: Container[Version | None]) -> list[Version]:
        """Forgets, and returns, versions below their run's oldest step that are not pinned.

        The newest version of a run stays: evaluations without a version are pinned to it.
        """
        dropped = [
            p.version
            for run, versions in self.by_run.items()
            for p in versions.values()
            if p.version.step < self.oldest_steps.get(run, 0)
            and p.version not in pinned
            and p.version != self.newest(run)
        ]
        for v in dropped:
            del self.by_run[v.run][v.lineage, v.step]
        return dropped

    def list(self, run: str) -> list[Published]:
        """All versions of the run, ascending by (lineage, step)."""
        return [p for _, p in sorted(self.by_run.get(run, {}).items())]

    def resolve(self, run: str, step: int) -> Version | None:
        """The version of a step. A lineage begins where it forked, so from there on older lineages' steps are orphans."""
        versions = self.by_run.get(run, {})
        for lineage in sorted({l for l, _ in versions}, reverse=True):
            if (lineage, step) in versions:
                return versions[lineage, step].version
            if step >= min(s for l, s in versions if l == lineage):
                return None
        return None

    def newest(self, run: str) -> Version | None:
        versions = self.by_run.get(run)
        return versions[max(versions)].version if versions else None

    def newest_run(self) -> str:
        """The run that was published to last; empty before the first publish."""
        published = [p for versions in self.by_run.values() for p in versions.values()]
        return max(published, key=lambda p: p.published_at).version.run if published else ""

    def get(self, version: Version) -> Published | None:
        found = self.by_run.get(version.run, {}).get((version.lineage, version.step))
        return found if found and found.version == version else None
