"""What must not reach the weights, and what a step does when nothing is left: dynamic sampling, missing numbers, empty parts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer import report
from services.trainer.admission import NonfiniteReward
from services.trainer.learner import Learner
from shared.metrics import names
from shared.metrics.server import value
from shared.wire.algorithm import AlgorithmConfig, Filter
from shared.wire.types import Group
from shared.wire.weights import Sent
from tests.integration.algorithm_testing import Rig
from tests.integration.trainer_testing import digest_of, masters, publish

pytest_plugins = ("tests.integration.trainer_fixtures",)

ANY = AlgorithmConfig(filters=(Filter(on="veto", low=1e-4, high=1e4),))


def with_rewards(group: Group, rewards: list[float]) -> Group:
    return replace(
        group, trajectories=tuple(replace(t, reward=r) for t, r in zip(group.trajectories, rewards, strict=True))
    )


def with_logprob(group: Group, sample: int, number: float) -> Group:
    """The second trainable token of one sample has this recorded logprob."""
    trajectories = list(group.trajectories)
    logprobs = trajectories[sample].logprobs.copy()
    logprobs[-1] = number
    trajectories[sample] = replace(trajectories[sample], logprobs=logprobs)
    return replace(group, trajectories=tuple(trajectories))


def trained(rig: Rig, learner: Learner, groups: list[Group]) -> tuple[dict[str, object], str]:
    batch = rig.batch(learner, groups=groups)
    metrics = learner.train(batch, learner.score(batch)).metrics
    return metrics, digest_of(publish(learner, 1))


MIXED = [1.0, 0.0, 0.5, 0.25]


def dynamic(most: int = 0) -> AlgorithmConfig:
    return AlgorithmConfig(dynamic_sampling=True, dynamic_groups=most)


def test_dynamic_sampling_trains_the_first_groups_that_can_teach(rig: Rig) -> None:
    rewards = [[1.0] * 4, MIXED, MIXED[::-1], MIXED]
    groups = [with_rewards(g, r) for g, r in zip(rig.groups[0], rewards, strict=True)]
    learner = rig.learner(dynamic(2))
    batch = rig.batch(learner, groups=groups)
    assert [g.prompt_number for g in batch.groups] == [1, 2]
    assert [g.prompt_number for g in batch.uniform] == [0]
    assert [g.prompt_number for g in batch.surplus] == [3]
    assert [g.prompt_number for g in batch.leased] == [0, 1, 2, 3], "the step consumes and archives all of them"
    metrics, digest = trained(rig, learner, groups)
    assert (metrics["groups"], metrics["uniform_groups"], metrics["surplus_groups"]) == (2, 1, 1)
    assert metrics["reward_mean"] == pytest.approx((1 + 3 * np.mean(MIXED)) / 4), "of all that was sampled"
    # Arrival and what the others hold have no part in it.
    other = [with_rewards(groups[0], [0.0] * 4), *groups[1:3], with_rewards(groups[3], [0.0] * 4)]
    _, again = trained(rig, rig.learner(dynamic(2)), other[::-1])
    assert again == digest


def test_groups_that_teach_nothing_do_not_dilute_those_that_do(rig: Rig) -> None:
    groups = [with_rewards(g, r) for g, r in zip(rig.groups[0], [[1.0] * 4, MIXED, [0.0] * 4, MIXED], strict=True)]
    dense, sparse = (trained(rig, rig.learner(a), groups)[0] for a in (dynamic(), AlgorithmConfig()))
    assert float(dense["grad_norm"]) == pytest.approx(2 * float(sparse["grad_norm"]), rel=1e-3)  # type: ignore[arg-type]


def test_a_batch_without_any_such_group_is_a_step_that_is_counted_and_changes_nothing(rig: Rig) -> None:
    learner = rig.learner(dynamic())
    before = masters(learner)
    batch = rig.batch(learner, groups=[with_rewards(g, [1.0] * 4) for g in rig.groups[0]])
    result = learner.train(batch, learner.score(batch))
    assert (result.metrics["groups"], result.metrics["uniform_groups"], result.metrics["optimizer_steps"]) == (0, 4, 0)
    assert all(torch.equal(before[n], w) for n, w in masters(learner).items())
    run = {"run": "uniform"}
    row = exported(learner, run["run"], batch, result)
    assert row["reward_mean"] == 1
    assert value(names.OPTIMIZER_STEPS_SKIPPED, **run) == 1
    assert value(names.UNTRAINED_GROUPS, **run, reason="uniform") == 4


def exported(learner: Learner, run: str, batch, result) -> dict:  # type: ignore[no-untyped-def, type-arg]
    """Reports the step as the session does; the row."""
    report.count_mismatch(run, result)
    row = report.step_row(batch, result, version=learner.copies.current.version, sent=Sent(0, 0),
                          phases={"score": [0.0, 1.0]}, world_size=1)  # fmt: skip
    report.export(run, batch, result, row)
    return row


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [(AlgorithmConfig(), math.nan), (ANY, math.inf), (ANY, -math.inf)],
    ids=["one-forward", "filtered-up", "filtered-down"],
)
def test_a_recorded_logprob_that_is_no_number_rejects_its_trajectory_alone(
    rig: Rig, algorithm: AlgorithmConfig, number: float
) -> None:
    groups = [with_rewards(g, MIXED) for g in rig.groups[0]]
    digests = set()
    for reward in (0.0, 100.0):
        broken = with_logprob(with_rewards(groups[0], [reward, *MIXED[1:]]), 0, number)
        metrics, digest = trained(rig, rig.learner(algorithm, lag=0), [broken, *groups[1:]])
        digests.add(digest)
        assert (metrics["nonfinite_tokens"], metrics["rejected_trajectories"]) == (1, 1)
        assert (metrics["optimizer_steps"], metrics["tim"]["nonfinite"]) == (1, 1)  # type: ignore[index]
        assert math.isfinite(float(metrics["loss"]))  # type: ignore[arg-type]
    assert len(digests) == 1, "its reward is no baseline of its siblings"
    _, clean = trained(rig, rig.learner(algorithm, lag=0), groups)
    assert clean not in digests


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_and_never_read_as_zero(rig: Rig, number: float) -> None:
    group = with_rewards(rig.groups[0][0], [number, *MIXED[1:]])
    with pytest.raises(NonfiniteReward, match=r"demo\.0\.0 has reward"):
        rig.batch(rig.learner(), groups=[group])


def test_a_micro_batch_of_rejected_trajectories_is_a_zero_that_is_connected(rig: Rig) -> None:
    """Every micro-batch still runs its backward; the others' gradients are as if it were not there."""
    learner = rig.learner(ANY, lag=0, micro_batch_tokens=1)
    broken = rig.groups[0][0]
    for sample in range(4):
        broken = with_logprob(broken, sample, math.nan)
    groups = [broken, *rig.groups[0][1:]]
    assert len(rig.batch(learner, groups=groups).mini_steps[0].micro_batches) == 16, "one for each trajectory"
    metrics, digest = trained(rig, learner, groups)
    assert (metrics["rejected_trajectories"], metrics["optimizer_steps"]) == (4, 1)
    other = with_rewards(broken, MIXED[::-1])
    assert trained(rig, rig.learner(ANY, lag=0, micro_batch_tokens=1), [other, *groups[1:]])[1] == digest


