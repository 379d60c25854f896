"""How the table of products is filled, interpreted; what the benchmark does with the time it has."""

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from benchmarks import kernels
from benchmarks.harness import Budget, Recorder
from benchmarks.kernel_cases import gemm as gemm_cases
from shared.kernels import certify as certifying
from shared.kernels.certify import (
    BUCKETS,
    LARGE,
    MISFIT,
    Entry,
    Table,
    UncertifiedError,
    certify,
    certify_large,
    shape_key,
)
from shared.kernels.cuda import members, probe
from shared.kernels.cuda.gemm import REFERENCE, Tile
from shared.kernels.cuda.members import CUBLASLT, MOST_PROGRAMS, TILES, candidates
from shared.kernels.cuda.probe import Probe
from tests.deadline import DEADLINE_S
from tests.kernels.cuda_testing import DEVICE, HALF, IS_INTERPRETED, reference_entry

FLOAT = {"dtype": torch.float32, "out_dtype": torch.float32}
FAST, SLOW = "triton-weights-8x16x64-w1s8", "triton-weights-8x32x128-w2s6"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Few row counts on the CPU; the times are those of the dictionary, where the library is the fastest and wrong."""
    times = {CUBLASLT: 1.0, FAST: 2.0, SLOW: 2.1}
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "MOST_ROWS", 180)
    monkeypatch.setattr(certifying, "BUCKETS", (1, 3, 6))
    monkeypatch.setattr(certifying, "candidates", lambda n, rows: [CUBLASLT, SLOW, FAST] if rows > 1 else [FAST, SLOW])
    monkeypatch.setattr(Probe, "times_us", lambda self, names, rows, repeats: [times[name] for name in names])
    return times


def wrong(name: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """The library's member gives row 4 other bits; the others are what they are."""
    members.run_member(name if name != CUBLASLT else REFERENCE.name, x, w, bias, out)
    if name == CUBLASLT and len(x) > 4:
        out[4, 1] = torch.nextafter(out[4, 1], out[4, 1] + 1)
    return out


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_fastest_exact_member_of_a_bucket_is_taken(
    small: dict[str, float], monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    monkeypatch.setattr(probe, "run_member", wrong)
    entry = certify(20, 48, has_bias=has_bias, **FLOAT)
    assert entry.members == [FAST, CUBLASLT, FAST]
    assert entry.times_us == [2.0, 1.0, 2.0]
    # 134 rows = 6 + 128 are the only large count here
    assert entry.large == REFERENCE.name
    assert entry.rejected == {CUBLASLT: f"differs at {6 + LARGE} rows"}
    assert entry.checked == 1 + 2 + 3 + 3 + 1 + 1
    assert [entry.member(rows) for rows in (1, 2, 4, 7)] == [FAST, CUBLASLT, FAST, REFERENCE.name]
    small[SLOW] = 1.5
    assert certify(20, 48, has_bias=has_bias, **FLOAT).members == [SLOW, CUBLASLT, SLOW]


def test_a_tile_too_large_for_the_device_is_passed_over(
    small: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "misfit", lambda self, name, rows: "131072 bytes" if name == FAST else None)
    monkeypatch.setattr(probe, "run_member", wrong)
    entry = certify(20, 48, **FLOAT)
    assert entry.members == [SLOW, CUBLASLT, SLOW]
    assert entry.rejected[FAST] == f"{MISFIT}: 131072 bytes"


def test_a_shape_without_any_exact_member_is_refused(small: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_member", lambda name, x, w, bias, out: out.zero_())
    for attempt in (certify, certify_large):
        with pytest.raises(UncertifiedError, match="no exact kernel for weights"):
            attempt(20, 48, **FLOAT)


def test_what_an_output_leaves_unwritten_shows(small: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_last_column(name: str, x, w, bias, out: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return members.run_member(name, x, w[:-1], bias, out[:, :-1])

    found = Probe(20, 48, torch.float32, torch.float32, False)
    assert found.first_difference(REFERENCE.name, range(1, 4)) is None
    monkeypatch.setattr(probe, "run_member", forgets_the_last_column)
    assert found.first_difference(REFERENCE.name, range(1, 4)) == 1


@pytest.mark.parametrize(
    "n", sorted({n for shapes in gemm_cases.MODELS.values() for n, _ in shapes.values()} | {151936})
)
def test_every_bucket_has_candidates_that_fit_its_rows(n: int) -> None:
    for rows in BUCKETS:
        names = candidates(n, rows)
        assert names, rows
        assert len(set(names)) == len(names)
        assert (CUBLASLT in names) == (rows > 1), "the library may pick a kernel for vectors"
        tiles: list[Tile] = [TILES[name] for name in names if name != CUBLASLT]
        assert all(t.block_t < 2 * max(rows, 8) for t in tiles if t.swap and rows <= 32), rows
        assert all(-(-n // t.block_n) <= MOST_PROGRAMS for t in tiles if t.swap and t.block_n < 128)
        assert REFERENCE.name not in names, "it is tried anyway"


def test_a_process_waits_for_another_that_certifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the other's entry when the lock is free, and certifies nothing."""
    certified, waits = [], threading.Event()

    def fake(n: int, k: int, **options: object) -> Entry:
        certified.append((n, k))
        return reference_entry()

    def tried(file: IO[str], flags: int) -> None:
        waits.set()
        flock(file, flags)

    flock = fcntl.flock
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(certifying, "use_cublaslt_without_split_k", lambda: None)
    monkeypatch.setattr(certifying, "cache_key", lambda: "device")
    monkeypatch.setattr(certifying, "certify", fake)
    first, second = Table(tmp_path), Table(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        with first._alone():
            monkeypatch.setattr(fcntl, "flock", tried)
            waiting = pool.submit(second.entry, 4, 8, HALF, HALF)
            assert waits.wait(DEADLINE_S)
            assert not certified
            first.record(shape_key(4, 8, HALF, HALF, False), reference_entry())
        assert waiting.result(DEADLINE_S) == reference_entry()
    assert not certified
    second.entry(6, 8, HALF, HALF)
    assert certified == [(6, 8)], "the lock is free again"
    with first._alone():
        monkeypatch.setattr(certifying, "LOCK_S", 0.0)
        second.entry(8, 8, HALF, HALF)
    assert certified == [(6, 8), (8, 8)], "another that never ends is not waited for"


def test_sections_and_models_are_chosen_by_name() -> None:
    assert kernels.chosen(None) == {name: [] for name in kernels.SECTIONS}
    assert kernels.chosen(["gemm:Qwen3-8B", "rowwise", "gemm:Qwen3-0.6B"]) == {
        "gemm": ["Qwen3-8B", "Qwen3-0.6B"],
        "rowwise": [],
    }
    for word in ("gemms", "gemm:Qwen3", "rowwise:Qwen3-8B"):
        with pytest.raises(ValueError, match=f"no section {word}"):
            kernels.chosen([word])


def test_what_the_budget_leaves_no_time_for_is_recorded() -> None:
    section = gemm_cases.Products(["SmolLM2-135M", "Qwen3-8B"], 0.0)
    checks = list(section.check())
    assert [r.metric for r in checks] == ["not_run"] * 9
    assert {r.params["model"] for r in checks} == {"SmolLM2-135M", "Qwen3-8B"}
    assert list(section.time({})) == [], "what was not checked is not timed"
    section = gemm_cases.Products(["Qwen3-8B"], 0.0)
    timed = list(section.time({}))
    assert {r.metric for r in timed} == {"not_run"}
    assert len(timed) == 4 * (len(gemm_cases.ROWS) + len(gemm_cases.GRADIENT_ROWS))
    assert not Budget(None).is_spent


def test_a_summary_names_the_mean_and_the_lowest() -> None:
    records = [
        gemm_cases.Record("kernels", "linear", {"m": m}, "exact", gemm_cases.MANY, 1.0, "us", "cublas", ratio)
        for m, ratio in ((32, 0.5), (64, 2.0))
    ]
    section, recorder = SimpleNamespace(check=list, time=lambda limits: records), Recorder(None)
    assert kernels.run_section("gemm", section, {}, recorder)
    assert recorder.records[:2] == records
    (summary,) = recorder.records[2:]
    assert summary.value == pytest.approx(1.0)
    assert summary.params["lowest"] == ["0.500 32", "2.000 64"]


@pytest.mark.gpu
def test_certified_on_a_device(tmp_path: Path) -> None:
    """The real choice, and the times that it rests on."""
    from shared.kernels.cuda.gemm import gemm
    from shared.kernels.cuda.replay import replay_times

    assert not IS_INTERPRETED
    small_x, large_x, w = (torch.randn(rows, 1024, dtype=HALF, device=DEVICE) for rows in (64, 16384, 1024))
    times = replay_times([[lambda: torch.mm(small_x, w.t())] * 3, [lambda: torch.mm(large_x, w.t())] * 3], repeats=5)
    assert [len(t) for t in times] == [5, 5]
    assert 0 < min(times[0]) < min(times[1])
    table = Table(tmp_path)
    for n, k in ((576, 576), (96, 200)):
        entry = table.entry(n, k, HALF, HALF)
        assert len(entry.members) == len(BUCKETS)
        assert all(us > 0 for name, us in zip(entry.members, entry.times_us, strict=True) if name != REFERENCE.name)
        x, w = (torch.randn(rows, k, dtype=HALF, device=DEVICE) for rows in (1500, n))
        expected = gemm(x, w, REFERENCE, bias=None, out=torch.empty(1500, n, dtype=HALF, device=DEVICE))
        for rows in (1, 2, 17, 255, 777, 1025, 1500):
            assert torch.equal(table.linear(x[:rows], w).view(torch.int16), expected[:rows].view(torch.int16)), rows
