"""`python tests/kernels/cuda_compile.py CAPABILITY`: compiles every CUDA kernel for a GPU that need not be there.

Triton asks its driver for nothing but the target's name until a kernel is launched, and here none is. Prints one JSON line per
compiled variant. Not to be run under Triton's interpreter.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import FutureKernel
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from shared.kernels import AttentionLayout, SamplingParams
from shared.kernels.certify import BUCKETS, Entry, Table
from shared.kernels.cuda import checksum, fast, merged, xxh3
from shared.kernels.cuda.attention_hopper import hopper_forward
from shared.kernels.cuda.attention_packed import ForwardShape, pack, packed_forward
from shared.kernels.cuda.attention_schedule import deal
from shared.kernels.cuda.gemm import FEW_TOKENS, MANY_TOKENS, REFERENCE, compile_tiles, gemm, gemm_kernel
from shared.kernels.cuda.grouped import combine, grouped_linear, route
from shared.kernels.cuda.ops import CudaOps
from shared.kernels.cuda.rowwise import rms_norm


class Target:
    """The driver of a device that is only named."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class AnyTable(Table):
    """Dispatches everything to the reference."""

    def entry(self, *shape: Any, has_bias: bool = False) -> Entry:
        return Entry([REFERENCE.name] * len(BUCKETS), [0.0] * len(BUCKETS), REFERENCE.name, limit=16384)


def compile_only() -> None:
    """Every launch compiles, and prints what came out, but does not run."""
    launch, seen = JITFunction.run, set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if isinstance(kernel, FutureKernel):
            kernel = kernel.result()
        if kernel is not None and kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"kernel": self.__name__, "shared_bytes": kernel.metadata.shared}), flush=True)
        return kernel

    JITFunction.run = run


def half(*shape: int, grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=grad)


