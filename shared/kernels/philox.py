"""Philox4x32-10: random bits as a pure function of a 64-bit key and a 128-bit counter.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants of Random123. Words are held in int64,
whose products wrap to the right 64 bits.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Encrypt a counter.

    Args:
        counter: four int64 tensors of 32-bit words, least significant first, shapes that broadcast.
        key: two int64 tensors of 32-bit words, likewise.

    Returns:
        Four int64 tensors of the broadcast shape, each in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # c1 and c3 keep junk above bit 32: they are only xored, and the result is cut before it is multiplied.
        c0 = _high(product1, c1 ^ k0)
        c2 = _high(product0, c3 ^ k1)
        c1, c3 = product1, product0
        if round_index + 1 < _ROUNDS:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _high(product: Tensor, mix: Tensor) -> Tensor:
    """(product >> 32) ^ mix, 32 bits; in place once the shape is that of the product."""
    high = product >> 32
    return (
        high.bitwise_xor_(mix).bitwise_and_(_WORD) if mix.numel() <= high.numel() else (high ^ mix).bitwise_and_(_WORD)
    )


def gumbel_noise(seed_R: Tensor, prompt_R: Tensor, sample_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of each row's (seed, prompt, sample, position), one value per vocabulary entry.

    Entry v takes word v % 4 of the counter (v // 4, position, sample, prompt) under the key seed. With w the word as a
    number in (0, 1), the noise is -log(-log(1 - w)): large values keep full precision (to 22.9), where log(u) of a
    float32 u would round to a tie at 1.

    Args:
        seed_R, prompt_R, sample_R, position_R: [R] int64; seed counts in 64 bits, the others in their lowest 32.
        vocab_size: V.

    Returns:
        [R, V] float32.
    """
    num_rows, num_counters = seed_R.shape[0], -(-vocab_size // 4)
    noise = torch.full((num_rows, num_counters, 4), torch.nan, dtype=torch.float32, device=seed_R.device)
    counters = torch.arange(num_counters, device=seed_R.device)
    # A row at a time, the words stay in the cache.
    for row in range(num_rows):
        key = (seed_R[row] & _WORD, (seed_R[row] >> 32) & _WORD)
        words = philox4x32((counters, *(x[row] & _WORD for x in (position_R, sample_R, prompt_R))), key)
        for i, word in enumerate(words):
            noise[row, :, i] = word
    # 1 - 2⁻²⁴ is the largest float32 below 1; beyond it the noise would be -inf and could not even win alone.
    uniform = noise.view(num_rows, -1)[:, :vocab_size].add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
