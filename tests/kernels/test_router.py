"""Who chooses the experts: both routers, their records, and a mixture that replays them with and without recomputation."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shared.kernels import reference
from shared.kernels.router import check_record, overlap, route_sigmoid, route_softmax
from tests.kernels.cuda_testing import interpreted_ops, relative_error
from tests.kernels.kernel_testing import same_bits, wide
from tests.kernels.mixture_testing import DEEPSEEK, ROUTERS, SMALL, Mixture, bias_of, plain, records, route_by

EXPERTS, TOP_K, HIDDEN, _ = SMALL
WIDER = SMALL._replace(experts=24, top_k=8)
X19 = json.loads((Path(__file__).parents[1] / "data" / "algorithms_examples.json").read_text())["X19_replay"]


def test_x19_replayed_gates_come_from_the_live_logits_and_reach_the_router() -> None:
    for recorded, gates in (
        (None, X19["native_gates"]),
        (torch.tensor([X19["recorded"]]), X19["recorded_gates"]),
    ):
        logits = torch.tensor([X19["logits"]], dtype=torch.float64, requires_grad=True)
        experts, got = route_softmax(logits, 2, recorded)
        assert experts.tolist() == [X19["native" if recorded is None else "recorded"]]
        torch.testing.assert_close(got.detach(), torch.tensor([gates], dtype=torch.float64), rtol=2e-8, atol=0)
        first, second = (X19["logits"][e] for e in experts[0].tolist())
        assert got[0, 0].item() == pytest.approx(1 / (1 + math.exp(second - first)), rel=1e-14)
        torch.testing.assert_close(got, reference.route_softmax(logits, 2, recorded)[1], rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(got[0, 0], logits)
    torch.testing.assert_close(gradient[0], torch.tensor(X19["gradient"], dtype=torch.float64), rtol=3e-8, atol=1e-16)


def test_native_routing_is_that_of_transformers() -> None:
    x, bias = wide(64, HIDDEN), torch.linspace(-0.1, 0.1, 16)
    common = {"hidden_size": HIDDEN, "num_experts_per_tok": 4, "norm_topk_prob": True}
    qwen = Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=16, **common))
    deepseek = DeepseekV3TopkRouter(
        DeepseekV3Config(n_routed_experts=16, n_group=4, topk_group=2, routed_scaling_factor=2.5, **common)
    )
    with torch.no_grad():
        deepseek.e_score_correction_bias.copy_(bias)
        for router in (qwen, deepseek):
            router.weight.copy_(wide(16, HIDDEN, seed=1))
            logits, gates, experts = router(x)
            ours = (
                route_softmax(logits, 4)
                if router is qwen
                else route_sigmoid(logits, bias, 4, scale=2.5, num_groups=4, top_groups=2)
            )
            dense, expected = (torch.zeros(64, 16).scatter(1, e, g) for e, g in (ours, (experts, gates)))
            torch.testing.assert_close(dense, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ROUTERS)
@given(st.integers(1, 9), st.booleans(), st.integers(0, 99), st.sampled_from([0.1, 1.0, 30.0]))
def test_experts_gates_and_gradients_are_those_of_the_definition(
    name: str, num_tokens: int, is_replayed: bool, seed: int, width: float
) -> None:
    recorded = records(num_tokens, seed) if is_replayed else None
    logits = (wide(num_tokens, EXPERTS, seed=seed) * width).requires_grad_()
    experts, gates = route_by(name, logits, TOP_K, recorded)
    if name == "softmax":
        other, expected = reference.route_softmax(logits, TOP_K, recorded)
    else:
        other, expected = reference.route_sigmoid(logits, bias_of(EXPERTS), TOP_K, recorded, **DEEPSEEK)
    assert torch.equal(experts, other)
    if recorded is not None:
        assert torch.equal(experts, recorded), "the record is what was used, in its order"
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates.double(), expected, rtol=1e-5, atol=1e-12)
    weight = wide(num_tokens, TOP_K, seed=seed + 1)
    (got,) = torch.autograd.grad((gates * weight).sum(), logits)
    (want,) = torch.autograd.grad((expected * weight).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert not got.scatter(1, experts, 0.0).any(), "no gradient beside the chosen experts"


@pytest.mark.parametrize("name", ROUTERS)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(0, 99))
def test_a_row_does_not_see_the_others(name: str, count: int, first: int, seed: int) -> None:
    logits, recorded = wide(40, 24, seed=seed), records(40, seed, WIDER)
    rows = slice(first, first + count)
    poisoned = logits.clone()
    poisoned[:first] = torch.nan
    poisoned[first + count :] = torch.inf
    for record in (None, recorded):
        whole = route_by(name, logits, 8, record)
        part = route_by(name, logits[rows], 8, None if record is None else record[rows])
        beside = route_by(name, poisoned, 8, record)
        for a, b, c in zip(whole, part, beside, strict=True):
            assert same_bits(a[rows], b)
            assert same_bits(a[rows], c[rows])


def test_ties_go_to_the_lowest_expert() -> None:
    assert route_softmax(torch.zeros(2, 300), 3)[0].tolist() == [[0, 1, 2]] * 2
    experts, _ = route_sigmoid(torch.zeros(2, 300), torch.zeros(300), 3, num_groups=3, top_groups=1)
    assert experts.tolist() == [[0, 1, 2]] * 2


def test_what_a_record_names_has_a_finite_gate_and_gradient_however_improbable() -> None:
    """exp(-200) is 0 in float32: renormalised behind a softmax over all experts it would be 0 / 0."""
    recorded = torch.tensor([[1, 2]])
    logits = torch.tensor([[200.0, -100.0, -101.0]], requires_grad=True)
    for gates in (route_softmax(logits, 2, recorded)[1], route_sigmoid(logits, torch.zeros(3), 2, recorded)[1]):
        assert gates.isfinite().all()
        assert torch.autograd.grad(gates[0, 0], logits)[0].isfinite().all()
    close = torch.tensor([[math.e / (1 + math.e), 1 / (1 + math.e)]])
    torch.testing.assert_close(route_softmax(logits, 2, recorded)[1].detach(), close)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:-1], "a row for every token"),
        (lambda r: torch.cat((r, r[:1])), "a row for every token"),
        (lambda r: r[:, :-1], "a row for every token"),
        (lambda r: r.flatten(), "a row for every token"),
        (lambda r: r.index_fill(0, torch.tensor(2), 0), r"distinct and within 0 to 5, got \[0, 0\] for token 2"),
        (lambda r: r[:, :1].expand(-1, 2), "distinct"),
        (lambda r: r.masked_fill(r == 3, EXPERTS), "within 0 to 5"),
        (lambda r: r.masked_fill(r == 3, -1), "within 0 to 5"),
        (lambda r: r.float(), "integers"),
        (lambda r: r > 3, "integers"),
    ],
)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_record_that_cannot_be_replayed_is_refused(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    logits, recorded = wide(5, EXPERTS), records(5)
    for width in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(route_by(name, logits, TOP_K, recorded.to(width))[0], recorded), "as engines send them"
    with pytest.raises(ValueError, match=message):
        route_by(name, logits, TOP_K, change(recorded))


def test_rows_that_moved_are_valid_and_show_in_the_overlap() -> None:
    native = route_softmax(wide(500, 64), 8)[0]
    assert overlap(native, native.flip(1)).unique().tolist() == [1.0]
    moved = native.roll(1, 0)
    check_record(moved, 500, 8, 64)
    assert overlap(native, moved).mean() < 0.2, "two random sets of 8 among 64 share an eighth"
    assert overlap(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[9, 3, 8, 0]])).tolist() == [0.5]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mixture]:
    ops = interpreted_ops(tmp_path_factory.mktemp("table"))
    return {name: Mixture(ops, name, torch.float32) for name in ROUTERS}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_mixture_has_the_values_and_gradients_of_its_definition(mixtures: dict[str, Mixture], name: str) -> None:
    """Native and replayed; one expert has no token, whose gradient is zero and not what lay in memory."""
    x = wide(21, HIDDEN)
    for recorded in (None, records(21, sizes=SMALL._replace(experts=EXPERTS - 1))):
        experts, *got = mixtures[name].graded(x, recorded, recompute=False)
        for ours, exact in zip(got, plain(mixtures[name], x, experts), strict=True):
            assert relative_error(ours, exact) < 1e-5
    assert not got[-1][EXPERTS - 1].any()


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=4)
@given(st.integers(1, 7), st.integers(0, 99))
def test_replaying_the_native_experts_changes_no_bit_and_neither_does_recomputing(
    mixtures: dict[str, Mixture], name: str, num_tokens: int, seed: int
) -> None:
    mixture, x = mixtures[name], wide(num_tokens, HIDDEN, seed=seed)
    native = mixture.graded(x, None, recompute=False)
    record = native[0].to(torch.uint8)
    for recorded, recompute in ((record, False), (record, True), (None, True)):
        again = mixture.graded(x, recorded, recompute=recompute)
        assert all(same_bits(a, b) for a, b in zip(native, again, strict=True)), (recorded, recompute)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_recompute_replays_what_its_forward_replayed(mixtures: dict[str, Mixture], name: str) -> None:
    """Two micro-batches through one layer, the second's backward first: a queue of records would hand them out swapped."""
    mixture = mixtures[name]
    inputs, recorded = [wide(6, HIDDEN, seed=s) for s in (1, 2)], [records(6, seed=s) for s in (3, 4)]
    apart = [mixture.graded(x, r, recompute=False) for x, r in zip(inputs, recorded, strict=True)]
    assert not same_bits(mixture(inputs[0])[0].detach(), apart[0][1]), "the record matters"
    leaves = [x.clone().requires_grad_() for x in inputs]
    calls = [checkpoint(mixture, x, r, use_reentrant=False)[0] for x, r in zip(leaves, recorded, strict=True)]
    for i in (1, 0):
        grads = torch.autograd.grad(calls[i], (leaves[i], *mixture.parameters()), wide(6, HIDDEN, seed=9))
        assert all(same_bits(a, b) for a, b in zip(grads, apart[i][2:], strict=True))