@pytest.mark.parametrize("mini_steps", [1, 4])
def test_a_mini_step_of_rejected_trajectories_is_skipped_and_the_others_are_taken(rig: Rig, mini_steps: int) -> None:
    learner = rig.learner(replace(ANY, mini_steps=mini_steps), lag=0)
    broken = rig.groups[0][1]
    for sample in range(4):
        broken = with_logprob(broken, sample, math.inf)
    metrics, _ = trained(rig, learner, [rig.groups[0][0], broken, *rig.groups[0][2:]])
    taken = [m["is_taken"] for m in metrics["mini_steps"]]  # type: ignore[attr-defined]
    assert taken == ([True] if mini_steps == 1 else [True, False, True, True])
    assert metrics["optimizer_steps"] == sum(taken)


def test_every_table_is_exported_and_what_the_last_step_lacks_is_gone(rig: Rig) -> None:
    learner, run = rig.learner(replace(ANY, mini_steps=2)), "tables"
    for step in (0, 1):
        batch = rig.batch(learner, step)
        result = learner.train(batch, learner.score(batch))
        publish(learner, step + 1)
        row = exported(learner, run, batch, result)
        own = row["mismatch"]["same_version"]
        assert value(names.MISMATCH, run=run, series="same_version", staleness="all", statistic="equal_fraction") == 1
        for series in ("same_version", "correction"):
            for bucket, table in (("all", row["mismatch"][series]), *row["mismatch"][f"{series}_by_staleness"].items()):
                for name, number in table.items():
                    if isinstance(number, float | int):
                        labels = {"run": run, "series": series, "staleness": bucket, "statistic": name}
                        assert value(names.MISMATCH, **labels) == number, labels
        assert own["top1_flip"] == own["top1_lost"] == own["ulp_max"] == 0
        (bucket,) = row["mismatch"]["correction"]["accumulated"]
        labels = {"run": run, "statistic": "sum_k3_mean", "length": "up to 64"}
        assert value(names.ACCUMULATED_MISMATCH, **labels) == bucket["sum_k3_mean"]
    of = {"run": run, "series": "correction", "statistic": "tokens"}
    assert (value(names.MISMATCH, **of, staleness="0"), value(names.MISMATCH, **of, staleness="1")) == (0, 64)
    assert value(names.EQUAL_FRACTION, run=run) == 1
    assert value(names.UNAUDITED_TOKENS, run=run, reason="share") == 0
    assert value(names.CLIP, run=run, statistic="clip_high") == row["clip"]["clip_high"]
    for series, block, name in (("drift", "drift", "abs_max"), ("staleness", "staleness", "k3"),
                                ("correction", "correction", "weight_seq_std")):  # fmt: skip
        assert value(names.MISMATCH, run=run, series=series, staleness="all", statistic=name) == row[block][name] > 0


