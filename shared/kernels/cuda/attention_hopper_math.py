"""Blocks of keys for one warpgroup on Hopper, in Gluon: the operations of `attention_math`, in their order.

`s`, `p`, `m`, `l`, `a`, `decay` and the totals `tm`, `t`, `ta` are those of `attention_math.block_step` and `merge`. Keys and
values come through rings: (blocks, barriers that say which are loaded, barriers that say which have been read).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shared.kernels.cuda.attention_math import BLOCK, CHUNK
from shared.kernels.cuda.attention_schedule import HEAD_DIM, ROWS

# its name in Triton 3.6, and that in later ones
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

KEYS = gl.constexpr(BLOCK)
WALK = gl.constexpr(CHUNK)
DIM = gl.constexpr(HEAD_DIM)
HALF = gl.constexpr(ROWS)
"""Rows of one warpgroup."""
ONES = gl.constexpr(8)
"""Columns of ones that the row sums go through."""
STAGES = gl.constexpr(4)
"""Blocks of keys, and of values, that shared memory holds."""
MINUS_INFINITY = gl.constexpr(-float("inf"))

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
VALUES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""Where a warpgroup looks at values, or at its outputs, as they lie in memory."""


@gluon.jit
def merge(tm, t, ta, m, l, a):
    """`attention_math.merge`, the row sums out of their columns first."""
    l = gl.convert_layout(gl.max(l, 1), gl.SliceLayout(1, SCORES))
    top = gl.maximum(tm, m)
    safe = gl.where(top == MINUS_INFINITY, 0.0, top)
    old = gl.exp2(tm - safe)
    new = gl.exp2(m - safe)
    t = gl.fma(t, old, l * new)
    old = gl.convert_layout(old, gl.SliceLayout(1, OUTPUT))
    new = gl.convert_layout(new, gl.SliceLayout(1, OUTPUT))
    ta = gl.fma(ta, gl.zeros_like(ta) + old[:, None], a * new[:, None])
    return top, t, ta


@gluon.jit
def soften(s, m, factor, MASK: gl.constexpr):
    """The new maximum, the factor that it puts on the sums so far, and the block's exponentials, as in `block_step`."""
    top = gl.maximum(m, gl.max(s, 1) * factor)
    if MASK:
        safe = gl.where(top == MINUS_INFINITY, 0.0, top)
    else:
        safe = top
    decay = gl.exp2(m - safe)
    ones = gl.full(s.shape, 1.0, gl.float32, s.type.layout)
    return top, decay, gl.exp2(gl.fma(s, ones * factor, gl.zeros_like(s) - safe[:, None]))


@gluon.jit
def decayed(l, a, decay):
    l = l * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
    a = a * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))[:, None]
    return l, a


@gluon.jit
def place(count):
    """The stage of block `count` and the phase that its barrier completes."""
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
def begin_scores(q, keys, stage, phase):
    """Starts the product of the queries with a block, once that is there."""
    k_buf, k_full, _ = keys
    mbarrier.wait(k_full.index(stage), phase)
    k = k_buf.index(stage).reshape([KEYS, DIM]).permute((1, 0))
    return warpgroup_mma(q, k, gl.zeros([HALF, KEYS], gl.float32, SCORES), use_acc=False, is_async=True)


@gluon.jit
def begin_sums(p, v, ones, l, a):
    """Starts the products of a block's weights `p` with ones and with the values."""
    l = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2)), ones, l, is_async=True)
    a = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, OUTPUT, 2)), v, a, is_async=True)
    return l, a


@gluon.jit
def walk_seen(q, keys, values, ones, m, l, a, factor, begin, end, count):
    """The blocks from `begin` to `end` of one chunk, which every query of the tile sees: while the values of one are multiplied,
    the next one's exponentials are computed."""
    _, _, k_free = keys
    v_buf, v_full, v_free = values
    stage, phase = place(count)
    s = begin_scores(q, keys, stage, phase)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(stage), count=1)
    m, decay, p32 = soften(s, m, factor, False)
    p = p32.to(gl.bfloat16)
    for _ in range(begin + KEYS, end, KEYS):
        before, phase_before = stage, phase
        count += 1
        stage, phase = place(count)
        s = begin_scores(q, keys, stage, phase)
        mbarrier.wait(v_full.index(before), phase_before)
        l, a = begin_sums(p, v_buf.index(before).reshape([KEYS, DIM]), ones, l, a)
        s = warpgroup_mma_wait(2, deps=(s,))
        mbarrier.arrive(k_free.index(stage), count=1)
        m, decay, p32 = soften(s, m, factor, False)
        # It holds already, but ends a basic block: or the assembler would move the softmax behind the wait that follows.
        mbarrier.wait(v_full.index(before), phase_before)
        p32, l, a = warpgroup_mma_wait(0, deps=(p32, l, a))
        p = p32.to(gl.bfloat16)
        mbarrier.arrive(v_free.index(before), count=1)
        l, a = decayed(l, a, decay)
    mbarrier.wait(v_full.index(stage), phase)
    l, a = begin_sums(p, v_buf.index(stage).reshape([KEYS, DIM]), ones, l, a)
    l, a = warpgroup_mma_wait(0, deps=(l, a))
    mbarrier.arrive(v_free.index(stage), count=1)
    return m, l, a, count + 1


@gluon.jit
def step_edge(q, keys, values, own, ones, m, l, a, factor, n, pos, last, count):
    """The block at position `n`, which some queries see and some don't; as `attention_packed.edge_block`."""
    _, _, k_free = keys
    v_buf, v_full, v_free = values
    stage, phase = place(count)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_buf.index(stage).reshape([KEYS, DIM]).load(VALUES)
    fence_async_shared()
    barrier()
    mbarrier.arrive(v_free.index(stage), count=1)
    # rows behind the tile belong to others and may hold anything
    inside = n + gl.arange(0, KEYS, gl.SliceLayout(1, VALUES)) <= last
    finite = gl.min((gl.abs(v.to(gl.float32)) < float("inf")).to(gl.int32), 1) > 0
    v = gl.where((inside & finite)[:, None], v, gl.zeros_like(v))
    blame = gl.where(inside & (finite == 0), float("nan"), 0.0)
    own.store(v)
    fence_async_shared()
    s = begin_scores(q, keys, stage, phase)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(stage), count=1)
    s = s + gl.convert_layout(blame, gl.SliceLayout(0, SCORES))[None, :]
    keep = (n + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)))[None, :] <= pos[:, None]
    s = gl.where(keep, s, MINUS_INFINITY)
    m, decay, p = soften(s, m, factor, True)
    l, a = decayed(l, a, decay)
    l, a = begin_sums(p.to(gl.bfloat16), own, ones, l, a)
    l, a = warpgroup_mma_wait(0, deps=(l, a))
    return m, l, a