@pytest.mark.parametrize("name", ROUTERS)
def test_rows_of_padding_take_any_valid_record_and_no_other_row_sees_which(
    mixtures: dict[str, Mixture], name: str
) -> None:
    mixture, x, recorded = mixtures[name], wide(9, HIDDEN), records(9)
    alone = mixture(x, recorded)[0]
    for seed in range(3):
        pad = records(4, seed=seed) if seed else torch.arange(TOP_K).expand(4, -1)
        padded = mixture(torch.cat((x, torch.full((4, HIDDEN), 7.0))), torch.cat((recorded, pad)))[0]
        assert same_bits(padded[:9], alone)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_record_of_the_old_router_survives_the_update_and_the_new_router_learns(
    mixtures: dict[str, Mixture], name: str
) -> None:
    """R2: recorded before the update, replayed behind it, where the router would choose otherwise."""
    mixture, x = mixtures[name], wide(16, HIDDEN)
    old = mixture(x)[1]
    before = mixture.router.detach().clone()
    try:
        with torch.no_grad():
            mixture.router.add_(wide(EXPERTS, HIDDEN, seed=7), alpha=0.1)
        new, replayed = (mixture.graded(x, r, recompute=True) for r in (None, old))
    finally:
        with torch.no_grad():
            mixture.router.copy_(before)
    assert overlap(new[0], old).min() < 1, "the update flips experts"
    assert torch.equal(replayed[0], old)
    assert replayed[3].any(), "the router's gradient"
