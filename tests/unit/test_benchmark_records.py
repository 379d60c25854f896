"""What a benchmark has measured is kept whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import loop, overlap
from benchmarks.harness import Record, Recorder, save
from benchmarks.timeline import Series
from benchmarks.weight_load import setting_of
from benchmarks.weight_serving import Progress
from tests.deadline import DEADLINE_S
from tests.unit.loop_fixture import outcome


def record(value: float, **params: Any) -> Record:
    return Record("bench", "case", params, "exact", "seconds", value, "s")


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def test_sigterm_saves_and_prints_what_was_measured_before_anything_is_closed(tmp_path, capsys):
    out, before, seen = tmp_path / "out.json", signal.getsignal(signal.SIGTERM), []

    def measure() -> None:
        with Recorder(out) as recorder:
            recorder.add(record(0.125))
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(DEADLINE_S)
            finally:
                seen.extend(read(out))

    with pytest.raises(SystemExit) as ended:
        measure()
    assert ended.value.code == 128 + signal.SIGTERM
    assert [r["value"] for r in seen] == [0.125]
    assert "0.125 s" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_block_that_fails_has_saved(tmp_path):
    def measure() -> None:
        with Recorder(tmp_path / "out.json") as recorder:
            recorder.add(record(1.0))
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure()
    assert [r["value"] for r in read(tmp_path / "out.json")] == [1.0]


def test_a_save_that_is_broken_off_leaves_the_file_whole(tmp_path):
    out = tmp_path / "out.json"
    save([record(1.0)], out)
    with pytest.raises(TypeError):
        save([record(1.0), record(2.0, device=object())], out)
    assert [r["value"] for r in read(out)] == [1.0]


def test_what_is_measured_again_takes_the_place_of_its_own_records_only(tmp_path):
    recorder = Recorder(tmp_path / "out.json")
    recorder.add(record(1.0))
    recorder.renew([record(2.0), record(3.0)], since=1)
    recorder.renew([record(4.0)], since=1)
    assert [r["value"] for r in read(tmp_path / "out.json")] == [1.0, 4.0]


def cut_off(stop_after: int) -> Callable[..., Any]:
    """`loop.run` that is ended after so many steps."""
    whole, series = outcome(begin_training=2.0)

    def run(*_: Any, on_step: loop.OnStep, **__: Any) -> Any:
        display = loop.Following(Quiet(), series, on_step)
        for step in (*whole.steps[:2], *whole.steps[1:stop_after]):
            display.step(step, len(whole.steps))
        raise SystemExit(143)

    return run


class Quiet:
    def note(self, line: str) -> None: ...

    def step(self, step: Any, num_steps: int) -> None: ...


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_loop_that_is_cut_off_has_told_of_its_steps(tmp_path, monkeypatch, num_steps):
    monkeypatch.setattr(loop, "run", cut_off(num_steps))
    with pytest.raises(SystemExit):
        loop.main(["--tiny", "--out", str(tmp_path / "out.json")])
    found = {r["metric"]: r for r in read(tmp_path / "out.json")}
    assert found["compared_tokens"]["value"] == 64 * max(2, num_steps)
    assert found["compared_tokens"]["params"]["steps"] == max(2, num_steps)
    if num_steps == 4:
        assert (found["step_s"]["value"], found["step_s"]["params"]["steps"]) == (10.0, 1)
    else:
        assert "step_s" not in found


def test_an_overlap_that_is_cut_off_has_told_of_the_settings_before_and_of_its_steps(tmp_path, monkeypatch):
    runs = iter([lambda *_, **__: outcome(begin_training=6.0), cut_off(4)])
    monkeypatch.setattr(loop, "run", lambda *args, **options: next(runs)(*args, **options))
    with pytest.raises(SystemExit):
        overlap.main(["--tiny", "--out", str(tmp_path / "out.json")])
    steps = {
        r["case"]: (r["value"], r["params"]["steps"]) for r in read(tmp_path / "out.json") if r["metric"] == "step_s"
    }
    assert steps == {"lag 0": (10.0, 2), "lag 1": (10.0, 1)}


def test_a_series_may_be_read_while_a_look_is_added():
    series = Series()
    series.add(0.0, {"a": 0.0})
    series.add(2.0, {"a": 4.0})
    series.times.append(4.0)
    assert series.increase("a", (0.0, 1.0)) == 2.0


def test_serving_takes_as_many_versions_as_there_is_time_for():
    assert Progress(None).has_time_for(1e9)
    assert Progress(1e9).has_time_for(1.0)
    assert not Progress(5.0).has_time_for(5.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_groups_of_the_load_begin_where_they_would_be_after_a_while(device):
    setting = setting_of(device=device, is_tiny=device == "cpu")
    left = setting.max_tokens - np.array([setting.num_begun(number) for number in range(setting.prompts)])
    assert (np.diff(left) == setting.max_tokens // setting.prompts).all(), "they end one after another"
    assert left[-1] == setting.max_tokens
