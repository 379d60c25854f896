"""Sampling by Gumbel-max: token = argmax(logits / temperature + Gumbel noise).

The noise is a function of (seed, prompt, sample, position) and the vocabulary entry, so a token does not depend on what
shares its batch or where its sequence is continued.

Legend: R rows, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shared.kernels.linear import Linear, padded_linear
from shared.kernels.logprob import log_sum_exp, row_chunks, scaled_logits
from shared.kernels.philox import gumbel_noise


class SampleOutput(NamedTuple):
    """One sampled token per row."""

    token: Tensor
    """[R] int32."""
    logprob: Tensor
    """[R] float32, of the distribution sampled from: at the row's temperature (1 if greedy), over the kept support."""
    top1: Tensor
    """[R] int32: the most probable token, the lowest id among equals."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What each row's draw depends on besides its logits."""

    seed: Tensor
    """[R] int64: the run's 64-bit seed (two's complement)."""
    prompt: Tensor
    """[R] int64: prompt number, its lowest 32 bits."""
    sample: Tensor
    """[R] int64: sample number within the prompt, its lowest 32 bits."""
    position: Tensor
    """[R] int64: absolute index, in its sequence, of the token to sample."""
    temperature: Tensor
    """[R] float32, >= 0; 0 takes the argmax."""
    top_k: Tensor | None = None
    """[R] int64: keep the k most probable; 0 keeps all."""
    top_p: Tensor | None = None
    """[R] float32: keep the smallest set of most probable tokens that holds this mass; 1 keeps all."""
    min_p: Tensor | None = None
    """[R] float32: keep tokens at least this fraction as probable as the most probable; 0 keeps all."""

    @classmethod
    def of(
        cls,
        *,
        seed: Sequence[int],
        prompt: Sequence[int],
        sample: Sequence[int],
        position: Sequence[int],
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: str | torch.device = "cpu",
    ) -> "SamplingParams":
        """From lists, one entry per row; unsigned 64-bit seeds are wrapped, filters that no row uses are dropped.

        Raises:
            ValueError: a value outside its range, or lists of different lengths.
        """
        if (
            len({len(x) for x in (seed, prompt, sample, position, temperature, top_k, top_p, min_p) if x is not None})
            > 1
        ):
            raise ValueError("sampling parameters have lists of different lengths; give one entry per row in each")
        if not all(t >= 0 for t in temperature):
            raise ValueError(f"temperature must be >= 0, got {list(temperature)}; use 0 for greedy")
        if not all(0 < p <= 1 for p in top_p or ()) or not all(0 <= p <= 1 for p in min_p or ()):
            raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1], got {top_p} and {min_p}; 1 and 0 keep all")
        if not all(k >= 0 for k in top_k or ()):
            raise ValueError(f"top_k must be >= 0, got {top_k}; 0 keeps all")

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor([(v + 2**63) % 2**64 - 2**63 for v in values], dtype=torch.int64, device=device)

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            seed=ints(seed),
            prompt=ints(prompt),
            sample=ints(sample),
            position=ints(position),
            temperature=floats(temperature),
            top_k=ints(top_k) if top_k and any(top_k) else None,
            top_p=floats(top_p) if top_p and any(p < 1 for p in top_p) else None,
            min_p=floats(min_p) if min_p and any(min_p) else None,
        )

    def rows(self, rows: slice) -> "SamplingParams":
        """The parameters of some rows."""
        return replace(self, **{name: v[rows] for name, v in vars(self).items() if v is not None})

    def to(self, device: torch.device) -> "SamplingParams":
        """The same on a device."""
        return replace(self, **{name: v.to(device) for name, v in vars(self).items() if v is not None})


def sample(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    params: SamplingParams,
    *,
    weight32_VD: Tensor | None = None,
    linear: Linear = padded_linear,
) -> SampleOutput:
    """Draw one token per row; without filters its logprob has the bits that `lm_logprob` gives it.

    Args:
        hidden_RD: [R, D] final hidden states, after the last norm.
        weight_VD: [V, D] head weights of the same dtype.
        params: one entry per row.
        weight32_VD: `weight_VD.float()` computed beforehand, or None.
        linear: the float32 product.
    """
    num_rows, vocab_size = hidden_RD.shape[0], weight_VD.shape[0]
    weight32_VD = weight_VD.float() if weight32_VD is None else weight32_VD
    chunks = []
    for rows in row_chunks(num_rows, vocab_size):
        z = scaled_logits(hidden_RD[rows], weight32_VD, params.temperature[rows], linear)
        chunks.append(_sample_chunk(z, rows, params))
    if not chunks:
        ids = torch.zeros(0, dtype=torch.int32, device=hidden_RD.device)
        return SampleOutput(ids, ids.float(), ids)
    return SampleOutput(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _sample_chunk(z_PV: Tensor, rows: slice, params: SamplingParams) -> SampleOutput:
    """Sample from scaled logits whose rows are padded to P."""
    num_rows = rows.stop - rows.start
    top1 = z_PV[:num_rows].argmax(-1)
    filters = [None if f is None else f[rows] for f in (params.top_k, params.top_p, params.min_p)]
    if any(f is not None for f in filters):
        hidden = ~kept_support(z_PV[:num_rows], *filters)
        z_PV[:num_rows].masked_fill_(hidden, -torch.inf)
    lse = log_sum_exp(z_PV)[0][:num_rows]
    z_RV = z_PV[:num_rows]

    token = top1.clone()
    drawn = (params.temperature[rows] > 0).nonzero().squeeze(1)
    if drawn.numel():
        seed, prompt, sample_number, position = (
            x[rows][drawn] for x in (params.seed, params.prompt, params.sample, params.position)
        )
        noise = gumbel_noise(seed, prompt, sample_number, position, z_RV.shape[1])
        token[drawn] = noise.add_(z_RV if drawn.numel() == num_rows else z_RV[drawn]).argmax(-1)
    logprob = z_RV.gather(1, token[:, None]).squeeze(1) - lse
    return SampleOutput(token.int(), logprob, top1.int())


def kept_support(z_RV: Tensor, top_k_R: Tensor | None, top_p_R: Tensor | None, min_p_R: Tensor | None) -> Tensor:
    """Which tokens survive the filters, applied in the order top-k, top-p, min-p; equals keep their lowest ids.

    Args:
        z_RV: [R, V] float32 logits over temperature.
        top_k_R, top_p_R, min_p_R: [R] each, or None.

    Returns:
        [R, V] bool, true for at least one token of a row.
    """
    ordered, order = z_RV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z_RV.shape[1], device=z_RV.device)
    kept = torch.ones_like(z_RV, dtype=torch.bool)
    if top_k_R is not None:
        kept &= (rank < top_k_R[:, None]) | (top_k_R == 0)[:, None]
    if top_p_R is not None:
        # The mass before a token decides: the one that crosses top_p is kept.
        probs = (ordered - ordered[:, :1]).exp_().mul_(kept)
        before = probs.cumsum(-1) - probs
        total = probs.cumsum(-1)[:, -1:]
        kept &= (before < top_p_R[:, None] * total) | (top_p_R >= 1)[:, None]
    if min_p_R is not None:
        kept &= ordered - ordered[:, :1] >= min_p_R[:, None].log()
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
