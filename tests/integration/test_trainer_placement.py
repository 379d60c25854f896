"""Where the model lies changes no bit; what does not fit its config is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.distributed import World, join
from services.trainer.learner import Learner
from services.trainer.policy import Placement, load_policy
from shared.kernels import build_ops
from shared.models import load_model
from shared.wire.run import OptimizerConfig, RunConfig
from tests.integration.trainer_testing import engine_of, masters, publish, run_config, train_steps

pytest_plugins = ("tests.integration.trainer_fixtures",)
pytestmark = pytest.mark.usefixtures("world")


def learner_at(config: RunConfig, world: World, placement: Placement) -> Learner:
    dtype = getattr(torch, config.dtype)
    decoder = load_policy(
        Path(config.model),
        build_ops("exact"),
        dtype,
        world,
        activation_checkpointing=config.activation_checkpointing,
        placement=placement,
    )
    return Learner(decoder, config, dtype, world)


@pytest.mark.parametrize(
    "placement", [Placement(reshard_after_forward=False), Placement(offload=True)], ids=["gathered", "offloaded"]
)
def test_where_the_model_lies_changes_no_bit(model: Path, world: World, placement: Placement) -> None:
    """Scoring without gradients in between: nothing gathered may outlive an optimizer step."""
    config = run_config(model, lag=1, micro_batch_tokens=40, optimizer=OptimizerConfig(lr=1e-2))
    trained = []
    for where in (Placement(), placement):
        learner = learner_at(config, world, where)
        results = train_steps(learner, range(3), {0: engine_of(learner, publish(learner, 0))})
        assert all(result.mismatch.is_exact for result in results)
        trained.append((masters(learner), [result.metrics for result in results]))
    (weights, metrics), (others, theirs) = trained
    assert theirs == metrics
    assert all(torch.equal(others[name].view(torch.int32), w.view(torch.int32)) for name, w in weights.items())


def test_masters_are_the_directorys_weights(model: Path, world: World) -> None:
    loaded = learner_at(run_config(model), world, Placement())
    plain = dict(load_model(model, build_ops("exact"), torch.float32).named_parameters())
    found = masters(loaded)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_weights_that_do_not_fit_are_refused_by_name(model: Path, world: World, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors["model.extra"] = torch.zeros(2)
    tensors[name] = tensors[name][1:].contiguous()
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ValueError, match="do not fit its config") as error:
        learner_at(run_config(tmp_path), world, Placement())
    for text in ("model.extra [2] is unknown", name, "model.norm.weight is missing"):
        assert text in str(error.value)


def test_a_rank_without_a_gpu_of_its_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="rank 1 would compute on GPU 1 of this machine, which shows 1; start as many"):
        join("cuda", timeout_s=1.0)
