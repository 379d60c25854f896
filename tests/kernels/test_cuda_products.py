"""CUDA products under the interpreter: one bit class, the table that dispatches over it, experts."""

import json
import os
from pathlib import Path

import pytest
import torch

from shared.kernels import InexactKernelError, reference
from shared.kernels.__main__ import lines
from shared.kernels.certify import BUCKETS, Entry, Table, UncertifiedError, shape_key
from shared.kernels.cuda.fast import FastCudaOps
from shared.kernels.cuda.gemm import FEW_TOKENS, MANY_TOKENS, REFERENCE, Tile, gemm
from shared.kernels.cuda.grouped import combine, grouped_linear, route
from shared.kernels.cuda.members import CUBLASLT, TILES, run_member
from shared.kernels.cuda.ops import CudaOps
from tests.kernels.cuda_testing import interpreted_ops, reference_entry, relative_error
from tests.kernels.kernel_testing import same_bits, wide

SOME = [REFERENCE, FEW_TOKENS[0], FEW_TOKENS[25], FEW_TOKENS[-1], *MANY_TOKENS[:2], MANY_TOKENS[5], MANY_TOKENS[8]]
FLOAT = (torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_tile_gives_the_same_bits(dtype: torch.dtype) -> None:
    """Odd sizes, with a bias, whichever operand holds the tokens; only a K in another order may differ."""
    x, w, bias = wide(45, 300, dtype=dtype), wide(70, 300, dtype=dtype, seed=1), wide(70, dtype=dtype, seed=2)
    expected = gemm(x, w, REFERENCE, bias=bias, out=torch.full((45, 70), torch.nan))
    exact = x.double() @ w.double().t() + bias.double()
    assert relative_error(expected, exact) < 1e-6
    for tile in SOME[1:]:
        assert same_bits(gemm(x, w, tile, bias=bias, out=torch.full((45, 70), torch.nan)), expected), tile.name
        some = gemm(x[7:10], w[5:], tile, bias=bias[5:], out=torch.full((3, 65), torch.nan))
        assert same_bits(some, expected[7:10, 5:]), tile.name
    reordered = gemm(x.flip(1), w.flip(1), REFERENCE, bias=bias, out=torch.empty(45, 70))
    assert not same_bits(reordered, expected), "the comparison can fail"


def test_tile_names_are_unique_and_lead_back_to_the_tile() -> None:
    tiles = [REFERENCE, *FEW_TOKENS, *MANY_TOKENS]
    assert len({t.name for t in tiles}) == len(tiles) == len(TILES)
    x, w = wide(3, 64), wide(20, 64, seed=1)
    for tile in SOME:
        out = torch.full((3, 20), torch.nan)
        assert same_bits(run_member(tile.name, x, w, None, out), gemm(x, w, tile, bias=None, out=torch.empty(3, 20)))


def distinct_entry() -> Entry:
    """A member of its own for every bucket, so that the dispatch shows in what runs."""
    names = [tile.name for tile in (*FEW_TOKENS, *MANY_TOKENS)][: len(BUCKETS)]
    return Entry(names, [float(i) for i in range(len(names))], CUBLASLT, limit=1024)


def test_row_counts_go_to_their_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path)
    entry = distinct_entry()
    table.record(shape_key(4, 8, *FLOAT, False), entry)
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr("shared.kernels.certify.run_member", lambda name, x, w, b, out: ran.append((name, len(x))))
    large = ("cublaslt", 1024)
    for rows, expected in {
        0: [],
        1: [(entry.members[0], 1)],
        2: [(entry.members[1], 2)],
        3: [(entry.members[2], 3)],
        17: [(entry.members[5], 17)],
        512: [(entry.members[14], 512)],
        777: [(entry.members[16], 777)],
        1024: [(entry.members[16], 1024)],
        1025: [("cublaslt", 1024), (entry.members[0], 1)],
        1290: [large, ("cublaslt", 256), (entry.members[4], 10)],
        2048 + 128: [large, large, ("cublaslt", 128)],
    }.items():
        ran.clear()
        assert table.linear(torch.zeros(rows, 8), torch.zeros(4, 8)).shape == (rows, 4)
        assert ran == expected, rows


def test_the_table_survives_its_file_and_its_neighbours(tmp_path: Path) -> None:
    """Two processes add entries of their own; a third finds both."""
    one, two = Table(tmp_path / "cache"), Table(tmp_path / "cache")
    first = distinct_entry()
    first.rejected["cublaslt"] = "differs at 1 rows"
    first.checked = 513
    one.record(shape_key(4, 8, *FLOAT, False), first)
    two.record(shape_key(6, 8, torch.bfloat16, torch.float32, True), reference_entry())
    third = Table(tmp_path / "cache")
    assert third.entries == {"4x8 float32 float32": first, "6x8 bfloat16 float32 bias": reference_entry()}
    assert third.describe() == {}, "nothing of it was used"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [third.path.name]
    assert set(json.loads(third.path.read_text())) == set(third.entries)


def test_the_table_is_printed_bucket_by_bucket(tmp_path: Path) -> None:
    table, entry = Table(tmp_path), distinct_entry()
    entry.checked, entry.rejected = 513, {"cublaslt": "differs at 1 rows"}
    table.record(shape_key(4, 8, *FLOAT, False), entry)
    head, shape, *rows = lines(table)
    assert head == f"1 shapes in {table.path}"
    assert shape == "4x8 float32 float32: 513 products compared, 1 candidates rejected"
    assert len(rows) == len(BUCKETS) + 1
    assert rows[5].split() == ["to", "24", "rows", "5.0", "us", entry.members[5]]
    assert rows[-1].split() == ["to", "1024", "rows", "in", "multiples", "of", "128", "cublaslt"]


