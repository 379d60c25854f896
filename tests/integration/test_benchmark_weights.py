"""The weight benchmarks run to their end on small models, and refuse what can't be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import two_gpu, weight_sync


def values(path: Path) -> dict[tuple[str, str, str], float]:
    return {(r["case"], r["mode"], r["metric"]): r["value"] for r in json.loads(path.read_text())}


@pytest.mark.slow
def test_serving_takes_versions_from_shared_memory_while_it_samples(tmp_path: Path) -> None:
    words = ["--only", "serving", "--tiny", "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "out.json")]
    assert weight_sync.main(words) == 0
    found = values(tmp_path / "out.json")
    assert found["serving", "shm", "pause_s"] > 0
    assert found["serving", "shm", "tokens_per_s"] > 0


@pytest.mark.slow
def test_synthetic_versions_arrive_by_every_way(tmp_path: Path) -> None:
    assert weight_sync.main(["--only", "synthetic", "--bytes", "40000000", "--out", str(tmp_path / "out.json")]) == 0
    found = values(tmp_path / "out.json")
    assert {case for case, _, metric in found if metric == "total_rate"} == {"grpc", "directory", "shm"}


@pytest.mark.slow
def test_deltas_of_a_job_are_verified_by_a_reader_of_their_own(tmp_path: Path) -> None:
    words = ["--only", "delta", "--config", "configs/sort.toml", "--steps", "3", "--out", str(tmp_path / "out.json")]
    assert weight_sync.main(words) == 0
    found = values(tmp_path / "out.json")
    assert found["training", "delta", "verified_versions"] == 3
    assert 0 < found["training", "delta", "bytes_share"] < 1


@pytest.mark.slow
def test_two_devices_dry_over_gloo(tmp_path: Path) -> None:
    assert two_gpu.main(["--cpu", "--tiny", "--steps", "4", "--out", str(tmp_path / "out.json")]) == 0
    found = values(tmp_path / "out.json")
    assert found["fsdp", "exact", "differing_bits"] == 0
    assert found["tim", "exact", "differing_bits"] == 0
    assert found["serving", "broadcast", "total_s"] > 0
    assert found["loop", "exact", "step_s"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "two GPUs are needed, this machine has 0"),
        (["--cpu"], "go together"),
        (["--cpu", "--tiny", "--steps", "3"], "at least 4, got 3"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_two_gpus_refuses_what_it_cannot_measure(words: list[str], said: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        two_gpu.main(words)
    assert said in capsys.readouterr().err


def test_weight_sync_refuses_a_gpu_that_is_not_there(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        weight_sync.main(["--device", "cuda"])
    assert "there is none here" in capsys.readouterr().err
