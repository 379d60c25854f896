"""The decoder over the CUDA kernels, interpreted: engine and trainer are one function; what a service is told of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels import InexactKernelError, SamplingParams, build_ops, fingerprint, self_check
from shared.kernels.cuda.ops import CudaOps
from shared.models import (
    Decoder,
    KVCache,
    ModelConfig,
    completion_rows,
    packed_layout,
    paged_layout,
    prefix_shared_layout,
)
from shared.models.config import FAMILIES
from tests.kernels.cuda_testing import interpreted_ops, relative_error
from tests.kernels.kernel_testing import same_bits, tiny_config


def build(config: ModelConfig, ops: CudaOps) -> Decoder:
    decoder = Decoder(config, ops)
    decoder.init_weights(std=0.3)
    return decoder


def step(decoder: Decoder, cache: KVCache, ids: list[Tensor], tables: list[list[int]], done: list[int]) -> Tensor:
    """Hidden states of the next tokens of each sequence, computed into the cache's pages of 8."""
    layout = paged_layout(tables, 8, [len(x) for x in ids], [n + len(x) for n, x in zip(done, ids, strict=True)])
    with torch.no_grad():
        return decoder(torch.cat(ids), layout.positions, layout, cache)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_engine_and_trainer_give_the_same_bits(family: str, tmp_path: Path) -> None:
    """Chunked prefill, decode with a neighbour, the packed and the prefix-shared training forward; head included."""
    config = tiny_config(family, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=67)
    ops = interpreted_ops(tmp_path)
    decoder = build(config, ops)
    ids = torch.arange(40) * 29 % 67
    sequences = [ids, torch.cat((ids[:37], ids[:2]))]
    cache = KVCache(config, 16 * 8, torch.float32)
    pages = [[3, 9, 1, 0, 4], [14, 2, 7, 8, 5]]
    parts: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for counts in ((30, 0), (9, 38), (1, 1)):
        members = [s for s in (0, 1) if counts[s]]
        chunks = [sequences[s][done[s] : done[s] + counts[s]] for s in members]
        hidden = step(decoder, cache, chunks, [pages[s] for s in members], [done[s] for s in members])
        for s, part in zip(members, hidden.split([len(c) for c in chunks]), strict=True):
            parts[s].append(part)
            done[s] += len(part)
    assert done == [40, 39]
    engine = [torch.cat(p) for p in parts]

    packed = packed_layout([40, 39])
    trained = decoder(torch.cat(sequences), packed.positions, packed)
    assert same_bits(trained.detach(), torch.cat(engine))

    shared = prefix_shared_layout([37], [[3, 2]])
    rows, targets = completion_rows([37], [[3, 2]]), torch.cat((ids[37:], ids[:2]))
    temperature = torch.full((5,), 0.9)
    score = decoder.score(torch.cat((ids, ids[:2])), shared.positions, shared, rows, targets, temperature)
    sampled = decoder.logprobs(torch.cat((engine[0][36:39], engine[1][36:38])), targets, temperature)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(score, sampled, strict=True))


def test_training_gradients_are_the_cpus(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_heads=4, num_kv_heads=2, vocab_size=67, tie_word_embeddings=True)
    ours, theirs = build(config, interpreted_ops(tmp_path)), Decoder(config, build_ops("exact"))
    theirs.load_state_dict(ours.state_dict())
    shared, rows = prefix_shared_layout([9], [[4, 6]]), completion_rows([9], [[4, 6]])
    ids = torch.arange(19) * 29 % 67
    for decoder in (ours, theirs):
        out = decoder.score(ids, shared.positions, shared, rows, rows * 5 % 67, torch.full((10,), 0.8))
        (out.logprob.sum() + out.entropy.mean()).backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < 1e-4, name


def test_what_the_engine_samples_scores_to_the_same_bits(tmp_path: Path) -> None:
    config, ops = (
        tiny_config("llama", num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=67),
        interpreted_ops(tmp_path),
    )
    decoder = build(config, ops)
    cache = KVCache(config, 6 * 8, torch.float32)
    tokens, logprobs = [[1, 2, 3], [1, 2, 3]], []
    for i in range(4):
        fresh = [torch.tensor(t[-3:] if i == 0 else t[-1:]) for t in tokens]
        hidden = step(
            decoder, cache, fresh, [[4, 0], [1, 5]], [len(t) - len(f) for t, f in zip(tokens, fresh, strict=True)]
        )
        params = SamplingParams.of(seed=[5, 5], prompt=[0, 0], sample=[0, 1], position=[i, i], temperature=[0.9, 0.9])
        drawn = ops.sample(hidden[len(fresh[0]) - 1 :: len(fresh[0])], decoder.head_weight.detach(), params)
        logprobs.append(drawn.logprob)
        for sequence, token in zip(tokens, drawn.token.tolist(), strict=True):
            sequence.append(token)
    layout, rows = prefix_shared_layout([3], [[4, 4]]), completion_rows([3], [[4, 4]])
    completions = torch.tensor([t[3:] for t in tokens]).flatten()
    ids = torch.cat((torch.tensor([1, 2, 3]), completions))
    score = decoder.score(ids, layout.positions, layout, rows, completions, torch.full((8,), 0.9))
    assert same_bits(score.logprob.detach(), torch.stack(logprobs, 1).flatten())


def test_the_fingerprint_names_device_libraries_and_bits_but_not_the_table(tmp_path: Path) -> None:
    ops = interpreted_ops(tmp_path)
    text = fingerprint(ops, torch.float16)
    for part in ("mode=exact", "dtype=float16", f"torch={torch.__version__}", "triton=", "kernels=", "class="):
        assert part in text
    ops.linear(torch.zeros(3, 16), torch.zeros(8, 16))
    assert "128x128x64" in ops.describe()["linear"]
    assert fingerprint(ops, torch.float16) == text
    assert fingerprint(ops, torch.float32) != text


def test_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InexactKernelError, match=r"computes in bfloat16 or float16, got torch\.float32; set dtype"):
        interpreted_ops(tmp_path).certify_linear(torch.float32, [(16, 8)])


def check(directory: Path) -> None:
    self_check(interpreted_ops(directory), torch.float16, linear_shapes=((48, 96),), heads=(1, 1, 16))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_self_check_passes_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaOps, "certify_linear", lambda self, dtype, shapes: None)
    check(tmp_path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_self_check_names_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaOps, "certify_linear", lambda self, dtype, shapes: None)
    honest = CudaOps.rms_norm
    monkeypatch.setattr(CudaOps, "rms_norm", lambda self, x, w, eps: honest(self, x, w, eps) + len(x) % 2)
    with pytest.raises(InexactKernelError, match=r"^rms_norm \(cuda.rowwise.rms_norm\)"):
        check(tmp_path)


def test_without_triton_or_a_device_everything_imports_and_exact_mode_says_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    code = (
        "import shared.kernels, shared.models\n"
        "shared.kernels.build_ops('exact')\n"
        "try: shared.kernels.build_ops('exact', 'cuda')\n"
        "except ValueError as error: print(error)\n"
    )
    root = Path(__file__).resolve().parents[2]
    for path, message in ((f"{tmp_path}{os.pathsep}{root}", "needs triton"), (f"{root}", "needs a CUDA device")):
        environ = os.environ | {
            "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd=root, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert message in done.stdout
