"""The engine's benchmarks run here over a tiny model: what they compare, what they refuse, and what they write."""

import json

import pytest
import torch

from benchmarks import contract, engine
from benchmarks.engine_cases.arms import Finding
from benchmarks.engine_cases.drive import Gate, Weights, build, gate
from benchmarks.engine_cases.workloads import SMALL_WORKLOADS, WORKLOADS

UNIFORM = SMALL_WORKLOADS[0]


def test_the_benchmark_gates_times_and_splits(tmp_path):
    out = tmp_path / "engine.json"
    words = ["--tiny", "--only", "uniform", "group", "--repeats", "1", "--out", str(out)]
    assert engine.main(words) == 0
    found = {(r["case"], r["mode"], r["metric"]): r for r in json.loads(out.read_text())}
    for case, tokens in (("uniform", 8 * 6), ("group", 2 * 4 * 6)):
        assert found[case, "exact", "differing_bits"]["value"] == 0
        assert found[case, "exact", "compared_tokens"]["value"] == tokens
        assert found[case, "fast", "differing_bits"]["value"] > 0, "the control"
        exact, fast = (found[case, mode, "output_tokens_per_s"] for mode in ("exact", "fast"))
        assert exact["ratio"] == pytest.approx(exact["value"] / fast["value"])
        assert exact["params"]["tokens"] == tokens
        assert found[case, "exact", "step_ms"]["value"] >= found[case, "exact", "host_ms"]["value"] > 0
    for part in ("gemms", "attention", "small", "sampling", "step"):
        assert found["budget", "exact", f"{part}_ms"]["value"] > 0


def test_one_flipped_weight_bit_closes_the_gate():
    weights = Weights(UNIFORM.model, "cpu", "float32")
    served = build(UNIFORM, "exact", weights)
    assert gate(served, UNIFORM, weights.judge).differing_bits == 0
    weight = weights.judge.model.layers[1].mlp.down_proj.weight
    changed = weight.detach().clone()
    changed.view(torch.int32)[3, 5] ^= 1 << 20
    weights.judge.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(changed)
    assert gate(served, UNIFORM, weights.judge).differing_bits > 0


def test_red_gates_are_named():
    clean, fast = Gate(10, 0, 0.0), Gate(10, 9, 1e-3)
    assert engine.red({"exact": clean, "fast": fast}) == ""
    assert "1 of 10 tokens of the exact engine" in engine.red({"exact": Gate(10, 1, 0.0), "fast": fast})
    assert "0 of 0 tokens" in engine.red({"exact": Gate(0, 0, 0.0), "fast": fast})
    assert "computes something else" in engine.red({"exact": clean, "fast": Gate(10, 9, float("nan"))})


def test_unknown_workloads_are_refused(capsys):
    assert engine.main(["--tiny", "--only", "uniform", "nothing"]) == 2
    assert (
        "no workload nothing; there are uniform, prefill, group, long_tail, long_context, tiny"
        in capsys.readouterr().err
    )


def test_the_floor_is_the_fields():
    """59,000 tokens/s of decode at 4.3 TB/s, as stated for this workload."""
    uniform = WORKLOADS[0]
    _, decode_s = uniform.floor_s(bandwidth=4.3e12, matmul=7.9e14)
    assert uniform.counted_tokens / decode_s == pytest.approx(59_000, rel=0.02)
    assert all(max(w.lengths()) + w.prompt_tokens <= w.model.max_position_embeddings for w in WORKLOADS)


def test_the_contract_holds_in_every_arm_and_the_controls_show(tmp_path, capsys):
    out = tmp_path / "contract.json"
    assert contract.main(["--tiny", "--out", str(out)]) == 0, capsys.readouterr().out
    records = json.loads(out.read_text())
    arms = {r["case"] for r in records if r["params"]["kind"] == "arm"}
    assert arms >= {
        "trainer's packed forward", "batch of 1", "batch of 8", "other positions", "continued elsewhere", "chunks of 1",
        "chunks of 17", "eager", "prefix hits", "preempted and resumed",
        "preempted, resumed behind its own pages",
    }  # fmt: skip
    assert {r["params"]["temperature"] for r in records} == {0.6, 1.0, 1.3}


def test_a_contract_that_proves_nothing_is_an_error():
    same, other = Finding("a", {1.0: 5}, {1.0: 0}), Finding("b", {1.0: 5}, {1.0: 2})
    idle = Finding("c", {1.0: 5}, {1.0: 0}, problem="nobody was preempted")
    assert contract.problems({"m": [same]}, {"m": [other]}, is_proof=False) == []
    assert contract.problems({"m": [other, idle]}, {"m": [same]}, is_proof=False) == [
        "m, b: 2 of 5 tokens differ", "m, c: nobody was preempted", "m: nothing differs in any control",
    ]  # fmt: skip
    assert "too few to say" in contract.problems({"m": [same]}, {"m": [other]}, is_proof=True)[0]
