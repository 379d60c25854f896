"""Philox4x32-10: random bits as a pure function of a 64-bit key and a 128-bit counter.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants of Random123.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Word = Any
"""A 32-bit word in an int, a numpy uint64 array or a torch int64 tensor, whose products all keep the right 64 bits."""


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Encrypt a counter.

    Args:
        counter: four words, least significant first, of shapes that broadcast.
        key: two words.

    Returns:
        Four words of the broadcast shape, each in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _mix(product1, c1, k0), _low(product1), _mix(product0, c3, k1), _low(product0)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _mix(product: Word, word: Word, key: int) -> Word:
    """(product >> 32) ^ word ^ key, 32 bits; in place on the shifted product."""
    mixed = product >> 32
    mixed ^= word
    mixed ^= key
    mixed &= _WORD
    return mixed


def _low(product: Word) -> Word:
    """The product's low word; an array keeps junk above it, which `_mix` cuts, so as to save a pass."""
    return product & _WORD if isinstance(product, int) else product


def gumbel_noise(seed_R: Tensor, prompt_R: Tensor, sample_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of each row's (seed, prompt, sample, position), one value per vocabulary entry.

    Entry v takes word v % 4 of the counter (v // 4, position, sample, prompt) under the key seed. With w the word as a
    number in (0, 1), the noise is -log(-log(1 - w)): large values keep full precision (to 22.9), where log(u) of a
    float32 u would round to a tie at 1.

    Args:
        seed_R, prompt_R, sample_R, position_R: [R] int64; seed counts in 64 bits, the others in their lowest 32.
        vocab_size: V.

    Returns:
        [R, V] float32 on the device of `seed_R`.
    """
    num_counters = -(-vocab_size // 4)
    on_cpu = seed_R.device.type == "cpu"
    # numpy's integer products run at twice the speed of torch's.
    counters = np.arange(num_counters, dtype=np.uint64) if on_cpu else torch.arange(num_counters, device=seed_R.device)
    noise = torch.empty((seed_R.shape[0], num_counters, 4), dtype=torch.float32, device=seed_R.device)
    keys = torch.stack((seed_R, seed_R >> 32, position_R, sample_R, prompt_R)) & _WORD
    # A row at a time, the words stay in the cache.
    for row, (seed_low, seed_high, *counter) in enumerate(keys.t().tolist()):
        words = philox4x32((counters, *counter), (seed_low, seed_high))
        for i, word in enumerate(words):
            noise[row, :, i] = torch.from_numpy(word.view(np.int64)) if on_cpu else word
    # 1 - 2⁻²⁴ is the largest float32 below 1; beyond it the noise would be -inf and could not even win alone.
    uniform = noise.view(seed_R.shape[0], -1)[:, :vocab_size].add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
