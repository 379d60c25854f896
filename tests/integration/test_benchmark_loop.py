"""The loop benchmark runs here on a model of 76k parameters, and what it writes is whole."""

import json

import pytest

from benchmarks import loop


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