def test_what_is_told_of_the_table_is_what_was_used_of_it(tmp_path: Path) -> None:
    table = Table(tmp_path)
    for n in (4, 6):
        table.record(shape_key(n, 8, *FLOAT, False), reference_entry())
    table.linear(torch.zeros(2, 8), torch.zeros(6, 8))
    assert table.describe() == {"6x8 float32 float32": REFERENCE.name}
    assert CudaOps(torch.device("cpu"), table).describe()["linear"] == f"certify.Table({REFERENCE.name})"


def test_a_shape_without_an_entry_is_refused_where_it_cannot_be_certified(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.record(shape_key(4, 8, *FLOAT, False), reference_entry())
    table.linear(torch.zeros(2, 8), torch.zeros(4, 8))
    for case in (
        lambda: table.linear(torch.zeros(2, 8), torch.zeros(5, 8)),
        lambda: table.linear(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(4)),
        lambda: table.linear(torch.zeros(2, 8).half(), torch.zeros(4, 8).half()),
        lambda: table.prepare([(4, 8)], torch.bfloat16),
    ):
        with pytest.raises(UncertifiedError, match="certifying it needs a CUDA device"):
            case()
    assert issubclass(UncertifiedError, InexactKernelError), "services refuse the run, not crash"


def test_dispatch_gives_the_bits_of_the_reference(tmp_path: Path) -> None:
    x, w, bias = wide(70, 48), wide(33, 48, seed=1), wide(33, seed=2)
    table = Table(tmp_path)
    entry = distinct_entry()
    table.record(shape_key(33, 48, *FLOAT, True), entry)
    expected = gemm(x, w, REFERENCE, bias=bias, out=torch.empty(70, 33))
    for rows in (1, 2, 5, 16, 17, 33, 70):
        assert same_bits(table.linear(x[:rows], w, bias), expected[:rows]), rows
        out = torch.full((rows, 33), torch.nan)
        assert table.linear(x[:rows], w, bias, out=out) is out


def test_linear_has_the_gradients_of_float64(tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    inputs = wide(2, 9, 40), wide(21, 40, seed=1), wide(21, seed=2)
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out, expected = ops.linear(*leaves), torch.nn.functional.linear(*exact)
    assert out.shape == (2, 9, 21)
    out.backward(wide(2, 9, 21, seed=3))
    expected.backward(wide(2, 9, 21, seed=3).double())
    for got, want in zip(leaves, exact, strict=True):
        assert relative_error(got.grad, want.grad) < 1e-6
    frozen = ops.linear(inputs[0].clone().requires_grad_(), inputs[1], inputs[2])
    frozen.sum().backward()


@pytest.mark.parametrize("block", [16, 32, 64])
def test_experts_give_each_row_the_bits_of_its_own_product(block: int) -> None:
    tokens, num_experts, top_k = 23, 7, 2
    x, weight = wide(tokens, 40), wide(num_experts, 24, 40, seed=1)
    generator = torch.Generator().manual_seed(0)
    # expert 6 stays without rows
    experts = torch.stack([torch.randperm(6, generator=generator)[:top_k] for _ in range(tokens)])
    gates = torch.rand(tokens, top_k, generator=generator)
    routing = route(experts, num_experts, block)
    rows = grouped_linear(x, weight, routing, gather=True)
    tile = Tile(block, 64, 64, 4, 4, False)
    for t in range(tokens):
        for slot in range(top_k):
            alone = gemm(x[t : t + 1], weight[experts[t, slot]], tile, bias=None, out=torch.empty(1, 24))
            assert same_bits(rows[routing.place[t, slot].long()][None], alone)
    assert same_bits(grouped_linear(x[routing.source.long()], weight, routing, gather=False), rows)
    by_slot = rows[routing.place.long()]
    torch.testing.assert_close(by_slot, reference.grouped_linear(x, weight, experts), rtol=1e-5, atol=1e-5)
    # no contraction: each product is rounded, as the kernel's fma is not; close is what can be asked here
    torch.testing.assert_close(combine(rows, gates, routing), reference.combine(by_slot, gates), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("by_slot", "total"), [((1e8, -1e8, 1.0), 1.0), ((1e8, 1.0, -1e8), 0.0)])
def test_a_tokens_results_are_added_in_the_order_of_its_slots(by_slot: tuple[float, ...], total: float) -> None:
    """Whichever experts they come from; 1e8 swallows what is added to it, not what comes after it is gone."""
    experts = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0], [2, 1, 0]])
    routing = route(experts, 3, 16)
    rows = torch.empty(12, 8)
    rows[routing.place.long()] = torch.tensor(by_slot)[None, :, None].expand(4, 3, 8)
    assert same_bits(combine(rows, torch.ones(4, 3), routing), torch.full((4, 8), total))


def test_a_tokens_experts_do_not_depend_on_its_batch() -> None:
    x, weight = wide(12, 32), wide(4, 16, 32, seed=1)
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(12)])
    gates = torch.rand(12, 2, generator=generator)

    def run(rows: slice) -> torch.Tensor:
        routing = route(experts[rows], 4, 16)
        return combine(grouped_linear(x[rows], weight, routing, gather=True), gates[rows].contiguous(), routing)

    whole = run(slice(0, 12))
    for rows in (slice(5, 6), slice(0, 7)):
        assert same_bits(run(rows), whole[rows])


@pytest.mark.parametrize("ops", [CudaOps, FastCudaOps])
def test_no_environment_changes_the_librarys_workspace(ops: type[CudaOps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    ops(torch.device("cpu"))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
