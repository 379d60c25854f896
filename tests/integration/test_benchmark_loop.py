"""The loop benchmark runs here on a model of 76k parameters, and what it writes is whole."""

import json

import pytest

from benchmarks import loop
from benchmarks.harness import Record, Recorder


@pytest.mark.slow
def test_the_loop_benchmark_finds_equal_bits_and_splits_every_second(tmp_path):
    out = tmp_path / "loop.json"
    assert loop.main(["--tiny", "--out", str(out)]) == 0
    found = {r["metric"]: r["value"] for r in json.loads(out.read_text())}
    assert found["differing_bits"] == 0
    assert found["compared_tokens"] == found["trained_tokens"] == 5 * 16 * 12
    assert 0 <= found["neither_share"] < 1
    assert found["tokens_per_s"] > 0


def test_too_few_steps_are_refused():
    assert loop.main(["--tiny", "num_steps=3"]) == 2


def test_only_the_same_setting_on_another_machine_is_compared(tmp_path):
    def speed(samples, value):
        params = {"model": "m", "samples": samples, "steps": value}
        return Record("loop", "step", params, "exact", "tokens_per_s", value, "tokens/s", machine=f"machine {samples}")

    recorder = Recorder(tmp_path / "other.json")
    recorder.add(speed(8, 10))
    recorder.save()
    ours = [speed(8, 30), speed(512, 30)]
    loop.compare(ours, tmp_path / "other.json")
    assert [(r.baseline, r.ratio) for r in ours] == [("machine 8", 3.0), (None, None)]
