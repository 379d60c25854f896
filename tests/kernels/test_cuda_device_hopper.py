"""`pytest -m gpu` on a Hopper device: its kernel of the packed forward against the plain one, on raw bits."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.kernels import self_check
from shared.kernels.cuda import attention_choice
from shared.kernels.cuda.attention_choice import HOPPER, PLAIN
from shared.kernels.cuda.attention_packed import PackedAttention, pack, packed_forward
from shared.kernels.cuda.attention_schedule import deal, num_multiprocessors
from shared.kernels.cuda.ops import CudaOps
from shared.models import packed_layout, prefix_shared_layout
from tests.kernels.cuda_testing import DEVICE, IS_INTERPRETED, device_ops, qkv, replayed
from tests.kernels.kernel_testing import same_bits, wide

IS_HOPPER = not IS_INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a device of compute capability 9.0")]

HEADS = (16, 8, 128)
SCALE = 128**-0.5


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CudaOps:
    return device_ops(tmp_path_factory.mktemp("table"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is settled yet in this process."""
    monkeypatch.setattr(attention_choice, "_refusals", {})


def draw(rows: int, heads: int, seed: int) -> Tensor:
    """[rows, heads, 128] of wide exponents, drawn on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, heads, 128, generator=generator, device=DEVICE)
    exponents = torch.randint(-6, 3, x.shape, generator=generator, device=DEVICE)
    return torch.ldexp(x, exponents).to(torch.bfloat16)


def both(q: Tensor, k: Tensor, v: Tensor, lens: list[int], contexts: list[int], num_programs: int) -> list[tuple]:
    """(output, log-sum-exp) of the plain kernel, and of Hopper's."""
    from shared.kernels.cuda.attention_hopper import hopper_forward

    heads, kv_heads = q.shape[1], k.shape[1]
    packed = pack(lens, heads // kv_heads, DEVICE, context_lens=contexts)
    schedule = deal(lens, contexts, heads, kv_heads, DEVICE, num_programs=num_programs)
    return [
        packed_forward(q, k, v, packed, scale=SCALE, window=0, softcap=0.0),
        hopper_forward(q, k, v, schedule, scale=SCALE),
    ]


def assert_same(outputs: list[tuple], where: object) -> None:
    (expected, expected_lse), (out, lse) = outputs
    assert same_bits(out, expected), where
    assert same_bits(lse, expected_lse), where


@pytest.mark.parametrize("heads", [(16, 8), (3, 3), (8, 2), (16, 2), (64, 1)], ids=str)
def test_random_batches_have_the_bits_of_the_plain_kernel(heads: tuple[int, int]) -> None:
    """Outputs and log-sum-exps; queries that are all of their context, or its end; few programs, and many."""
    rng = random.Random(str(heads))
    sizes = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025]
    for case in range(40):
        lens = [rng.choice([*sizes, rng.randint(3, 300), rng.randint(900, 3000)]) for _ in range(rng.randint(1, 6))]
        contexts = [n + rng.choice([0, 0, rng.choice(sizes), rng.randint(1, 2000)]) for n in lens] if case % 2 else lens
        q = draw(sum(lens), heads[0], 3 * case)
        k, v = (draw(sum(contexts), heads[1], 3 * case + i) for i in (1, 2))
        num_programs = rng.choice([1, 5, 20, num_multiprocessors(DEVICE)])
        assert_same(both(q, k, v, lens, contexts, num_programs), (lens, contexts, num_programs))


