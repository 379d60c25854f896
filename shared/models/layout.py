"""Attention layouts of packed, prefix-shared and paged batches.

All tensors are int64 on the CPU. Token ids and positions are packed in the order of the layout's sequences;
`layout.positions` gives the positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kernels import AttentionLayout


def packed_layout(lengths: Sequence[int]) -> AttentionLayout:
    """Whole sequences one after another, the rows of the forward being the store.

    Args:
        lengths: tokens of each sequence.
    """
    lens = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cumsum(lens, 0) - lens
    width = int(lens.max()) if len(lengths) else 0
    return AttentionLayout(q_lens=lens, context_lens=lens, kv_rows=starts[:, None] + torch.arange(width))


def prefix_shared_layout(prompt_lens: Sequence[int], completion_lens: Sequence[Sequence[int]]) -> AttentionLayout:
    """Each group's prompt once, then each of its completions, which attend to the prompt's rows and their own.

    Rows are packed group by group: prompt, completion 0, completion 1, ... The logprob of a completion's token t comes
    from the row before it: the prompt's last row for t = 0, the completion's row t - 1 otherwise.

    Args:
        prompt_lens: tokens of each group's prompt, each >= 1.
        completion_lens: tokens of each group's completions, each >= 1.

    Example: `prefix_shared_layout([3], [[2, 1]])` packs p0 p1 p2 a0 a1 b0 with contexts p, pa and pb.
    """
    q_lens, context_lens, rows = [], [], []
    begin = 0
    for prompt_len, lens in zip(prompt_lens, completion_lens, strict=True):
        prompt = torch.arange(begin, begin + prompt_len)
        q_lens.append(prompt_len)
        context_lens.append(prompt_len)
        rows.append(prompt)
        begin += prompt_len
        for length in lens:
            q_lens.append(length)
            context_lens.append(prompt_len + length)
            rows.append(torch.cat((prompt, torch.arange(begin, begin + length))))
            begin += length
    kv_rows = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros((0, 0), dtype=torch.int64)
    )
    return AttentionLayout(
        q_lens=torch.tensor(q_lens, dtype=torch.int64),
        context_lens=torch.tensor(context_lens, dtype=torch.int64),
        kv_rows=kv_rows,
    )


def paged_layout(
    page_tables: Sequence[Sequence[int]], page_size: int, q_lens: Sequence[int], context_lens: Sequence[int]
) -> AttentionLayout:
    """Sequences whose keys lie in pages of a KV cache.

    Args:
        page_tables: page numbers of each sequence in order of position, enough for its context; slot = page * page_size
            + offset.
        page_size: slots of a page.
        q_lens: tokens that this forward adds to each sequence.
        context_lens: tokens of each sequence, the added ones included.
    """
    width = max((len(table) for table in page_tables), default=0)
    pages = torch.tensor([[*table, *[0] * (width - len(table))] for table in page_tables], dtype=torch.int64)
    pages = pages.view(len(page_tables), width)
    for s, (table, context_len) in enumerate(zip(page_tables, context_lens, strict=True)):
        if len(table) * page_size < context_len:
            raise ValueError(
                f"sequence {s} has {context_len} tokens but {len(table)} pages of {page_size}; allot pages before the step"
            )
    return AttentionLayout(
        q_lens=torch.tensor(q_lens, dtype=torch.int64),
        context_lens=torch.tensor(context_lens, dtype=torch.int64),
        pages=pages,
        page_size=page_size,
    )


def completion_rows(prompt_lens: Sequence[int], completion_lens: Sequence[Sequence[int]]) -> Tensor:
    """Rows of a prefix-shared pack whose hidden states predict the completions' tokens, in packed order.

    Args: as for `prefix_shared_layout`.

    Returns:
        [total completion tokens] int64.
    """
    rows: list[int] = []
    begin = 0
    for prompt_len, lens in zip(prompt_lens, completion_lens, strict=True):
        last_of_prompt = begin + prompt_len - 1
        begin += prompt_len
        for length in lens:
            rows += [last_of_prompt, *range(begin, begin + length - 1)]
            begin += length
    return torch.tensor(rows, dtype=torch.int64)
