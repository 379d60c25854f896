"""The weight benchmarks run to their end on small models, and refuse what can't be measured."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import two_gpu, weight_sync
from benchmarks.parts import Part, run_parts
from benchmarks.timeline import Series
from services.rollout.config import RolloutConfig
from tests.deadline import DEADLINE_S


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
    assert two_gpu.main(["--cpu", "--tiny", "--versions", "2", "--out", str(tmp_path / "out.json")]) == 0
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
        (["--cpu", "--tiny", "--versions", "0"], "at least 1, got 0"),
        (["--only", "nothing"], "invalid choice"),
        (["--cpu", "--tiny", "--only", "fsdp", "broadcast"], "--only names one section each time"),
    ],
)
def test_two_gpus_refuses_what_it_cannot_measure(words: list[str], said: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        two_gpu.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "said"), [("num_steps=3", "at least 4, got 3"), ("run.lagg=2", "lagg"), ("broadcast", "broadcast")]
)
def test_a_wrong_key_ends_two_gpus_before_it_begins(key: str, said: str, capsys) -> None:
    assert two_gpu.main(["--cpu", "--tiny", "--only", "loop", key]) == 2
    assert said in capsys.readouterr().err


def test_two_gpus_place_trainer_and_replica_and_leave_the_job_to_its_keys(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = two_gpu.arguments(
        ["--only", "loop", "run.model=tiny-sort", "run.micro_batch_tokens=65536", "rollout.max_running=256"]
    )
    job = args.job
    assert (job.run.lag, job.run.micro_batch_tokens, job.local.rollout["max_running"]) == (1, 65536, 256)
    assert job.local.trainer == {"transport": "broadcast", "device": "cuda"}
    assert RolloutConfig(device=job.local.rollout["device"]).device == "cuda:1"


def test_a_part_that_fails_or_hangs_is_ended_and_tells_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"second ended with 3:\nno GPU"):
        run_parts(
            [Part("first", ["-c", "print('well')"]), Part("second", ["-c", "print('no GPU'); raise SystemExit(3)"])],
            deadline_s=DEADLINE_S,
        )
    with pytest.raises(RuntimeError, match="waits was not over after 0 s"):
        run_parts([Part("waits", ["-c", "import threading; threading.Event().wait()"])], deadline_s=0.1)


def test_a_section_that_takes_too_long_is_broken_off() -> None:
    with pytest.raises(TimeoutError, match="loop was not over"), two_gpu.limited("loop", 0.05):
        threading.Event().wait(DEADLINE_S)
    with two_gpu.limited("loop", DEADLINE_S):
        pass


def test_a_replica_that_went_another_way_fails_the_section() -> None:
    series = Series()
    series.add(0.0, {"timzero_weight_sync_bytes_total:broadcast": 8.0})
    two_gpu.require_broadcast(series)
    series.add(1.0, {"timzero_weight_sync_bytes_total:broadcast": 8.0, "timzero_weight_source_fallbacks_total": 1.0})
    with pytest.raises(AssertionError, match="8 bytes came by broadcast, 1 versions did not"):
        two_gpu.require_broadcast(series)


def test_weight_sync_refuses_a_gpu_that_is_not_there(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        weight_sync.main(["--device", "cuda"])
    assert "there is none here" in capsys.readouterr().err
