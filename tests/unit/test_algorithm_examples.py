"""The reference's worked examples in float64: weights, filters, losses, advantages, KL and metrics, to nine digits."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.advantage import advantages, shape_overlong
from services.trainer.correction import importance_weights, k3, mean_weight
from services.trainer.filters import KINDS, accept, coin_kl, keep_tokens, seq_max, seq_mean, seq_sum
from services.trainer.loss import kl_penalty, policy_loss, token_scale
from services.trainer.mismatch import divergence
from services.trainer.mismatch_metrics import clips_by_tim, describe
from shared.wire.algorithm import AlgorithmConfig, Filter

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())
MASK = torch.tensor(EXAMPLES["B0"]["mask"]).bool()
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 1])
INF = math.inf


def flat(rows: list[list[float]]) -> Tensor:
    return double(rows)[MASK]


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Any, expected: Any, rtol: float = 1e-9) -> None:
    got = got if isinstance(got, Tensor) else double(got)
    torch.testing.assert_close(got.double(), double(expected) if not isinstance(expected, Tensor) else expected,
                               rtol=rtol, atol=1e-12)  # fmt: skip


TRAIN, ROLLOUT, CURRENT, ADVANTAGE = (flat(EXAMPLES["B0"][k]) for k in ("train_old", "rollout", "current", "adv"))
DELTA = TRAIN - ROLLOUT


def weights(segment: Tensor = SEQUENCE, **config: Any) -> Tensor:
    return importance_weights(TRAIN, ROLLOUT, SEQUENCE, segment, AlgorithmConfig(**config))


def first_of_each(per_token: Tensor) -> Tensor:
    assert torch.equal(per_token, per_token[[0, 0, 0, 0, 4, 4, 4]]), "one weight covers the trajectory"
    return per_token[[0, 4]]


def test_x1_weights() -> None:
    x = EXAMPLES["X1_weights"]
    close(weights(), flat(x["token_tis_C2"]))
    close(weights(tis_floor=0.5, outside="mask"), flat(x["icepop_05_2"]))
    close(weights(tis_floor=0.8), flat(x["clip_08_2"]))
    close(first_of_each(weights(weight="sequence", tis_cap=INF)), x["seq_prod"])
    close(first_of_each(weights(weight="sequence")), x["seq_tis_C2"])
    close(first_of_each(weights(weight="geometric")), x["geo"])
    assert weights(weight="sequence", tis_cap=3.0, outside="mask").all(), "masked IS with a cap of 3 keeps both"
    assert weights(weight="sequence", outside="mask").tolist()[4:] == [0, 0, 0]


def test_x1_batch_normalisation() -> None:
    x = EXAMPLES["X1_weights"]
    factor = mean_weight(weights(), SEQUENCE, "token")
    close(factor, x["batchnorm_token_factor"])
    close(weights() / factor, flat(x["batchnorm_token"]))
    sequence = weights(weight="sequence")
    close(first_of_each(sequence / mean_weight(sequence, SEQUENCE, "sequence")), x["batchnorm_seq"])


def test_a_segment_is_the_geometric_mean_of_its_turn() -> None:
    got = weights(torch.tensor([0, 0, 1, 1, 2, 2, 2]), weight="segment", tis_cap=INF)
    mean = [(0.05 - 0.3) / 2] * 2 + [0.45] * 2 + [0.25] * 3
    close(got, double(mean).exp())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_x2_statistics(kind: str) -> None:
    # The reference states k1 as -delta; bounds here act on the ratio, so the statistic is +delta.
    sign = -1 if kind == "k1" else 1
    x = EXAMPLES["X2_K"][kind]
    token = sign * KINDS[kind](DELTA)
    close(token, flat(x["tok"]))
    for name, aggregate in (("sum", seq_sum), ("mean", seq_mean), ("max", seq_max)):
        close(aggregate(token, SEQUENCE, 2), x[name])
    close(seq_sum(k3(-DELTA), SEQUENCE, 2), EXAMPLES["X2_K"]["k3_reverse"]["sum"])


@pytest.mark.parametrize("rule", EXAMPLES["X2_rejections"], ids=lambda r: r["on"])
def test_x2_rejections_keep_the_first_sequence_only(rule: dict[str, Any]) -> None:
    config = AlgorithmConfig(filters=(Filter(**rule),))
    assert accept(TRAIN, ROLLOUT, SEQUENCE, 2, config).accepted_N.tolist() == [True, False]


def test_x3_and_x18_metrics() -> None:
    x = EXAMPLES["X3_metrics"]
    raw = describe(TRAIN, ROLLOUT, DELTA.exp(), ADVANTAGE, SEQUENCE)
    applied = describe(TRAIN, ROLLOUT, weights(), ADVANTAGE, SEQUENCE)
    names = {
        "k1": "kl_k1", "k3": "k3_kl", "ppl_train": "training_ppl", "ppl_rollout": "rollout_ppl", "ppl_ratio": "ppl_ratio",
        "chi2_token": "chi2_token", "chi2_seq": "chi2_seq", "ess_raw": "ess_raw", "prob_diff_max": "prob_diff_max",
        "prob_diff_mean": "prob_diff_mean", "prob_diff_std": "prob_diff_std_ddof1", "pearson": "pearson",
        "mult_prob_error": "mult_prob_error", "js": "js_nemo", "corr_token": "corr_delta_adv",
        "skew_positive": "contrib_pos", "skew_negative": "contrib_neg", "skew_index": "skew_index",
        "skew_fisher": "fisher_skew",
    }  # fmt: skip
    for ours, theirs in names.items():
        assert raw[ours] == pytest.approx(x[theirs], rel=1e-9), ours
    assert (raw["log_ppl_diff_max"], raw["log_ppl_diff_min"]) == pytest.approx(x["log_ppl_diff"])
    assert applied["ess_applied"] == pytest.approx(x["ess_tis"], rel=1e-9)
    assert applied["ess_raw"] == raw["ess_raw"], "what was applied does not hide what there is"
    # Two trajectories, so a correlation of +-1.
    assert raw["corr_seq"] == pytest.approx(-1)
    (bucket,) = raw["accumulated"]
    assert bucket["trajectories"] == 2
    assert bucket["abs_sum_mean"] == pytest.approx(0.7)
    assert bucket["max_prefix"] == pytest.approx(0.8)


def test_x6_ratios_multiply() -> None:
    x = EXAMPLES["X6_losses"]
    proximal, behaviour = (CURRENT - TRAIN).exp(), (CURRENT - ROLLOUT).exp()
    close(proximal, flat(x["r_train"]))
    close(behaviour, flat(x["r_behav"]))
    assert float((proximal * DELTA.exp() - behaviour).abs().max()) <= max(2 * x["identity_maxerr"], 1e-15)


def test_x18_zero_centred_contributions() -> None:
    z = flat(EXAMPLES["X3_metrics"]["zero_centred_contrib"])
    got = describe(TRAIN, ROLLOUT, DELTA.exp(), ADVANTAGE, SEQUENCE)
    close(ADVANTAGE * DELTA.expm1(), z)
    assert got["skew_of_positive_advantages"] == pytest.approx(float(z[ADVANTAGE > 0].sum()), rel=1e-9)
    assert got["skew_of_negative_advantages"] == pytest.approx(float(z[ADVANTAGE < 0].sum()), rel=1e-9)


def test_x6_and_x7_losses_and_gradients() -> None:
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
    cases = {
        "recompute": AlgorithmConfig(mode="recompute", tis_cap=None, **clip),
        "decoupled_raw": AlgorithmConfig(tis_cap=INF, **clip),
        "decoupled_tis2": AlgorithmConfig(**clip),
        "decoupled_raw_unclipped": AlgorithmConfig(tis_cap=INF, clip_low=1.0, clip_high=INF),
        "bypass_no_dualclip": AlgorithmConfig(preset="bypass_ppo_clip", **clip),
        "bypass_dualclip3": AlgorithmConfig(mode="bypass", tis_cap=None, dual_clip=3.0, **clip),
        "bypass_unclipped": AlgorithmConfig(mode="bypass", tis_cap=None, clip_low=1.0, clip_high=INF),
        "bypass_reinforce_tis2": AlgorithmConfig(loss="reinforce"),
    }
    for name, config in cases.items():
        loss, grad = graded(config)
        close(loss, EXAMPLES["X6_losses"][name]["token_mean_loss"])
        close(grad * 7, flat(EXAMPLES["X6_losses"][name]["grad_logp_times_N"]))
    # Only its gradient distinguishes the live ratio from the unclipped surrogate, and it does not.
    ratio = graded(AlgorithmConfig(loss="reinforce", mode="ratio_gradient", tis_cap=None))
    assert all(torch.equal(a, b) for a, b in zip(ratio, graded(cases["bypass_unclipped"]), strict=True))


def test_x6_clips_that_the_mismatch_causes_or_hides() -> None:
    got = clips_by_tim(CURRENT, TRAIN, ROLLOUT, ADVANTAGE, 0.2, 0.2)
    flips = int(flat(EXAMPLES["X6_losses"]["clip_flip_by_tim"]).sum())
    assert got == {"clip_caused": flips / 7, "clip_missed": 0}
    assert clips_by_tim(CURRENT, ROLLOUT, TRAIN, ADVANTAGE, 0.2, 0.2) == {"clip_caused": 0, "clip_missed": flips / 7}


def graded(config: AlgorithmConfig, **changes: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the reference batch, or of the tensors given."""
    batch: dict[str, Any] = {
        "logprob_T": CURRENT, "proximal_T": TRAIN, "rollout_T": ROLLOUT, "advantage_T": ADVANTAGE,
        "accepted_T": torch.ones(7, dtype=torch.bool), "scale_T": torch.full((7,), 1 / 7, dtype=torch.float64),
        "sequence_T": SEQUENCE, "segment_T": SEQUENCE, **changes,
    }  # fmt: skip
    batch["logprob_T"] = batch["logprob_T"].clone().requires_grad_()
    loss = policy_loss(config, **batch).loss
    return loss.detach(), torch.autograd.grad(loss, batch["logprob_T"])[0]


