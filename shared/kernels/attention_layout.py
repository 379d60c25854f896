"""Where attention finds its keys, and how its work is cut into equal tiles.

Training, chunked prefill, decode and prefix-shared training differ only in the layout: which rows of the key and value
stores hold the context of each sequence.

Legend: S sequences, T query rows of all sequences, L padded context, n tiles of one batch, q queries of a tile,
M rows of a tile (q x GQA group, padded to 16), b blocks of BLOCK keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

BLOCK = 64
"""Keys of one block; blocks are anchored at absolute positions. Part of the bits."""

ROW_MULTIPLE = 16
"""Rows of one matrix product are padded to a multiple of this. Part of the exactness rule of the CPU's BLAS."""

TILE_QUERIES = 64
"""Most queries of one tile; a causal tile stops at its last query. Not part of the bits."""

BATCH_ELEMENTS = 1 << 23
"""Most scores of one batch of tiles (32 MiB of float32). Not part of the bits."""


@dataclass(frozen=True)
class TileBatch:
    """Tiles of equal shape, computed by one sequence of batched products."""

    query_rows: Tensor
    """[n * q] int64 row of each query; a short tile repeats its last."""
    is_query: Tensor
    """[n, q] float32: 1 for a query, 0 for a repetition."""
    key_rows: Tensor
    """[b * n * BLOCK] int64 row of the store of each key, block by block; invisible ones repeat a row of the sequence."""
    bias: Tensor
    """[b, n, 1, q * group, BLOCK] float32: 0 where visible, -inf elsewhere."""
    num_rows: int
    """M."""
    num_tiles: int
    num_queries: int
    num_blocks: int


