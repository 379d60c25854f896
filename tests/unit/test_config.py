"""Configuration: sources and their order, errors that name the key and what to do, and the run's own rules."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import EXIT_CONFIG, ConfigError, keys, load, load_or_exit, strict, structure, unstructure
from shared.wire.run import AlgorithmConfig, OptimizerConfig, RunConfig, RunState


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    depth: int = 1
    """How deep."""
    cap: float | None = 2.0


@strict
@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    host: str = "127.0.0.1"
    port: int = 0
    ratio: float = 0.5
    verbose: bool = False
    names: tuple[str, ...] = ()
    api_key: str = ""
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None


def loaded(*overrides: str, environ: dict[str, str] | None = None, path: Path | None = None) -> Config:
    return load(Config, service="demo", path=path, overrides=overrides, environ=environ or {})


runs = st.builds(
    RunConfig,
    run=st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z"),
    model=st.text(min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
    numerics=st.sampled_from(["exact", "fast"]),
    prompts_per_step=st.integers(8, 100),
    samples_per_prompt=st.integers(2, 100),
    lag=st.integers(0, 10),
    temperature=st.floats(0.01, 10),
    algorithm=st.builds(
        AlgorithmConfig,
        mini_steps=st.integers(1, 8),
        tis_cap=st.none() | st.floats(0.1, 10),
        rejection=st.sampled_from(["seq_mean_k1", "seq_sum_k3"]),
        rejection_bounds=st.tuples(st.floats(0.01, 1), st.floats(1, 100)),
    ),
    optimizer=st.builds(OptimizerConfig, lr=st.floats(0, 1), betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999))),
)


@given(runs)
def test_a_run_comes_back_from_json_unchanged(config: RunConfig) -> None:
    assert structure(RunConfig, json.loads(json.dumps(unstructure(config)))) == config


@given(st.sampled_from([f.name for f in fields(RunConfig)]), st.data())
def test_an_unknown_key_names_the_nearest_one(name: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(name) - 1))
    misspelt = name[:cut] + "_" + name[cut:] if len(name) > 3 else name + "_" + name
    known = {f.name for f in fields(RunConfig)}
    if misspelt in known:
        return
    with pytest.raises(ConfigError, match=rf"unknown key {misspelt}; the nearest key is (\w+)") as error:
        structure(RunConfig, {misspelt: 1})
    assert str(error.value).rsplit(" ", 1)[-1] in known


def test_a_nested_unknown_key_is_named_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"unknown key inner\.dept; the nearest key is inner\.depth"):
        loaded("inner.dept=3")
    with pytest.raises(ConfigError, match=r"unknown key other\.dept; the nearest key is other\.depth"):
        loaded("other.dept=3")


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('host = "file"\nport = 1\n[inner]\ndepth = 1\n')
    environ = {"TIMZERO_DEMO_PORT": "2", "TIMZERO_DEMO_INNER__DEPTH": "2", "TIMZERO_OTHER_PORT": "9"}
    assert loaded(path=path) == Config(host="file", port=1)
    assert loaded(path=path, environ=environ) == Config(host="file", port=2, inner=Inner(depth=2))
    assert loaded("port=3", "inner.depth=3", path=path, environ=environ).inner.depth == 3


@given(file=st.integers(), environment=st.integers(), argument=st.integers(), present=st.sets(st.integers(0, 2)))
def test_the_last_source_present_decides(
    tmp_path_factory: pytest.TempPathFactory, file: int, environment: int, argument: int, present: set[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "precedence.toml"
    in_range = [value % 2**31 for value in (file, environment, argument)]
    path.write_text(f"port = {in_range[0]}" if 0 in present else "")
    environ = {"TIMZERO_DEMO_PORT": str(in_range[1])} if 1 in present else {}
    overrides = [f"port={in_range[2]}"] if 2 in present else []
    got = load(Config, service="demo", path=path, environ=environ, overrides=overrides).port
    assert got == (in_range[max(present)] if present else 0)


def test_a_file_may_hold_one_table_per_service(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text("[demo]\nport = 4\n[trainer]\nanything = 1\n")
    assert loaded(path=path).port == 4


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=30))
def test_a_text_field_takes_any_text_as_it_is(text: str) -> None:
    assert loaded(f"host={text}").host == text
    assert loaded(environ={"TIMZERO_DEMO_API_KEY": text}).api_key == text


@pytest.mark.parametrize("text", ["12345", "true", "2026-11-29", "[1]", "1\ny = 2"])
def test_a_text_that_looks_like_another_type_stays_text_in_a_text_field(text: str) -> None:
    assert loaded(f"api_key={text}").api_key == text


def test_texts_become_the_types_of_their_fields() -> None:
    config = loaded(
        "port=8000", "ratio=1e-3", "verbose=true", 'names=["a", "b"]', "inner.cap=none", "other={depth = 4}"
    )
    assert config == Config(
        port=8000, ratio=1e-3, verbose=True, names=("a", "b"), inner=Inner(cap=None), other=Inner(depth=4)
    )


def test_none_in_a_file_clears_what_may_be_none(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[inner]\ncap = "none"\n')
    assert loaded(path=path).inner.cap is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("port", "expected key=value, got 'port'"),
        ("port=many", r"port: .*got 'many'"),
        ("port.x=1", r"port: .*got \{'x': 1\}"),
        ("inner=3", "inner: .*got 3"),
        ("ratio=nan", "ratio: .*finite.*got 'nan'"),
        ("=3", "unknown key"),
    ],
)
def test_a_bad_word_is_named(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(word)


def test_a_value_cannot_have_keys_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"TIMZERO_DEMO_PORT__X: port is a value and has no keys of its own"):
        loaded(environ={"TIMZERO_DEMO_PORT": "1", "TIMZERO_DEMO_PORT__X": "1"})


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    for candidate in (path, tmp_path / "absent.toml"):
        with pytest.raises(ConfigError, match=f"cannot read configuration .*{candidate.name}"):
            loaded(path=candidate)


def test_an_error_never_shows_a_credential() -> None:
    with pytest.raises(ConfigError) as error:
        structure(Config, {"api_key": ["hush-hush"], "port": "x"})
    assert "api_key" in str(error.value)
    assert "hush" not in str(error.value)
    assert error.value.__cause__ is None


def test_a_service_exits_with_the_configuration_code_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_or_exit(Config, service="demo", argv=["prot=1"])
    assert stop.value.code == EXIT_CONFIG
    assert capsys.readouterr().err == "demo: unknown key prot; the nearest key is port\n"


def test_help_lists_every_key_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_or_exit(Config, service="demo", argv=["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in ("port: int = 0", "inner.depth: int = 1", "How deep.", "host: str = '127.0.0.1'"):
        assert line in text
    assert [k.name for k in keys(Inner)] == ["depth", "cap"]


GOOD = {"run": "demo", "model": "some/model"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "a b"}, "run must be 1 to 64 ASCII letters, digits, '-' or '_', got 'a b'"),
        ({"run": "é"}, "ASCII"),
        ({"run": "x" * 65}, "1 to 64"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"num_steps": 0}, "num_steps must be >= 1, got 0"),
        ({"lag": -1}, "lag"),
        ({"temperature": 0}, "greedy belongs to the evaluation lane"),
        ({"reward_deadline_s": 0}, "reward_deadline_s"),
        ({"reward_deadline_s": math.inf}, "reward_deadline_s: Input should be a finite number, got inf"),
        ({"min_group": 3}, r"min_group \(3\) belongs to max_lag"),
        ({"max_lag": 1, "min_group": 1}, r"min_group must be in \[2, 8\] with grpo .*got 1"),
        ({"max_lag": 1, "min_group": 9}, r"min_group must be in \[2, 8\] .* samples_per_prompt 8, got 9"),
        ({"samples_per_prompt": 1}, "grpo compares siblings"),
        ({"algorithm": {"mini_steps": 9}}, r"mini_steps \(9\) exceeds prompts_per_step \(8\)"),
        ({"algorithm": {"tis_cap": 0}}, "tis_cap"),
        ({"algorithm": {"clip_low": 1.5}}, "clip_low"),
        ({"algorithm": {"rejection": "seq_mean_k1", "rejection_bounds": [2, 3]}}, "rejection_bounds"),
        ({"algorithm": {"clip_high": 0.4}}, "no ratio there is clipped"),
        (
            {"algorithm": {"clip_low": 0.4, "mini_steps": 2, "mode": "bypass", "tis_cap": None, "loss": "cispo"}},
            "clip_low 0.4",
        ),
        ({"algorithm": {"clip_high": 0.1, "loss": "reinforce"}}, "does nothing in loss reinforce"),
        ({"algorithm": {"dynamic_sampling": True, "dynamic_groups": 9}}, "from which they are taken"),
        ({"audit_share": 1.5}, "audit_share must be in"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
        ({"optimizer": {"lr": -1e-5}}, "optimizer.lr"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas"),
        ({"optimizer": {"eps": 0}}, "optimizer.eps"),
        ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm"),
        ({"queue_batches": 7}, "the run would deadlock"),
        ({"max_lag": -1}, "max_lag must be >= 0, got -1"),
        ({"max_lag": 2, "lag": 2}, r"lag \(2\) and max_lag \(2\) exclude each other"),
        ({"max_lag": 3, "queue_batches": 9}, r"must exceed checkpoint_interval \+ max_lag \+ 1 = 9, got 9"),
        ({"num_steps": "many"}, "num_steps: .*got 'many'"),
        ({"model": None}, "model"),
    ],
)
def test_a_run_that_cannot_work_is_refused_with_the_value(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        structure(RunConfig, GOOD | changes)


@given(max_lag=st.integers(0, 5), batch=st.integers(0, 20), interval=st.integers(1, 5))
def test_under_max_lag_versions_and_the_queue_reach_as_far_back_as_it(max_lag: int, batch: int, interval: int) -> None:
    config = RunConfig(run="r", model="m", max_lag=max_lag, checkpoint_interval=interval)
    assert config.oldest_lag == max_lag
    assert config.version_for(batch) == max(0, batch - max_lag)
    assert config.queue_bound_batches > interval + max_lag + 1


def test_a_group_is_trained_whole_under_a_fixed_lag_and_by_its_survivors_under_max_lag() -> None:
    whole = {"run": "r", "model": "m", "samples_per_prompt": 4}
    assert RunConfig(**whole).least_survivors == 4
    assert RunConfig(**whole, max_lag=1).least_survivors == 2
    assert RunConfig(**whole, max_lag=1, min_group=4).least_survivors == 4
    alone = AlgorithmConfig(advantage="reinforce_whitened")
    assert RunConfig(**whole | {"samples_per_prompt": 1}, max_lag=1, algorithm=alone).least_survivors == 1
    assert RunConfig(**whole, max_lag=1, min_group=1, algorithm=alone).least_survivors == 1


def test_a_run_needs_a_name_and_a_model() -> None:
    with pytest.raises(ConfigError, match="run is required; model is required"):
        structure(RunConfig, {})


@given(runs, st.integers(0, 10**6))
def test_a_batch_is_sampled_by_the_version_lag_steps_before_it(config: RunConfig, number: int) -> None:
    batch = config.batch_of(number)
    assert batch * config.prompts_per_step <= number < (batch + 1) * config.prompts_per_step
    assert config.version_for(batch) == max(0, batch - config.lag)
    assert config.queue_bound_batches > config.checkpoint_interval + config.lag


def test_only_three_states_are_the_end_of_a_run() -> None:
    assert {s for s in RunState if s.is_over} == {RunState.COMPLETED, RunState.STOPPED, RunState.FAILED}
