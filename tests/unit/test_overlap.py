"""What the overlap benchmark says of a step: parts, what they hide, and the record against a step without overlap."""

from __future__ import annotations

import pytest

from benchmarks import loop, overlap
from tests.unit.loop_fixture import outcome
from timzero.job import load_job

JOB = load_job(loop.CONFIG, loop.TINY)


@pytest.mark.parametrize(("begin", "overlapped", "neither"), [(6.0, 0.0, 0.0), (2.0, 4.0, 4.0), (4.0, 2.0, 2.0)])
def test_a_step_is_generation_and_training_less_what_they_share_and_what_neither_needs(begin, overlapped, neither):
    for parts in overlap.parts_of(*outcome(begin_training=begin)):
        assert parts.generation == pytest.approx(6)
        assert parts.training == pytest.approx(4)
        assert parts.overlapped == pytest.approx(overlapped)
        assert parts.neither == pytest.approx(neither)
        assert parts.larger == pytest.approx(6)
        assert parts.hidden == pytest.approx(overlapped / 4)


def test_records_name_the_setting_and_compare_with_the_step_without_overlap():
    found, series = outcome(begin_training=2.0)
    steps = overlap.parts_of(found, series)
    records = {r.metric: r for r in overlap.records("lag 1", JOB, found, steps, 15.0)}
    assert (records["step_s"].baseline, records["step_s"].ratio) == ("lag 0", pytest.approx(1.5))
    assert records["step_to_larger"].value == pytest.approx(10 / 6)
    assert records["hidden"].value == pytest.approx(1)
    assert records["differing_bits"].value == 0
    assert {r.params["lag"] for r in records.values()} == {1}
    assert next(overlap.records("lag 0", JOB, found, steps, None)).ratio is None
