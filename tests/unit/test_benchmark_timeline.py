"""How the loop benchmark splits a step's time: every second is counted once, and to the right part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import loop
from benchmarks.timeline import Series, outside, parse, split, windows

BUSY = "busy_sum"


def series(*points: tuple[float, float]) -> Series:
    found = Series()
    for at, total in points:
        found.add(at, {BUSY: total})
    return found


def test_a_step_is_split_into_overlap_training_generation_and_what_the_trainer_waits_for():
    # the replica computes from 2 to 6, the trainer trains from 4 to 8
    busy = series((0, 0), (2, 0), (6, 4), (10, 4))
    phases = {"lease": (0.0, 3.5), "train": (4.0, 8.0), "publish": (8.0, 9.0)}
    parts = split((0.0, 10.0), phases, busy, BUSY)
    assert parts == pytest.approx(
        {"overlapped": 2, "training": 2, "generation": 2, "lease": 2, "publish": 1, "other": 1}
    )


def test_phases_count_within_the_window_only():
    parts = split((5.0, 10.0), {"checkpoint": (4.0, 6.0), "train": (9.0, 12.0)}, series((0, 0), (20, 0)), BUSY)
    assert parts == pytest.approx({"overlapped": 0, "training": 1, "generation": 0, "checkpoint": 1, "other": 3})


@given(
    cuts=st.lists(st.floats(0, 100, allow_nan=False), min_size=6, max_size=6).map(sorted),
    steps=st.lists(st.tuples(st.floats(0.01, 20), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_the_parts_add_up_to_the_window_and_none_is_negative(cuts, steps):
    at = total = 0.0
    points = [(at, total)]
    for length, share in steps:
        at, total = at + length, total + length * share
        points.append((at, total))
    phases = {"lease": cuts[0:2], "score": cuts[2:4], "publish": cuts[4:6]}
    parts = split((10.0, 90.0), phases, series(*points), BUSY)
    assert sum(parts.values()) == pytest.approx(80.0)
    assert all(seconds > -1e-6 for seconds in parts.values())


def test_what_the_trainer_leaves_of_a_window_is_what_it_does_not_compute_in():
    phases = {"lease": (0.0, 3.0), "score": (3.0, 5.0), "train": (5.0, 8.0), "publish": (8.0, 9.0)}
    assert outside((0.0, 10.0), phases) == [(0.0, 3.0), (8.0, 10.0)]
    assert outside((4.0, 7.0), phases) == []
    assert outside((0.0, 10.0), {"train": (2.0, 12.0)}) == [(0.0, 2.0)]
    assert outside((1.0, 2.0), {"lease": (0.0, 3.0)}) == [(1.0, 2.0)]


def test_waiting_is_told_apart_where_the_trainer_computes_meanwhile():
    """From 0 to 4 the replica is alone and waits a tenth of the time, from 4 to 8 the trainer computes too and it waits half."""
    found = Series()
    for at, device, idle in ((0, 0.0, 0.0), (4, 3.6, 0.4), (8, 5.6, 2.4), (9, 5.6, 2.4)):
        found.add(at, {loop.DEVICE[0]: device, loop.IDLE: idle, loop.FULL: device / 2, loop.FULL_IDLE: idle / 4})
    spans = outside((0.0, 9.0), {"train": (4.0, 8.0)})
    assert loop.on_device(found, *spans) == pytest.approx(3.6)
    assert loop.waiting(found, *spans) == pytest.approx(0.1)
    assert loop.waiting(found, (0.0, 9.0)) == pytest.approx(0.3)
    assert loop.waiting(found, *spans, device=(loop.FULL,), idle=loop.FULL_IDLE) == pytest.approx(0.1 / 1.9)


def test_the_first_two_steps_and_the_last_are_not_timed():
    rows = [{"time": float(i), "step": i} for i in range(6)]
    assert [(window, row["step"]) for window, row in windows(rows)] == [
        ((1.0, 2.0), 2),
        ((2.0, 3.0), 3),
        ((3.0, 4.0), 4),
    ]


def test_a_metrics_page_is_summed_over_labels_and_kept_by_phase_and_by_transport():
    counter = '# TYPE a counter\na_total{x="1",phase="idle"} 2\na_total{x="2"} 3\na_total{transport="shm"} 4\n'
    page = counter + '# TYPE b histogram\nb_bucket{le="+Inf"} 1\nb_sum 0.5\nb_count 1\n'
    assert parse(page) == {
        "a_total": 9.0,
        "a_total:idle": 2.0,
        "a_total:shm": 4.0,
        "b_bucket": 1.0,
        "b_sum": 0.5,
        "b_count": 1.0,
    }