def attend(ops: CudaOps, heads: tuple[int, int, int], page_size: int, **options: Any) -> None:
    """Training with a shared prompt, then every kind of cached launch in one call, and decodes of many sequences."""
    h, kv, d = heads
    layout = AttentionLayout(
        q_lens=torch.tensor([300, 70]), context_lens=torch.tensor([300, 370]),
        kv_rows=torch.arange(370).expand(2, -1),
    )  # fmt: skip
    out = ops.attention(
        half(370, h, d, grad=True), *(half(370, kv, d, grad=True) for _ in range(2)), layout, 0.1, **options
    )
    out.backward(torch.zeros_like(out))
    contexts = [300, 3000, 500, 2000, 300]
    num_pages = -(-max(contexts) // page_size)
    layout = AttentionLayout(
        q_lens=torch.tensor([1, 1, 2, 3, 300]), context_lens=torch.tensor(contexts),
        pages=torch.zeros(5, num_pages, dtype=torch.int64), page_size=page_size,
    )  # fmt: skip
    stores = half(num_pages * page_size, kv, d), half(num_pages * page_size, kv, d)
    ops.attention(half(307, h, d), *stores, layout, 0.1, **options)
    decodes = AttentionLayout(
        q_lens=torch.ones(512, dtype=torch.int64), context_lens=torch.tensor([300, 3000]).repeat(256),
        pages=torch.zeros(512, num_pages, dtype=torch.int64), page_size=page_size,
    )  # fmt: skip
    ops.attention(half(512, h, d), *stores, decodes, 0.1, **options)
    ops.write_kv(half(307, kv, d), half(307, kv, d), stores, layout)


def compile_fast() -> None:
    """What the fast mode compiles differently: other chunks, logits that are not float32."""
    fast.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    ops = fast.FastCudaOps(torch.device("cpu"))
    attend(ops, (16, 8, 128), 64)
    x, weight, ids, ones = half(33, 576, grad=True), half(9001, 576, grad=True), torch.arange(33), torch.ones(33)
    scored = ops.lm_logprob(x, weight, ids, ones)
    (scored.logprob.sum() + scored.entropy.sum()).backward()
    fields = {"seed": [1] * 33, "prompt": [1] * 33, "sample": [1] * 33, "position": [1] * 33, "temperature": [1.0] * 33}
    ops.sample(x.detach(), weight.detach(), SamplingParams.of(**fields, top_k=[5] * 33))


def compile_all(ops: CudaOps) -> None:
    for heads, page_size, options in (
        ((16, 8, 128), 64, {}),
        ((9, 3, 64), 1, {"sliding_window": 100}),
        ((8, 1, 80), 16, {"softcap": 30.0}),
        ((4, 1, 256), 256, {}),
    ):
        attend(ops, heads, page_size, **options)
    q, k = half(300, 16, 128), half(300, 8, 128)
    for ones, is_flat in itertools.product((8, 16), (False, True)):
        packed = pack([300], 2, q.device)
        packed_forward(q, k, k, packed, scale=0.1, window=0, softcap=0.0, shape=ForwardShape(ones, is_flat))
    hopper_forward(q, k, k, deal([300], [300], 16, 8, q.device, num_programs=132), scale=0.1)
    x, weight = half(33, 576, grad=True), half(960, 576, grad=True)
    compile_products(x.detach(), weight.detach())
    ops.linear(x, weight, half(960, grad=True)).sum().backward()
    torch.cat(rms_norm(x, half(33, 576, grad=True), half(576, grad=True), 1e-6)).sum().backward()
    ops.rms_norm(x, half(576, grad=True), 1e-6).sum().backward()
    ops.silu_mul(x, half(33, 576, grad=True)).sum().backward()
    ops.rope(half(33, 9, 64, grad=True), half(33, 32), half(33, 32)).sum().backward()
    ids = torch.arange(33)
    embedding = half(9001, 576, grad=True)
    ops.embedding(ids, embedding).sum().backward()
    scored = ops.lm_logprob(x, embedding, ids, torch.ones(33))
    (scored.logprob.sum() + scored.entropy.sum()).backward()
    fields = {"seed": [1] * 33, "prompt": [1] * 33, "sample": [1] * 33, "position": [1] * 33, "temperature": [1.0] * 33}
    filters = {"top_k": [5] * 33, "top_p": [0.9] * 33, "min_p": [0.1] * 33}
    ops.sample(x.detach(), embedding.detach(), SamplingParams.of(**fields, **filters))
    routing = route(torch.arange(8).view(4, 2), 8, 16)
    rows = grouped_linear(half(4, 64, grad=True), half(8, 32, 64, grad=True), routing, gather=True)
    rows = grouped_linear(rows, half(8, 64, 32, grad=True), routing, gather=False)
    combine(rows, torch.ones(4, 2, requires_grad=True), routing).sum().backward()


def compile_products(x: Tensor, weight: Tensor) -> None:
    """Every tile, ahead and in parallel; nothing is left to compile when a product runs."""
    tiles, out = (REFERENCE, *FEW_TOKENS, *MANY_TOKENS), half(33, 960)
    compile_tiles(tiles, x, weight, has_bias=False, out=out)
    kernels = gemm_kernel.device_caches[0][0]
    ready = len(kernels)
    assert ready >= len(tiles), ready
    for tile in tiles:
        gemm(x, weight, tile, bias=None, out=out)
    assert len(kernels) == ready


def compile_merged() -> None:
    """The engine's row operations, and those they are compared with when they are built."""
    merged._same_bits = lambda a, b: True  # nothing has run
    for heads, has_norms in (((16, 8, 128), True), ((9, 3, 64), False)):
        merged.MergedRows(heads, torch.bfloat16, torch.device("cpu"), has_norms=has_norms)


def compile_digests() -> None:
    offsets, counts = np.array([0, 4096]), np.array([4, 70])
    xxh3.walk(torch.zeros(2**17, dtype=torch.uint8), offsets, counts, np.zeros(8, np.uint64), np.zeros(24, np.uint64))
    checksum.weighted_sums([torch.zeros(7, dtype=torch.int32)], -1640531535)


if __name__ == "__main__":
    driver.set_active(Target(int(sys.argv[1])))
    compile_only()
    compile_all(CudaOps(torch.device("cpu"), AnyTable(Path(tempfile.mkdtemp()))))
    compile_fast()
    compile_merged()
    compile_digests()
