"""The engine's row operations over merged projections: fewer launches and no copies, the bits of the operations they replace.

    place_qkv    norms of the query and key heads, rotary embedding, keys and values into the cache: one launch instead of five
    silu_mul     over the two halves of one projection
    add_norm     residual add and norm in one launch

Whether the compiler reduces a row here as it does in `rowwise` is not promised by anyone, so `MergedRows` compares bits on the
device when it is built, and where they differ runs the operations one by one.

Legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.cuda.rowwise import Rope, SiluMul, kv_write, rms_norm
from shared.kernels.ops import InexactKernelError


@triton.jit
def qkv_kernel(
    qkv, q_weight, k_weight, cos, sin, q, k_store, v_store, slots, eps, stride_qkv,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
    BR: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """BR heads of one token: tile, rounding points and order of operations are those of `norm_kernel` and `rope_kernel`."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BR + tl.arange(0, BR)
    row = qkv + t * stride_qkv
    slot = tl.load(slots + t).to(tl.int64)
    rd = tl.arange(0, DP)
    rh = tl.arange(0, HP)
    is_rotated = head < H + K
    keep = is_rotated[:, None] & (rh < HALF)[None, :]
    at = head[:, None] * D + rh[None, :]
    x1 = tl.load(row + at, mask=keep, other=0.0)
    x2 = tl.load(row + at + HALF, mask=keep, other=0.0)
    if NORM:
        whole = is_rotated[:, None] & (rd < D)[None, :]
        wide = tl.load(row + head[:, None] * D + rd[None, :], mask=whole, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
        inside = rh < HALF
        is_query = (head < H)[:, None]
        wq1 = tl.load(q_weight + rh, mask=inside, other=0.0).to(tl.float32)[None, :]
        wq2 = tl.load(q_weight + HALF + rh, mask=inside, other=0.0).to(tl.float32)[None, :]
        wk1 = tl.load(k_weight + rh, mask=inside, other=0.0).to(tl.float32)[None, :]
        wk2 = tl.load(k_weight + HALF + rh, mask=inside, other=0.0).to(tl.float32)[None, :]
        n1 = (x1.to(tl.float32) * scale[:, None]).to(x1.dtype).to(tl.float32)
        n2 = (x2.to(tl.float32) * scale[:, None]).to(x1.dtype).to(tl.float32)
        x1 = (n1 * tl.where(is_query, wq1, wk1)).to(x1.dtype)
        x2 = (n2 * tl.where(is_query, wq2, wk2)).to(x1.dtype)
    c = tl.load(cos + t * HALF + rh, mask=rh < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + t * HALF + rh, mask=rh < HALF, other=0.0).to(tl.float32)[None, :]
    a = x1.to(tl.float32)
    b = x2.to(tl.float32)
    y1 = ((a * c).to(x1.dtype).to(tl.float32) - (b * s).to(x1.dtype).to(tl.float32)).to(x1.dtype)
    y2 = ((b * c).to(x1.dtype).to(tl.float32) + (a * s).to(x1.dtype).to(tl.float32)).to(x1.dtype)
    to_q = (head < H)[:, None] & (rh < HALF)[None, :]
    q_at = (t * H + head)[:, None] * D + rh[None, :]
    tl.store(q + q_at, y1, mask=to_q)
    tl.store(q + q_at + HALF, y2, mask=to_q)
    # a negative slot is a padded row
    if slot >= 0:
        to_k = (head >= H)[:, None] & keep
        k_at = (slot * K + head - H)[:, None] * D + rh[None, :]
        tl.store(k_store + k_at, y1, mask=to_k)
        tl.store(k_store + k_at + HALF, y2, mask=to_k)
        to_v = ((head >= H + K) & (head < H + 2 * K))[:, None] & (rd < D)[None, :]
        value = tl.load(row + head[:, None] * D + rd[None, :], mask=to_v, other=0.0)
        tl.store(v_store + (slot * K + head - H - K)[:, None] * D + rd[None, :], value, mask=to_v)


@triton.jit
def silu_mul_halves_kernel(gate_up, y, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_up + t * stride + at, mask=at < WIDTH, other=0.0)
    u = tl.load(gate_up + t * stride + WIDTH + at, mask=at < WIDTH, other=0.0)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)
    tl.store(y + t * WIDTH + at, (silu.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=at < WIDTH)


def silu_mul_halves(gate_up: Tensor) -> Tensor:
    """[T, 2 W] contiguous -> [T, W]: silu of the first half times the second."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_halves_kernel[(tokens, triton.cdiv(width, 2048))](
        gate_up, y, gate_up.stride(0), WIDTH=width, BLOCK=2048, num_warps=8
    )
    return y


class MergedRows:
    """The operations for one model shape on one device."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_norms: bool,
        is_exact: bool = True,
    ) -> None:
        """Args:
        heads: (H, K, D).
        has_norms: whether query and key heads are normed.
        is_exact: whether the bits of `silu_mul_halves`, which has no other way to run, matter.

        Raises:
            InexactKernelError: they do, and are not those of `SiluMul`.
        """
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.has_norms = has_norms
        self.is_placed_at_once = self.adds_in_norm = True
        self._certify(dtype, device, is_exact=is_exact)

    def place_qkv(
        self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, table: tuple[Tensor, Tensor],
        store: tuple[Tensor, Tensor], slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Queries [T, H, D], normed and rotated; keys and values go to the store's rows `slots`.

        Args:
            qkv: [T, (H + 2 K) D] contiguous.
            norms: weights [D] of the query and key norms, or None.
            table: cos and sin [T, D / 2] in the dtype of qkv, contiguous.
            store: keys and values [R, K, D].
            slots: [T] int64, negative where nothing is to be written.
        """
        place = self._place_at_once if self.is_placed_at_once else self._place_one_by_one
        return place(qkv, norms, eps, table, store, slots)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum, all [T, hidden]."""
        if self.adds_in_norm:
            return rms_norm(x, residual, weight, eps)
        total = x + residual
        return rms_norm(total, None, weight, eps)[0], total

    def describe(self) -> dict[str, str]:
        """What runs, read back."""
        merged = "cuda.merged.qkv_kernel" if self.is_placed_at_once else "cuda.rowwise, one by one"
        return {
            "place_qkv": merged,
            "silu_mul": "cuda.merged.silu_mul_halves_kernel",
            "add_norm": "cuda.rowwise.rms_norm" if self.adds_in_norm else "torch.add, cuda.rowwise.rms_norm",
        }

    def _place_at_once(self, qkv, norms, eps, table, store, slots):  # type: ignore[no-untyped-def]
        tokens, dim = qkv.shape[0], self.head_dim
        wide = triton.next_power_of_2(dim)
        rows = max(1, 2048 // wide)
        q = torch.empty(tokens, self.num_heads, dim, dtype=qkv.dtype, device=qkv.device)
        q_norm, k_norm = norms if norms is not None else (qkv, qkv)
        qkv_kernel[(tokens, triton.cdiv(self.num_heads + 2 * self.num_kv_heads, rows))](
            qkv, q_norm, k_norm, *table, q, *store, slots, eps, qkv.stride(0), H=self.num_heads, K=self.num_kv_heads,
            D=dim, DP=wide, HALF=dim // 2, HP=triton.next_power_of_2(dim // 2), BR=rows, NORM=norms is not None, num_warps=4,
        )  # fmt: skip
        return q

    def _place_one_by_one(self, qkv, norms, eps, table, store, slots):  # type: ignore[no-untyped-def]
        dim = self.head_dim
        sizes = [n * dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (part.unflatten(1, (-1, dim)).contiguous() for part in qkv.split(sizes, 1))
        if norms is not None:
            q, k = rms_norm(q, None, norms[0], eps)[0], rms_norm(k, None, norms[1], eps)[0]
        q, k = Rope.apply(q, *table), Rope.apply(k, *table)
        kv_write(k, v, *store, slots)
        return q

    @torch.no_grad()
    def _certify(self, dtype: torch.dtype, device: torch.device, *, is_exact: bool) -> None:
        """Compares both ways on numbers of many exponents, at several row counts."""
        h, k, d = self.num_heads, self.num_kv_heads, self.head_dim
        tokens = 19
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator)
            return (x * torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())).to(dtype).to(device)

        qkv, table = draw(tokens, (h + 2 * k) * d), (draw(tokens, d // 2), draw(tokens, d // 2))
        norms = (draw(d), draw(d)) if self.has_norms else None
        slots = torch.arange(tokens, device=device) * 2 % tokens
        slots[3] = -1
        for count in (1, 7, tokens):
            outputs = []
            for place in (self._place_at_once, self._place_one_by_one):
                store = tuple(torch.zeros(tokens, k, d, dtype=dtype, device=device) for _ in range(2))
                rows = (qkv[:count], norms, 1e-6, (table[0][:count], table[1][:count]), store, slots[:count])
                outputs.append((place(*rows), *store))
            self.is_placed_at_once &= all(_same_bits(a, b) for a, b in zip(*outputs, strict=True))
        hidden = h * d
        x, residual, weight = draw(tokens, hidden), draw(tokens, hidden), draw(hidden)
        for count in (1, 7, tokens):
            y, total = rms_norm(x[:count], residual[:count], weight, 1e-6)
            expected = x[:count] + residual[:count]
            plain = rms_norm(expected, None, weight, 1e-6)[0]
            self.adds_in_norm &= _same_bits(y, plain) and _same_bits(total, expected)
        gate_up = draw(tokens, 2 * hidden)
        gate, up = (half.contiguous() for half in gate_up.chunk(2, 1))
        merged, plain = silu_mul_halves(gate_up), SiluMul.apply(gate, up)
        if is_exact and not _same_bits(merged, plain):
            raise InexactKernelError(
                "silu_mul over the halves of one projection (cuda.merged.silu_mul_halves_kernel) has other bits than over two "
                f"(cuda.rowwise) in {int((merged != plain).sum())} of {plain.numel()} {dtype} values on {device}, compiled by "
                f"triton {triton.__version__}: both are elementwise, so one was compiled wrongly. Empty Triton's cache "
                "(TRITON_CACHE_DIR, by default ~/.triton/cache), install the triton that this torch build asks for, or take "
                "numerics 'fast', which promises nothing"
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