@pytest.mark.parametrize("shift", [1, -1])
def test_logprobs_shifted_by_one_token_show(rig: Rig, shift: int) -> None:
    """The alignment proves itself: any other one is far off."""
    learner = rig.learner(lag=0)
    batch = rig.batch(learner)
    shifted = replace(batch, rollout_T=batch.rollout_T.roll(shift))
    mismatch = learner.train(shifted, learner.score(shifted)).mismatch
    assert mismatch.differing_tokens > 0.9 * batch.num_tokens
    assert mismatch.delta.abs_mean > 0.3


def test_a_mismatch_put_into_a_real_batch_is_reported_apart_from_its_staleness(rig: Rig) -> None:
    learner = rig.learner(ANY)
    first = rig.batch(learner)
    learner.train(first, learner.score(first))
    publish(learner, 1)
    batch = rig.batch(learner, 1)
    clean = learner.score(batch)
    noise = 0.02 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    top1 = batch.top1_T.clone()
    top1[[3, 14, 15]] += 1
    dirty = replace(batch, rollout_T=batch.rollout_T + noise, top1_T=top1)
    assert clean.sampled is not None
    assert clean.proximal_T is not None
    injected = (clean.sampled.logprob_T - dirty.rollout_T).double()
    seen = (clean.proximal_T - dirty.rollout_T).double()
    metrics = learner.train(dirty, learner.score(dirty)).metrics
    own, correction = metrics["mismatch"]["same_version"], metrics["mismatch"]["correction"]
    for table, delta in ((own, injected), (correction, seen)):
        assert table["k1"] == pytest.approx(-float(delta.mean()), abs=1e-7)
        assert table["k3"] == pytest.approx(float((delta.expm1() - delta).mean()), rel=1e-4)
        assert table["abs_max"] == pytest.approx(float(delta.abs().max()), rel=1e-5)
        assert table["ratio_error"] == pytest.approx(float(delta.expm1().abs().mean()), rel=1e-4)
    assert metrics["tim"]["abs_max"] == own["abs_max"] < correction["abs_max"]
    assert metrics["tim"]["top1_flips"] == 3
    assert own["top1_flip"] == 3 / batch.num_tokens
    assert metrics["tim"]["equal_fraction"] == own["equal_fraction"] < 0.1