class AttentionLayout:
    """Which store row holds which position of which sequence; not to be changed once built.

    The queries of a sequence are its last `q_lens[s]` positions: query i stands at position
    `context_lens[s] - q_lens[s] + i` and sees the positions up to its own. Queries are packed, sequence after sequence.

    No dataclass on purpose: FSDP2 rebuilds the dataclasses among a module's arguments, and every layer would plan anew.

    Example: two sequences of 3 and 2 tokens, packed, the rows themselves being the store::

        AttentionLayout(q_lens=tensor([3, 2]), context_lens=tensor([3, 2]), kv_rows=tensor([[0, 1, 2], [3, 4, 0]]))
    """

    def __init__(
        self,
        q_lens: Tensor,
        context_lens: Tensor,
        kv_rows: Tensor | None = None,
        *,
        pages: Tensor | None = None,
        page_size: int = 1,
    ) -> None:
        """Check and keep; give `kv_rows`, or `pages` and their size.

        Args:
            q_lens: [S] int64 on the CPU, each >= 1.
            context_lens: [S] int64 on the CPU: keys of the sequence, its queries included.
            kv_rows: [S, L] int64 on the CPU: the store row of each position; anything beyond the context is ignored.
            pages: [S, P] int64 on the CPU: page of each `page_size` positions; page p is the store rows from p * page_size on.
            page_size: rows of a page.

        Raises:
            ValueError: shapes or lengths that do not fit each other.
        """
        named = kv_rows if pages is None else pages
        if named is None or (kv_rows is not None and pages is not None):
            raise ValueError("an attention layout needs kv_rows or pages, one of the two; name the rows, or the pages")
        self.q_lens, self.context_lens, self.page_size = q_lens, context_lens, page_size
        self.pages = named
        """[S, P] int64; with a page_size of 1 the pages are rows."""
        num_sequences = self.q_lens.shape[0]
        if self.context_lens.shape != (num_sequences,) or self.pages.shape[:1] != (num_sequences,):
            raise ValueError(
                f"an attention layout needs q_lens [S], context_lens [S] and kv_rows [S, L], got {list(self.q_lens.shape)}, "
                f"{list(self.context_lens.shape)} and {list(self.pages.shape)}; give one entry per sequence"
            )
        if num_sequences and not bool(((self.q_lens >= 1) & (self.q_lens <= self.context_lens)).all()):
            raise ValueError(
                f"every sequence needs 1 <= q_len <= context_len, got q_lens {self.q_lens.tolist()} and context_lens "
                f"{self.context_lens.tolist()}; leave out sequences without queries and count queries as context"
            )
        if num_sequences and int(self.context_lens.max()) > self.pages.shape[1] * page_size:
            raise ValueError(
                f"kv_rows holds {self.pages.shape[1] * page_size} positions but a context has {int(self.context_lens.max())}; "
                "widen kv_rows to the longest context"
            )

    @property
    def num_queries(self) -> int:
        """T, the rows of q."""
        return int(self.q_lens.sum())

    @cached_property
    def kv_rows(self) -> Tensor:
        """[S, L] int64: the store row of each position."""
        if self.page_size == 1:
            return self.pages
        return (self.pages[:, :, None] * self.page_size + torch.arange(self.page_size)).flatten(1)

    @cached_property
    def query_rows(self) -> Tensor:
        """[T] int64: the store row of each query's own key and value, where a cache is to be written."""
        return self._rows(self.q_lens, self.positions)

    @cached_property
    def context_rows(self) -> Tensor:
        """[sum of the contexts] int64: the store row of every position, sequence after sequence."""
        return self._rows(self.context_lens, _last_positions(self.context_lens, self.context_lens))

    def _rows(self, lens: Tensor, positions: Tensor) -> Tensor:
        sequence = torch.repeat_interleave(torch.arange(lens.shape[0]), lens)
        return self.pages[sequence, positions // self.page_size] * self.page_size + positions % self.page_size

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: the absolute position of each query."""
        return _last_positions(self.q_lens, self.context_lens)

    @cached_property
    def num_positions(self) -> int:
        """One more than the largest position; known without asking a device."""
        return int(self.context_lens.max()) if len(self.context_lens) else 0

    def slots(self, device: torch.device) -> Tensor:
        """`query_rows` on a device."""
        return self.derived(("slots", device), lambda: self.query_rows.to(device))

    @cached_property
    def _plans(self) -> dict[Hashable, Any]:
        return {}

    def derived(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` makes of this layout for one device and one kind of head, made once and shared by all layers."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

    def plan(self, num_heads: int, num_kv_heads: int, sliding_window: int | None) -> list[TileBatch]:
        """The tile batches that cover every query once.

        Args:
            num_heads, num_kv_heads: H and Hkv.
            sliding_window: positions a query sees, itself included; None for all.
        """
        return self.derived(
            (num_heads, num_kv_heads, sliding_window),
            lambda: _plan(self, num_heads // num_kv_heads, num_kv_heads, sliding_window),
        )


def _last_positions(lens: Tensor, context_lens: Tensor) -> Tensor:
    """The last `lens[s]` positions of each context, sequence after sequence."""
    first = torch.cumsum(lens, 0) - lens
    offset = torch.repeat_interleave(context_lens - lens - first, lens)
    return torch.arange(offset.shape[0]) + offset


def _plan(layout: AttentionLayout, group: int, num_kv_heads: int, window: int | None) -> list[TileBatch]:
    q_lens, context_lens = layout.q_lens.numpy(), layout.context_lens.numpy()
    kv_rows = layout.kv_rows.numpy()
    tiles_per_sequence = -(-q_lens // TILE_QUERIES)
    sequence = np.repeat(np.arange(len(q_lens)), tiles_per_sequence)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles_per_sequence) - tiles_per_sequence, tiles_per_sequence)
    start = tile * TILE_QUERIES
    num_queries = np.minimum(TILE_QUERIES, q_lens[sequence] - start)
    first_row = (np.cumsum(q_lens) - q_lens)[sequence] + start
    first_position = (context_lens - q_lens)[sequence] + start
    end = first_position + num_queries

    num_rows = -(-num_queries * group // ROW_MULTIPLE) * ROW_MULTIPLE
    first_block = np.zeros_like(end) if window is None else np.maximum(first_position - window + 1, 0) // BLOCK
    num_blocks = _rounded_up(-(-end // BLOCK) - first_block)

    batches = []
    for rows, blocks in np.unique(np.stack((num_rows, num_blocks)), axis=1).T.tolist():
        members = np.flatnonzero((num_rows == rows) & (num_blocks == blocks))
        limit = max(1, BATCH_ELEMENTS // (num_kv_heads * rows * blocks * BLOCK))
        for begin in range(0, len(members), limit):
            m = members[begin : begin + limit]
            query = np.arange(num_queries[m].max())
            query_index = np.minimum(query, num_queries[m, None] - 1)
            positions = first_position[m, None] + query_index
            key_positions = (first_block[m, None] * BLOCK + np.arange(blocks * BLOCK)).reshape(len(m), blocks, BLOCK)
            key_positions = key_positions.transpose(1, 0, 2)
            key_rows = kv_rows[sequence[m, None], np.minimum(key_positions, end[m, None] - 1)]
            visible = key_positions[:, :, None, :] <= positions[:, :, None]
            if window is not None:
                visible &= key_positions[:, :, None, :] > positions[:, :, None] - window
            bias = np.where(visible, np.float32(0), np.float32(-np.inf)).repeat(group, axis=2)
            batches.append(
                TileBatch(
                    query_rows=torch.from_numpy((first_row[m, None] + query_index).reshape(-1)),
                    is_query=torch.from_numpy((query < num_queries[m, None]).astype(np.float32)),
                    key_rows=torch.from_numpy(key_rows.reshape(-1)),
                    bias=torch.from_numpy(bias).unsqueeze(2),
                    num_rows=rows,
                    num_tiles=len(m),
                    num_queries=len(query),
                    num_blocks=blocks,
                )
            )
    return batches


def _rounded_up(num_blocks: np.ndarray) -> np.ndarray:
    """Keep three leading bits, so that close contexts share a batch; blocks beyond the context add exact zeros."""
    step = 1 << np.maximum(np.floor(np.log2(num_blocks)).astype(np.int64) - 2, 0)
    return -(-num_blocks // step) * step
