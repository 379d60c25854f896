"""Files for `timzero train`, the directory that a run gets, and the lines that it prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared.config import ConfigError
from tests.unit.report_fixture import make_data
from timzero.display import step_line, summary_lines
from timzero.envs import make
from timzero.job import load_job
from timzero.outcome import Evaluation, Outcome
from timzero.session import JOB_FILE, RESULT_FILE, claim_directory
from timzero.steps import by_step
from timzero.submit import SubmitError, read_items

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_example_is_valid_and_its_prompts_fit(path):
    job = load_job(path)
    assert job.run.run == path.stem
    task = make(job.environment).task(0, seed=job.run.seed)
    assert task.prompt
    assert job.sampling.max_tokens < job.run.max_model_len


def test_the_main_job_is_what_it_is_said_to_be():
    job = load_job(CONFIGS[0].with_name("products.toml"))
    assert job.run.optimizer.lr == 2e-5
    assert (job.run.prompts_per_step, job.run.samples_per_prompt, job.run.temperature, job.run.lag) == (8, 8, 1.0, 1)
    assert job.sampling.max_tokens == 6
    assert job.environment["prefill"] == "The answer is"


def test_overrides_may_leave_out_the_table():
    words = [
        "num_steps=3",
        "optimizer.lr=1e-3",
        "rollout.max_chunk_tokens=16",
        "replicas=3",
        "environment.size=7",
    ]
    job = load_job(CONFIGS[0], words)
    assert (job.run.num_steps, job.run.optimizer.lr, job.local.replicas) == (3, 1e-3, 3)
    assert job.local.rollout == {"max_chunk_tokens": 16}
    assert job.environment["size"] == 7


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_step=3", "num_step"),
        ("evaluation.num_task=3", "nearest key is evaluation.num_tasks"),
        ("sampling.max_tokens=0", "max_tokens must be >= 1"),
        ("evaluation.num_tasks=5000", r"in \[0, 1024\]"),
        ("local.replicas=0", "replicas must be >= 1"),
        ("numerics=exacty", "'exact' or 'fast'"),
        ("just_a_word", "expected key=value"),
    ],
)
def test_a_bad_override_is_refused_by_name(word, message):
    with pytest.raises(ConfigError, match=message):
        load_job(CONFIGS[0], [word])


def test_an_interrupted_run_goes_on_and_an_ended_or_other_one_gets_the_next_name(tmp_path):
    job, notes = load_job(CONFIGS[0]).with_run(run="demo"), []
    first, directory = claim_directory(job, tmp_path, notes.append)
    assert (first.run.run, directory) == ("demo", tmp_path / "demo")

    again, same = claim_directory(job, tmp_path, notes.append)
    assert (again, same) == (first, directory)
    assert notes == ["run demo was interrupted; it goes on"]

    other, _ = claim_directory(job.with_run(num_steps=1), tmp_path, notes.append)
    assert other.run.run == "demo-2"

    (directory / RESULT_FILE).write_text("{}")
    third, _ = claim_directory(job, tmp_path, notes.append)
    assert third.run.run == "demo-3"
    assert json.loads((tmp_path / "demo-3" / JOB_FILE).read_text())["run"]["run"] == "demo-3"


def outcome(**changes):
    data = make_data(numerics=changes.pop("numerics", "exact"), num_steps=3)
    steps = tuple(by_step(data.steps))
    made = Outcome(
        run=data.run,
        steps=steps,
        metrics=data.metrics,
        before=Evaluation(rewards=(1.0, 0.0, 0.5, 0.0)),
        after=Evaluation(rewards=(1.0, 1.0, 1.0, 0.5)),
        published_digest=steps[-1].digest,
    )
    return replace(made, **changes)


def test_the_last_lines_are_exactly_these():
    made = outcome()
    num_tokens = sum(s.tokens for s in made.steps)
    assert summary_lines(made, "/r.html") == [
        "evaluation accuracy: 0.250 -> 0.750",
        f"tokens compared: {num_tokens}, differing bits: 0",
        "accepted 192 = trained 192 + dropped 0 + live 0",
        f"weights digest: {2:064x}",
        "report: /r.html",
    ]
    assert made.problems == []


def test_fast_runs_say_how_large_the_mismatch_is():
    lines = summary_lines(outcome(numerics="fast"), None)
    assert lines[2].startswith("TIM |delta logprob|: mean 0.04, p99 0.")
    assert lines[2].endswith("flips: 9")
    assert outcome(numerics="fast").problems == []


def test_what_is_wrong_with_a_run_is_a_problem():
    made = outcome()
    m = dict(made.metrics)
    assert "lost or counted twice" in outcome(metrics=m | {"accepted": 193}).problems[0]
    assert "weight_sync's none" in outcome(published_digest="").problems[0]
    stopped = made.run | {"state": "stopped", "reason": "operator", "detail": ""}
    assert "the run is stopped (operator" in outcome(run=stopped).problems[0]

    tim = made.steps[0].metrics["tim"]
    cases = [({"differing_bits": 3}, "3 bits"), ({"compared_tokens": tim["compared_tokens"] - 2}, "2 trained tokens")]
    for change, message in cases:
        bad = replace(made.steps[0], metrics=made.steps[0].metrics | {"tim": tim | change})
        assert message in outcome(steps=(bad, *made.steps[1:])).problems[0]


def test_a_step_line_names_reward_tim_lag_and_speed():
    line = step_line(outcome().steps[1], 3)
    for part in ("step 2/3", "reward", "TIM", "0 differing bits of", "lag 1", "tokens/s"):
        assert part in line


def test_a_file_to_submit_is_checked_line_by_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "number": 9}\n')
    assert read_items(path) == [{"prompt": "a"}, {"prompt": "b", "number": 9}]
    for text, message in (("{", ":1: not JSON"), ("[1]", ":1: expected a JSON object"), ("\n", "holds no prompt")):
        path.write_text(text)
        with pytest.raises(SubmitError, match=message):
            read_items(path)
    with pytest.raises(SubmitError, match="cannot read"):
        read_items(tmp_path / "missing")