def one_sequence(log_ratio: list[float], advantage: float, logprob: float = 0.0) -> dict[str, Any]:
    """One trajectory whose ratio to the sampler is given."""
    n, current = len(log_ratio), double([logprob] * len(log_ratio))
    return {
        "logprob_T": current, "proximal_T": current, "rollout_T": current - double(log_ratio),
        "advantage_T": double([advantage] * n), "accepted_T": torch.ones(n, dtype=torch.bool),
        "scale_T": torch.full((n,), 1 / n, dtype=torch.float64),
        "sequence_T": torch.zeros(n, dtype=torch.int64), "segment_T": torch.zeros(n, dtype=torch.int64),
    }  # fmt: skip


def test_x5_dual_clip() -> None:
    x = EXAMPLES["X5_clip_table"]
    config = AlgorithmConfig(mode="bypass", tis_cap=None, dual_clip=x["dual_clip"]["c"])
    for advantage, ratio, loss, grad in x["dual_clip"]["rows"]:
        got = graded(config, **one_sequence([math.log(ratio)], advantage))
        close(torch.stack([got[0], got[1][0]]), [loss, grad])


def test_x8_aggregations() -> None:
    x = EXAMPLES["X8_aggregation"]
    losses, sequence = double([1, 2, 3, 4, 10, 20]), SEQUENCE[[0, 1, 2, 3, 4, 5]]

    def total(name: str, num_sequences: int = 2, length: int | None = None) -> float:
        return float((losses * token_scale(name, sequence, num_sequences, length).double()).sum())

    for name in ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean"):
        assert total(name) == pytest.approx(x[name], rel=1e-7)
    norm = x["seq_mean_token_sum_norm"]
    assert total("seq_mean_token_sum_norm", length=norm["length"]) == pytest.approx(norm["value"])
    for name, value in x["three_sequences"].items():
        assert total(name, num_sequences=3) == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_x9_advantages(name: str) -> None:
    x = EXAMPLES["X9_advantages"]
    n = len(x["reward"])
    got = advantages(
        name,
        reward_N=double(x["reward"]),
        group_N=torch.zeros(n, dtype=torch.int64),
        num_tokens_N=torch.ones(n, dtype=torch.int64),
        accepted_N=torch.ones(n, dtype=torch.bool),
    )
    high, low = x[name]
    close(got, [high if r else low for r in x["reward"]], rtol=1e-8)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_x20_the_rejected_sibling_leaves_no_trace(name: str) -> None:
    x = EXAMPLES["X20_group_leak"]
    got = advantages(
        name,
        reward_N=double(x["reward"]),
        group_N=torch.zeros(2, dtype=torch.int64),
        num_tokens_N=torch.ones(2, dtype=torch.int64),
        accepted_N=torch.tensor(x["accepted"]),
    )
    assert got.tolist() == x["advantage"]