def test_long_sequences_and_repetitions_have_them_too() -> None:
    """131,072 rows; what depends on a race shows when it is done again."""
    lens = [100_000, 1, 31_071]
    q, k, v = (draw(sum(lens), h, i) for i, h in enumerate((32, 8, 8)))
    assert_same(both(q, k, v, lens, lens, num_multiprocessors(DEVICE)), lens)
    lens = [4096] * 4
    q, k, v = qkv(sum(lens), HEADS, torch.bfloat16)
    for again in range(5):
        assert_same(both(q, k, v, lens, lens, num_multiprocessors(DEVICE)), again)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_a_row_does_not_see_cannot_reach_it(bad: float) -> None:
    lens = [300, 100, 1200]
    q, k, v = qkv(sum(lens), HEADS, torch.bfloat16)
    (_, _), (expected, expected_lse) = both(q, k, v, lens, lens, 7)
    for which, at in ((1, 130), (2, 130), (1, 1500), (2, 1500)):
        poisoned = [x.clone() for x in (q, k, v)]
        poisoned[which][at, 3, 5] = bad
        outputs = both(*poisoned, lens, lens, 7)
        assert_same(outputs, (which, at))
        end = 300 if at < 300 else 1600
        for found, clean in zip(outputs[1], (expected, expected_lse), strict=True):
            assert same_bits(found[:at], clean[:at])
            assert same_bits(found[end:], clean[end:])


def gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(wide(*out.shape, dtype=torch.bfloat16, seed=9).to(DEVICE))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.usefixtures("fresh")
def test_training_runs_it_and_keeps_its_gradients(ops: CudaOps) -> None:
    """Of whole sequences and over shared prompts."""
    lens = [700, 1, 64, 1500]
    for layout in (packed_layout(lens), prefix_shared_layout([1500, 40], [[300, 1, 70], [5, 900]])):
        inputs = qkv(layout.num_queries, HEADS, torch.bfloat16)
        found = gradients(lambda q, k, v, layout=layout: ops.attention(q, k, v, layout, SCALE), inputs)
        (packed,) = (plan for key, plan in layout._plans.items() if key[0] == "packed")
        assert any(key[0] == "schedule" for key in layout._plans)
        plain = gradients(lambda q, k, v, p=packed: PackedAttention.apply(q, k, v, p, SCALE, 0, 0.0), inputs)
        assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True))
    assert ops.describe()["packed_attention"] == HOPPER


@pytest.mark.usefixtures("fresh")
def test_the_check_at_start_settles_it(ops: CudaOps) -> None:
    assert ops.describe()["packed_attention"] == PLAIN
    self_check(ops, torch.bfloat16, linear_shapes=((576, 576),), heads=HEADS)
    assert ops.describe()["packed_attention"] == HOPPER


@pytest.mark.usefixtures("fresh")
def test_other_bits_are_refused(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.kernels.cuda import attention_hopper

    real = attention_hopper.hopper_forward

    def flips(*args: Tensor, **options: float) -> tuple[Tensor, Tensor]:
        out, lse = real(*args, **options)
        lse.view(torch.int32)[-1, 0] ^= 1
        return out, lse

    monkeypatch.setattr(attention_hopper, "hopper_forward", flips)
    ops.settle_attention(torch.bfloat16, HEADS)
    assert ops.describe()["packed_attention"].startswith(f"{PLAIN} (1 of ")
    layout = packed_layout([100])
    with torch.no_grad():
        ops.attention(*qkv(100, HEADS, torch.bfloat16), layout, SCALE)
    assert not any(key[0] == "schedule" for key in layout._plans)


@pytest.mark.usefixtures("fresh")
def test_a_captured_forward_replays_it_and_settles_nothing(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [2500, 1, 70]
    q, k, v = qkv(sum(lens), HEADS, torch.bfloat16)
    layout = packed_layout(lens)
    with torch.no_grad():
        expected = ops.attention(q, k, v, layout, SCALE).clone()
        assert same_bits(replayed(lambda: ops.attention(q, k, v, layout, SCALE)), expected)
        monkeypatch.setattr(attention_choice, "_refusals", {})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.attention(q, k, v, layout, SCALE)
        graph.replay()
        torch.cuda.synchronize()
    assert same_bits(out, expected)
    assert attention_choice._refusals == {}
