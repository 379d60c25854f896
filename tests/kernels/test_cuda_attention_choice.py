"""How packed attention is dealt to programs, and when its kernel for Hopper is refused; interpreted."""

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.compiler.errors import CompilationError

from shared.kernels.cuda import attention_choice
from shared.kernels.cuda.attention_choice import HOPPER, PLAIN, describe, difference, settle, takes
from shared.kernels.cuda.attention_packed import pack, packed_forward
from shared.kernels.cuda.attention_schedule import RECORD, ROWS, Schedule, deal
from tests.kernels.cuda_testing import DEVICE, qkv

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
LENS, CONTEXTS = [3, 1, 20], [3, 66, 20]
HEADS = (2, 1, 16)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 2000)), min_size=1, max_size=8),
    st.sampled_from([(1, 1), (16, 8), (8, 1), (128, 2)]),
    st.integers(1, 150),
)
def test_every_query_of_every_head_is_dealt_once(sizes: list, heads: tuple[int, int], num_programs: int) -> None:
    lens, contexts = [n for n, _ in sizes], [n + before for n, before in sizes]
    schedule = deal(lens, contexts, *heads, CPU, num_programs=num_programs)
    table, starts = schedule.table.numpy(), schedule.starts.numpy()
    assert table.shape[1] == RECORD
    assert starts[0] == 0
    assert starts[-1] == len(table)
    assert len(starts) - 1 == min(num_programs, len(table))
    assert (np.diff(starts) > 0).all(), "no program is idle"
    per_tile = 2 * ROWS * heads[1] // heads[0]
    seen = np.zeros((sum(lens), heads[1]), int)
    q_start, k_start = np.cumsum(lens) - lens, np.cumsum(contexts) - contexts
    for row_0, query, p_lo, last, left, kv_head in table[:, :6]:
        s = np.searchsorted(k_start, row_0, "right") - 1
        count = min(left, per_tile)
        assert (row_0, query + left) == (k_start[s], q_start[s] + lens[s])
        assert (p_lo, last) == (query - q_start[s] + contexts[s] - lens[s], p_lo + count - 1)
        seen[query : query + count, kv_head] += 1
    assert (seen == 1).all()


def test_programs_have_about_the_same_to_do() -> None:
    schedule = deal([4096] * 4, [4096] * 4, 16, 8, CPU, num_programs=132)
    blocks = schedule.table[:, 3].numpy() // 64 + 1 + 1.5
    work = np.add.reduceat(blocks, schedule.starts[:-1].numpy())
    assert work.max() < 1.02 * work.mean()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "CASES", ((LENS, CONTEXTS),))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, schedule: Schedule, *, scale: float) -> tuple:
    packed = pack(LENS, 2, DEVICE, context_lens=CONTEXTS)
    return packed_forward(q, k, v, packed, scale=scale, window=0, softcap=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which", [0, 1], ids=["output", "log-sum-exp"])
def test_one_bit_is_a_difference(few: None, which: int) -> None:
    def flips(*args: object, **options: float) -> tuple:
        found = plain(*args, **options)  # type: ignore[arg-type]
        bits = found[which].view({2: torch.int16, 4: torch.int32}[found[which].element_size()])
        bits.view(-1)[-1] ^= 1
        return found

    assert difference(plain, DEVICE, torch.float16, HEADS) == ""
    text = difference(flips, DEVICE, torch.float16, HEADS)
    assert text.startswith(f"1 of {sum(LENS) * 2 * (16 + 1)} values"), text
    assert str(LENS) in text


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that only says what it is."""
    monkeypatch.setattr(attention_choice, "_refusals", {})
    monkeypatch.setattr(attention_choice.triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_is_not_written_for_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "_refusal", lambda *key: "")
    for dtype, heads in (
        (torch.float16, (16, 8, 128)),
        (torch.bfloat16, (16, 8, 64)),
        (torch.bfloat16, (12, 4, 128)),
        (torch.bfloat16, (128, 1, 128)),
    ):
        settle(CUDA, dtype, heads)
    settle(CPU, torch.bfloat16, (16, 8, 128))
    q, k, _ = qkv(3, (4, 2, 128), torch.bfloat16)
    assert not takes(q.cpu(), k.cpu(), 0, 0.0)
    assert describe() == PLAIN
    settle(CUDA, torch.bfloat16, (16, 8, 128))
    assert describe() == HOPPER


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        (torch.cuda, "get_device_capability", lambda device: (8, 0), r"compute capability \(9, 0\), not \(8, 0\)"),
        (attention_choice.triton, "__version__", "3.9.0", "for triton 3.6.x, not 3.9.0"),
    ],
    ids=["device", "triton"],
)
def test_elsewhere_the_plain_kernel_runs_and_says_why(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, reason: str
) -> None:
    monkeypatch.setattr(module, name, value)
    settle(CUDA, torch.bfloat16, (16, 8, 128))
    assert describe().startswith(f"{PLAIN} (")
    assert re.search(reason, describe())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fault", ["no Gluon", "does not compile", "other bits"])
def test_a_kernel_that_fails_its_check_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Said once, in the log, and whenever kernels are read back."""

    def differs(*args: object) -> str:
        if fault == "other bits":
            return "1 of 9 values differ"
        raise CompilationError(None, None, "no such layout")

    name = "shared.kernels.cuda.attention_hopper"
    module = None if fault == "no Gluon" else SimpleNamespace(hopper_forward=None)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(attention_choice, "difference", differs)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for _ in range(2):
        settle(CUDA, torch.bfloat16, (16, 8, 128))
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    reason = {"no Gluon": "ModuleNotFoundError", "does not compile": "no such layout", "other bits": "1 of 9"}[fault]
    for text in (said.message, describe()):
        assert PLAIN in text
        assert reason in text