def test_x10_gspo() -> None:
    x = EXAMPLES["X10_gspo"]
    config = AlgorithmConfig(preset="gspo")
    for side, advantage in (("positive", 1.0), ("negative", -1.0)):
        loss, grad = graded(config, **one_sequence(x["log_ratio"], advantage))
        close(loss, x[side]["loss"])
        close(grad, [x[side]["grad"]] * 4, rtol=1e-8)


def test_x11_cispo() -> None:
    x = EXAMPLES["X11_cispo"]
    config = AlgorithmConfig(loss="cispo", mode="bypass", tis_cap=None, clip_high=x["clip_high"])
    loss, grad = graded(config, **one_sequence([math.log(x["ratio"])], x["advantage"], x["logprob"]))
    close(loss, x["loss"])
    close(grad, [x["grad"]])


def test_x12_kl_values_and_logit_gradients() -> None:
    x = EXAMPLES["X12_kl"]
    p, q = double(x["p"]), double(x["q"])

    def expectation(kind: str, sampler: Tensor, weigh: bool = False) -> tuple[float, Tensor]:
        logits = p.log().requires_grad_()
        logprob = logits.log_softmax(0)
        penalty = kl_penalty(kind, logprob, q.log())
        value = (sampler * (p / sampler if weigh else 1) * penalty).sum()
        grad = torch.autograd.grad(value, logits)[0] if value.requires_grad else torch.zeros(3)
        return value.item(), grad

    for kind, value, grad in (("k1", "E_k1", "grad_k1"), ("k2", "E_k2", "grad_k2"), ("k3+", "E_k3", "grad_true")):
        got = expectation(kind, p)
        assert got[0] == pytest.approx(x[value], rel=1e-9)
        close(got[1], x[grad])
    mu = double(x["mu"])
    assert expectation("k3+", mu, weigh=True)[0] == pytest.approx(x["E_mu_weighted_k3"], rel=1e-9)
    assert expectation("k3+", mu)[0] == pytest.approx(x["E_mu_k3"], rel=1e-9)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_penalty("k3", p, q)


