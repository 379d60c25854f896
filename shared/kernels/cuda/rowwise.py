"""Row by row: RMSNorm (with the residual add fused), RoPE, SiLU-mul, and writing keys and values into the cache.

Rounding points are those of the CPU side (`shared.kernels.norm`, `rope`, `activation`), which are Hugging Face's. How many
rows one program holds is a function of the row's length alone, so that no bit depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


@triton.jit
def norm_kernel(
    x, residual, weight, y, total, scales, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """total = x + residual (rounded, as the residual stream is), y = weight * cast(total * rsqrt(mean(total^2) + eps))."""
    rr = tl.program_id(0) * BR + tl.arange(0, BR)
    rd = tl.arange(0, DP)
    keep = (rr < rows)[:, None] & (rd < D)[None, :]
    at = rr.to(tl.int64)[:, None] * D + rd[None, :]
    v = tl.load(x + at, mask=keep, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + at, v, mask=keep)
    wide = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    if SAVE:
        tl.store(scales + rr, scale, mask=rr < rows)
    w = tl.load(weight + rd, mask=rd < D, other=0.0)
    normed = (wide * scale[:, None]).to(v.dtype)
    tl.store(y + at, (normed.to(tl.float32) * w.to(tl.float32)[None, :]).to(y.dtype.element_ty), mask=keep)


@triton.jit
def norm_backward_kernel(
    x, weight, scales, dy, dtotal, dx, dw_parts, rows, rows_each,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Each program walks `rows_each` rows and leaves one partial of dw; `dtotal` is what reached the residual stream."""
    part = tl.program_id(0)
    rd = tl.arange(0, DP)
    w = tl.load(weight + rd, mask=rd < D, other=0.0).to(tl.float32)
    acc = tl.zeros((DP,), tl.float32)
    for r in range(part * rows_each, tl.minimum(part * rows_each + rows_each, rows), BR):
        rr = r + tl.arange(0, BR)
        inside = (rr < rows) & (rr < part * rows_each + rows_each)
        keep = inside[:, None] & (rd < D)[None, :]
        at = rr.to(tl.int64)[:, None] * D + rd[None, :]
        scale = tl.load(scales + rr, mask=inside, other=0.0)
        normed = tl.load(x + at, mask=keep, other=0.0).to(tl.float32) * scale[:, None]
        grad = tl.load(dy + at, mask=keep, other=0.0).to(tl.float32)
        acc += tl.sum(grad * normed, 0)
        g = grad * w[None, :]
        along = tl.sum(g * normed, 1) / D
        out = (g - normed * along[:, None]) * scale[:, None]
        if ADD:
            out += tl.load(dtotal + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=keep)
    tl.store(dw_parts + part * D + rd, acc, mask=rd < D)


