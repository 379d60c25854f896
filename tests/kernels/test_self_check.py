"""The start-up check: it passes here, sees a leak, falls back, refuses."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.rollout.samples import UnservableRun
from services.rollout.weights import ServedRun, certified
from shared.kernels import InexactKernelError, build_ops, default_dtype, fingerprint, self_check
from shared.kernels.__main__ import main
from shared.kernels.linear import padded_linear
from shared.kernels.ops import Ops
from shared.wire.run import RunConfig
from tests.kernels.kernel_testing import DTYPES, tiny_config

module = importlib.import_module("shared.kernels.self_check")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_kernels_pass(dtype: torch.dtype) -> None:
    self_check(build_ops("exact"), dtype)
    self_check(build_ops("fast"), dtype)


def test_a_leaking_product_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "linear_candidates", lambda: [F.linear, padded_linear])
    ops = build_ops("exact")
    self_check(ops, torch.float32)
    assert ops.describe()["linear"] == "linear.padded_linear"


def test_without_an_exact_product_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "linear_candidates", lambda: [F.linear])
    with pytest.raises(
        InexactKernelError, match=r"linear .* does not give a row the same bits .* 1 rows .* OMP_NUM_THREADS"
    ):
        self_check(build_ops("exact"), torch.float32)


@pytest.mark.parametrize("op", ["attention", "silu_mul", "lm_logprob"])
def test_each_leaking_operation_is_named(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking, fast = vars(Ops)[op], build_ops("fast")
    monkeypatch.setattr(Ops, op, lambda self, *args, **kwargs: leaking(fast, *args, **kwargs))
    with pytest.raises(InexactKernelError, match=f"^{op} "):
        self_check(build_ops("exact"), torch.float32)


def test_attention_is_checked_with_the_models_window_too(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fast = Ops.attention, build_ops("fast")

    def leaks_behind_a_window(self: Ops, *args: object, **options: object) -> Tensor:
        return exact(self if options.get("sliding_window") is None else fast, *args, **options)

    monkeypatch.setattr(Ops, "attention", leaks_behind_a_window)
    self_check(build_ops("exact"), torch.float32)
    with pytest.raises(InexactKernelError, match=r"^attention .* window 50, "):
        self_check(build_ops("exact"), torch.float32, sliding_window=4096)
    run = RunConfig(run="r", model="m", numerics="exact")
    certified(ServedRun(run, tiny_config("llama"), torch.float32))
    with pytest.raises(UnservableRun, match=r"^attention .* window 37, "):
        certified(ServedRun(run, tiny_config("mistral"), torch.float32))


def test_fingerprint_names_mode_threads_and_implementations() -> None:
    ops = build_ops("exact")
    text = fingerprint(ops, torch.float32)
    assert text == fingerprint(build_ops("exact"), torch.float32)
    assert f"torch={torch.__version__}" in text
    assert "threads=1" in text
    ops.use_linear(padded_linear)
    assert text != fingerprint(ops, torch.float32)
    assert text != fingerprint(build_ops("fast"), torch.float32)
    assert text != fingerprint(build_ops("exact"), torch.bfloat16)


def test_modes_and_devices_without_kernels_are_refused() -> None:
    assert default_dtype() in DTYPES
    with pytest.raises(ValueError, match="'exact' or 'fast'"):
        build_ops("quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use device 'cpu'"):
        build_ops("exact", "meta")


def test_what_exact_mode_is_here_is_printed_or_why_there_is_none(capsys: pytest.CaptureFixture) -> None:
    assert main(["48x32"]) == 0
    assert capsys.readouterr().out.startswith("mode=exact ")
    assert main(["48"]) == 2
    assert "must be like 4096x2048, got 48" in capsys.readouterr().err