def test_x12_why_k3_has_the_value_of_one_direction_and_not_the_gradient_of_the_other() -> None:
    x = EXAMPLES["X12_kl"]
    p, q = double(x["p"]), double(x["q"])
    close((p * (p / q).log()).sum(), x["KL_pq"])
    close((q * (q / p).log()).sum(), x["KL_qp"])
    delta = p.log() - q.log()
    close((p * k3(-delta)).sum(), x["KL_pq"])
    close((p * k3(delta)).sum(), x["E_k3_wrong_orientation"])
    logits = p.log().requires_grad_()
    plain = (p * k3(q.log() - logits.log_softmax(0))).sum()
    # The gradient of plain k3 is that of KL(reference || policy), p - q; k3+ has that of the other direction.
    close(torch.autograd.grad(plain, logits)[0], x["grad_k3"])
    close(p - q, x["grad_k3"])


@pytest.mark.parametrize("x", EXAMPLES["X13_filters"], ids=lambda x: x["name"])
def test_x13_filters(x: dict[str, Any]) -> None:
    train, rollout = double([x["p_train"]]).log(), double([x["p_roll"]]).log()
    zero = torch.zeros(1, dtype=torch.int64)

    def kept(rule: Filter, advantage: float = 1.0) -> bool:
        return bool(keep_tokens(train, rollout, double([advantage]), zero, 1, AlgorithmConfig(filters=(rule,))))

    assert kept(Filter(on="kpop", high=0.1)) == x["kpop_01"]
    assert kept(Filter(on="ipo", high=0.1)) == x["ipo_01"]
    assert kept(Filter(on="dppo_tv", high=0.2), 1.0) == x["dppo_pos_02"]
    assert kept(Filter(on="dppo_tv", high=0.2), -1.0) == x["dppo_neg_02"]
    assert kept(Filter(on="token_k1", low=0.5, high=5.0)) == x["icepop_05_5"]
    veto = AlgorithmConfig(filters=(Filter(on="veto", low=1e-4, high=1e4),))
    assert bool(accept(train, rollout, zero, 1, veto).accepted_N) != x["veto_1e4"]
    p, q = train.exp(), rollout.exp()
    close(torch.maximum(coin_kl(p, q), coin_kl(q, p)), [x["bkl_max"]], rtol=1e-6)
    config = AlgorithmConfig(preset="decoupled_token_icepop")
    assert bool(importance_weights(train, rollout, zero, zero, config) > 0) == x["icepop_05_5"]


