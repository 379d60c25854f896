"""What the bits of the device's kernels are a property of, in words and by example."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from pathlib import Path

import torch
import triton
from torch import Tensor

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.cuda.attention import attention
from shared.kernels.cuda.gemm import REFERENCE, gemm
from shared.kernels.cuda.head import read_head
from shared.kernels.cuda.rowwise import Rope, SiluMul, rms_norm

_SOURCES = Path(__file__).parent


def describe_device() -> str:
    """Device, driver, libraries and the kernels' sources."""
    return f"{describe_machine()} kernels={source_digest()}"


@functools.cache
def describe_machine() -> str:
    """Device, driver and libraries."""
    if not torch.cuda.is_available():
        return f"device='no CUDA device' triton={triton.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return (
        f"device={torch.cuda.get_device_name()!r} sm={major}{minor} driver={driver_version()} cuda={torch.version.cuda} "
        f"cublaslt={cublaslt_version()} triton={triton.__version__}"
    )


def driver_version() -> str:
    """Of the kernel module, as the driver itself says; the CUDA version it supports where that can't be read."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found else f"cuda-{torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def cublaslt_version() -> str:
    """Of the library that torch has loaded, which need not be the one that torch was built with."""
    major = str(torch.version.cuda).split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return "unknown"
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(library.cublasLtGetVersion())


@functools.cache
def source_digest() -> str:
    """Of every file of this folder."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
@torch.no_grad()
def class_digest(device: torch.device, dtype: torch.dtype) -> str:
    """A digest of what each kernel makes of fixed inputs: machines that agree on it compute alike.

    Products by the reference that every certified member equals, so that the table's choices, which depend on timing, don't show.
    """
    x, weight = _numbers((16, 1536), 1, dtype, device), _numbers((576, 1536), 2, dtype, device)
    product = gemm(x, weight, REFERENCE, bias=None, out=torch.empty(16, 576, dtype=torch.float32, device=device))
    temperature = torch.full((4,), 0.7, device=device)
    head = read_head(product.view(4, -1).repeat(1, 4), temperature, targets=torch.arange(4, device=device))
    length = 1100
    q, k, v = (_numbers((length, heads, 64), 3 + i, dtype, device) for i, heads in enumerate((2, 1, 1)))
    layout = AttentionLayout(
        q_lens=torch.tensor([length]), context_lens=torch.tensor([length]), kv_rows=torch.arange(length)[None]
    )
    outputs = (
        product,
        head.logprob,
        head.entropy,
        rms_norm(x, None, weight[0], 1e-6)[0],
        SiluMul.apply(x, weight[:16]),
        Rope.apply(q[:16], k[:16, 0, :32].contiguous(), k[16:32, 0, :32].contiguous()),
        attention(q, k, v, layout, 0.125),
    )
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(output.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of wide exponents from integers alone: a generator's floats depend on the CPU that drew them."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = torch.randint(-255, 256, shape, generator=generator).float()
    exponent = torch.randint(0, 9, shape, generator=generator)
    return (mantissa * (1 << exponent) * 2.0**-14).to(dtype).to(device)
