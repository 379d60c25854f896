"""The packed causal forward for Hopper, in Gluon: one warp loads, and two warpgroups of 64 rows never wait for one another.

The bits are those of `attention_packed.packed_kernel`, whose blocks, chunks and merges it repeats; `attention_choice` compares
them on the device before this kernel is used. What it gains is time: each program takes one tile after another, so that the loads
of the next one run ahead; the products of a block with the values overlap the softmax of the block behind it; queries stay in
registers.

Of a tile's queries the first half is the first warpgroup's, the other the second's. Legend as in `attention_math`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shared.kernels.cuda.attention_hopper_math import (
    DIM,
    HALF,
    KEYS,
    MINUS_INFINITY,
    ONES,
    OUTPUT,
    SCORES,
    STAGES,
    SUMS,
    VALUES,
    WALK,
    barrier,
    merge,
    place,
    step_edge,
    walk_seen,
)
from shared.kernels.cuda.attention_math import BLOCK, LOG2E
from shared.kernels.cuda.attention_schedule import HEAD_DIM, RECORD, ROWS, Schedule

# their names in Triton 3.6, and those in later ones
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

FIELDS = gl.constexpr(RECORD)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def write_rows(out, own, o_desc, o, query, kvh, num, stride_o, G: gl.constexpr):
    """A warpgroup's outputs, by way of its shared memory; at a sequence's end only those of its `num` queries."""
    own.store(out)
    if num >= HALF // G:
        fence_async_shared()
        barrier()
        store_tile(o_desc, [query, kvh, 0, 0], own.reshape([HALF // G, 1, G, DIM]))
        tma.store_wait(0)
        barrier()
    else:
        barrier()
        some = own.load(VALUES)
        row = gl.arange(0, HALF, gl.SliceLayout(1, VALUES))
        column = gl.arange(0, DIM, gl.SliceLayout(0, VALUES))
        to = (query + row // G).to(gl.int64) * stride_o + (kvh * G + row % G) * DIM
        gl.store(o + to[:, None] + column[None, :], some, mask=(row // G < num)[:, None])


@gluon.jit
def attend_rows(shared, W: gl.constexpr, H: gl.constexpr, G: gl.constexpr):
    """Warpgroup `W`: its half of every tile of this program."""
    o_desc, o, lse, table, starts, queries, keys, values, own_buf, one_buf, factor, stride_o = shared
    q_buf, q_full, q_free = queries
    own = own_buf.index(W)
    ones = one_buf.permute((1, 0))
    rm = gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    empty = gl.full([HALF], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, SCORES))
    zero = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    zero_l = gl.zeros([HALF, ONES], gl.float32, SUMS)
    zero_a = gl.zeros([HALF, DIM], gl.float32, OUTPUT)
    begin = gl.load(starts + gl.program_id(0))
    end = gl.load(starts + gl.program_id(0) + 1)
    count = begin * 0
    for i in range(begin, end):
        query = gl.load(table + i * FIELDS + 1) + W * (HALF // G)
        p_lo = gl.load(table + i * FIELDS + 2)
        last = gl.load(table + i * FIELDS + 3)
        num = gl.load(table + i * FIELDS + 4) - W * (HALF // G)
        kvh = gl.load(table + i * FIELDS + 5)
        mbarrier.wait(q_full.index(W), (i - begin) & 1)
        q = q_buf.index(W).reshape([HALF, DIM]).load(gl.DotOperandLayout(0, SCORES, 2))
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_free.index(W), count=1)
        m, l, a = empty, zero_l, zero_a
        tm, t, ta = empty, zero, zero_a
        edge = (p_lo + 1) // KEYS * KEYS
        for c in range(0, edge, WALK):
            if c > 0:
                tm, t, ta = merge(tm, t, ta, m, l, a)
            end_c = gl.minimum(c + WALK, edge)
            m, l, a, count = walk_seen(q, keys, values, ones, empty, zero_l, zero_a, factor, c, end_c, count)
        pos = p_lo + W * (HALF // G) + rm // G
        for n in range(edge, last + 1, KEYS):
            if n % WALK == 0:
                tm, t, ta = merge(tm, t, ta, m, l, a)
                m, l, a = empty, zero_l, zero_a
            m, l, a = step_edge(q, keys, values, own, ones, m, l, a, factor, n, pos, last, count)
            count += 1
        tm, t, ta = merge(tm, t, ta, m, l, a)
        at = (query + rm // G).to(gl.int64) * H + kvh * G + rm % G
        gl.store(lse + at, tm + gl.log2(t), mask=rm // G < num)
        out = (ta / gl.convert_layout(t, gl.SliceLayout(1, OUTPUT))[:, None]).to(gl.bfloat16)
        write_rows(out, own, o_desc, o, query, kvh, num, stride_o, G)


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, table, starts, queries, keys, values, G: gl.constexpr):
    """The loading warp: queries, keys and values of every tile of this program, as far ahead as there are free stages."""
    q_buf, q_full, q_free = queries
    k_buf, k_full, k_free = keys
    v_buf, v_full, v_free = values
    begin = gl.load(starts + gl.program_id(0))
    end = gl.load(starts + gl.program_id(0) + 1)
    count = begin * 0
    for i in range(begin, end):
        row_0 = gl.load(table + i * FIELDS)
        query = gl.load(table + i * FIELDS + 1)
        last = gl.load(table + i * FIELDS + 3)
        kvh = gl.load(table + i * FIELDS + 5)
        turn = (i - begin) & 1
        for n in range(0, last + 1, KEYS):
            stage, phase = place(count)
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), KEYS * DIM * 2)
            load_tile(k_desc, [row_0 + n, kvh, 0], k_full.index(stage), k_buf.index(stage))
            if n == 0:
                for w in gl.static_range(2):
                    mbarrier.wait(q_free.index(w), turn ^ 1)
                    mbarrier.expect(q_full.index(w), HALF * DIM * 2)
                    load_tile(q_desc, [query + w * (HALF // G), kvh, 0, 0], q_full.index(w), q_buf.index(w))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * DIM * 2)
            load_tile(v_desc, [row_0 + n, kvh, 0], v_full.index(stage), v_buf.index(stage))
            count += 1


@gluon.jit
def make_ring(desc, NUM: gl.constexpr, READERS: gl.constexpr):
    """(blocks, barriers that say which are loaded, barriers that say which all of `READERS` have read), `NUM` of each."""
    buffer = gl.allocate_shared_memory(gl.bfloat16, [NUM] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return buffer, full, free


@gluon.jit
def hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, o, lse, table, starts, factor, stride_o, H: gl.constexpr, G: gl.constexpr
):
    queries = make_ring(q_desc, 2, 1)
    keys = make_ring(k_desc, STAGES, 2)
    values = make_ring(v_desc, STAGES, 2)
    own: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], gl.bfloat16)
    own_buf = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, DIM], own)
    one: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, KEYS], gl.bfloat16)
    one_buf = gl.allocate_shared_memory(gl.bfloat16, [ONES, KEYS], one)
    one_buf.store(gl.full([ONES, KEYS], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    shared = (o_desc, o, lse, table, starts, queries, keys, values, own_buf, one_buf, factor, stride_o)
    # 240 registers a thread for those that compute, 24 for the one that loads
    gl.warp_specialize(
        [
            (attend_rows, (shared, FIRST, H, G)),
            (attend_rows, (shared, SECOND, H, G)),
            (load_tiles, (q_desc, k_desc, v_desc, table, starts, queries, keys, values, G)),
        ],
        [4, 1],
        [240, 24],
    )


def hopper_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, schedule: Schedule, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, 128] and log-sum-exp in base 2 [T, H] float32.

    Args:
        q: [T, H, 128] bfloat16, contiguous, at an address that is a multiple of 16 bytes.
        k, v: [E, Hkv, 128], likewise; each sequence's context in consecutive rows.
        schedule: of these heads.
    """
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    rows = [ROWS // group, 1, group, HEAD_DIM]
    queries, outputs = (_describe(x.view(tokens, kv_heads, group, HEAD_DIM), rows) for x in (q, out))
    keys, values = (_describe(x, [BLOCK, 1, HEAD_DIM]) for x in (k, v))
    with torch.cuda.device_of(q):
        hopper_kernel[(schedule.starts.shape[0] - 1,)](
            queries, keys, values, outputs, out, lse, schedule.table, schedule.starts, scale * LOG2E, out.stride(0),
            H=heads, G=group, num_warps=4, maxnreg=168,
        )  # fmt: skip
    return out, lse


def _describe(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