def _norm_shape(dim: int) -> tuple[int, int, int]:
    """(padded row, rows per program, warps): a function of the row's length alone."""
    wide = triton.next_power_of_2(dim)
    rows = max(1, 2048 // wide)
    return wide, rows, 4 if wide * rows <= 2048 else 8


class RmsNorm(torch.autograd.Function):
    """(x [T, D], residual [T, D] or None, weight [D]) -> (y, x + residual); without a residual the second is x itself."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dim = x.shape
        wide, each, warps = _norm_shape(dim)
        y = torch.empty_like(x)
        total = torch.empty_like(x) if residual is not None else x
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        norm_kernel[(triton.cdiv(rows, each),)](
            x, residual if residual is not None else x, weight, y, total, scales, rows, eps, D=dim, DP=wide, BR=each,
            ADD=residual is not None, SAVE=True, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, scales)
        ctx.has_residual = residual is not None
        if residual is None:
            total = total.view_as(total)
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dtotal: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        total, weight, scales = ctx.saved_tensors
        rows, dim = total.shape
        wide, each, warps = _norm_shape(dim)
        parts = max(1, min(512, triton.cdiv(rows, each)))
        dx = torch.empty_like(total)
        dw = torch.empty(parts, dim, dtype=torch.float32, device=total.device)
        rows_each = triton.cdiv(triton.cdiv(rows, parts), each) * each
        norm_backward_kernel[(parts,)](
            total, weight, scales, dy.contiguous(), dtotal.contiguous() if ctx.has_residual else dy, dx, dw, rows, rows_each,
            D=dim, DP=wide, BR=each, ADD=ctx.has_residual, num_warps=warps,
        )  # fmt: skip
        return dx, dx if ctx.has_residual else None, dw.sum(0).to(weight.dtype), None


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the new residual stream, both [..., D] in the dtype of x."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    other = residual.reshape(flat.shape).contiguous() if residual is not None else None
    y, total = RmsNorm.apply(flat, other, weight, eps)
    return y.view(x.shape), total.view(x.shape)


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    y,
    tokens,
    sign,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BH: tl.constexpr,
):
    """Each product is rounded to the input dtype before the sum."""
    t = tl.program_id(0).to(tl.int64)
    rh = tl.arange(0, BH)
    rd = tl.arange(0, HP)
    keep = (rh < H)[:, None] & (rd < HALF)[None, :]
    at = (t * H + rh)[:, None] * D + rd[None, :]
    c = tl.load(cos + t * HALF + rd, mask=rd < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + t * HALF + rd, mask=rd < HALF, other=0.0).to(tl.float32)[None, :] * sign
    x1 = tl.load(x + at, mask=keep, other=0.0)
    x2 = tl.load(x + at + HALF, mask=keep, other=0.0)
    a = x1.to(tl.float32)
    b = x2.to(tl.float32)
    y1 = (a * c).to(x1.dtype).to(tl.float32) - (b * s).to(x1.dtype).to(tl.float32)
    y2 = (b * c).to(x1.dtype).to(tl.float32) + (a * s).to(x1.dtype).to(tl.float32)
    tl.store(y + at, y1.to(x1.dtype), mask=keep)
    tl.store(y + at + HALF, y2.to(x1.dtype), mask=keep)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    tokens, heads, dim = x.shape
    y = torch.empty_like(x)
    half = dim // 2
    rope_kernel[(tokens,)](
        x, cos, sin, y, tokens, sign, H=heads, D=dim, HALF=half, HP=triton.next_power_of_2(half),
        BH=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    return y


class Rope(torch.autograd.Function):
    """x [T, H, D] contiguous, cos and sin [T, D / 2] in the dtype of x -> [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotate(x.contiguous(), cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad.contiguous(), cos, sin, -1.0), None, None


@triton.jit
def silu_mul_kernel(gate, up, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0)
    u = tl.load(up + at, mask=at < size, other=0.0)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)
    tl.store(y + at, (silu.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=at < size)


@triton.jit
def silu_mul_backward_kernel(gate, up, dy, dgate, dup, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0)
    grad = tl.load(dy + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = wide * sigmoid
    tl.store(dup + at, (grad * silu.to(g.dtype).to(tl.float32)).to(g.dtype), mask=at < size)
    tl.store(dgate + at, (grad * u * (silu + sigmoid * (1.0 - silu))).to(g.dtype), mask=at < size)


class SiluMul(torch.autograd.Function):
    """silu(gate) * up; equal shapes, silu rounded before the product."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        silu_mul_kernel[(triton.cdiv(gate.numel(), 2048),)](gate, up, y, gate.numel(), BLOCK=2048, num_warps=8)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        silu_mul_backward_kernel[(triton.cdiv(gate.numel(), 2048),)](
            gate, up, grad.contiguous(), dgate, dup, gate.numel(), BLOCK=2048, num_warps=8
        )
        return dgate, dup


@triton.jit
def kv_write_kernel(k, v, k_store, v_store, slots, W: tl.constexpr, WP: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    # a negative slot is a padded row of a captured graph
    if slot >= 0:
        rd = tl.arange(0, WP)
        tl.store(k_store + slot * W + rd, tl.load(k + t * W + rd, mask=rd < W), mask=rd < W)
        tl.store(v_store + slot * W + rd, tl.load(v + t * W + rd, mask=rd < W), mask=rd < W)


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_store: torch.Tensor, v_store: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes rows k, v [T, Hkv, D] to the store rows `slots` [T] (negative: nowhere) of stores [R, Hkv, D]."""
    width = k.shape[1] * k.shape[2]
    kv_write_kernel[(k.shape[0],)](
        k, v, k_store, v_store, slots, W=width, WP=triton.next_power_of_2(width), num_warps=4
    )