def test_x14_a_temperature_on_one_side_shows_in_the_mean_ratio() -> None:
    x = EXAMPLES["X14_support"]
    logits = double(x["logits"])
    raw, scaled = logits.log_softmax(0)[:1], (logits / x["temperature"]).log_softmax(0)[:1]
    close(raw, [x["raw"]])
    close(scaled, [x["scaled"]])
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    assert describe(scaled, raw, one, one, zero)["ratio_mean"] == pytest.approx(x["ratio"], rel=1e-9)
    assert describe(raw, scaled, one, one, zero)["ratio_mean"] == pytest.approx(x["reverse"], rel=1e-9)
    n = x["tokens"]
    cut = torch.full((n,), math.log(x["kept_mass"]), dtype=torch.float64)
    sequence = torch.zeros(n, dtype=torch.int64)
    config = AlgorithmConfig(weight="sequence")
    product = importance_weights(cut, torch.zeros_like(cut), sequence, sequence, config)
    close(product[0], x["product"])


def test_x15_overflow_and_x16_length() -> None:
    x = EXAMPLES["X15_overflow"]
    n = x["tokens"]
    zero, sequence = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)

    def weight(delta: float, **config: Any) -> float:
        return importance_weights(zero + delta, zero, sequence, sequence, AlgorithmConfig(**config))[0].item()

    assert weight(100.0) == 2.0
    assert weight(x["delta"], weight="sequence") == 2.0
    assert weight(-x["delta"], weight="sequence") == pytest.approx(x["sequence_down"], rel=1e-8)
    assert weight(-x["delta"], weight="geometric") == pytest.approx(x["geometric_down"], rel=1e-8)
    y = EXAMPLES["X16_length"]
    for length, product, keep, total in zip(y["lengths"], y["product"], y["seq_sum_k1_keep"], y["k3_sum"], strict=True):
        delta, sequence = torch.full((length,), y["delta"], dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
        origin = torch.zeros_like(delta)
        config = AlgorithmConfig(weight="sequence", tis_cap=INF, filters=(Filter(on="seq_sum_k1", low=0.5, high=2.0),))
        close(importance_weights(delta, origin, sequence, sequence, config)[0], product, rtol=1e-8)
        assert bool(accept(delta, origin, sequence, 1, config).accepted_N) == keep
        assert seq_sum(k3(delta), sequence, 1).item() == pytest.approx(total, rel=1e-6)
        assert seq_mean(k3(delta), sequence, 1).item() == pytest.approx(y["k3_mean"], rel=1e-6)


def test_x17_the_parts_of_the_off_policyness_add_up() -> None:
    x = EXAMPLES["X17_decomposition"]
    series = [double([x[k]]) for k in ("rollout", "train_sampled", "train_proximal", "current")]
    parts = [-divergence(new, old).k1 for old, new in itertools.pairwise(series)]
    close(parts, [x["tim"], x["staleness"], x["drift"]])
    close([sum(parts), -divergence(series[-1], series[0]).k1], [x["total"]] * 2)


def test_overlong_rewards_fall_over_the_last_buffer() -> None:
    length = torch.tensor([16383, 16384, 18432, 20480])
    got = shape_overlong(torch.ones(4, dtype=torch.float64), length, limit=20480, buffer=4096, factor=1.0)
    close(got, [1.0, 1.0, 0.5, 0.0])
