"""The logprobs that must exist before a batch's first gradient: under which weights, for which tokens.

    under the sampling version    for the TIM; the training forward is that forward when the version is the current one
    under the current version     the proximal policy: when there is more than one mini-step, or something must be decided before
    under the reference           when the algorithm has a KL penalty
A token is audited under exactly its own version, whatever the lag, and if versions change within a trajectory span by span.
What cannot be audited is counted by its reason.

Legend: T trainable tokens of the batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.trainer.batch import Batch, part_of
from services.trainer.copies import ForwardCopies, HostShards
from services.trainer.distributed import World
from services.trainer.policy import TokenScores, build_shell, fill, local_shards, score_batch
from shared.models import Decoder
from shared.wire.run import RunConfig


@dataclass(frozen=True)
class Scores:
    """Logprobs from before the step."""

    sampled: TokenScores | None
    """Under each token's own version; None: the training forward will give them all."""
    is_comparable_T: Tensor
    """[T] bool: `sampled`, or the training forward, is of the token's own version."""
    from_training_T: Tensor
    """[T] bool: the training forward is."""
    proximal_T: Tensor | None
    """[T] float32 under the current version; None: the training forward will give them."""
    reference_T: Tensor | None = None
    """[T] float32 under the reference policy; None without a KL penalty."""
    is_left_out_T: Tensor | None = None
    """[T] bool: could be audited and is not, because of `audit_share`; None: no token."""

    def sampled_with(self, trained: TokenScores) -> TokenScores:
        """Scores under each token's own version, once the training forward has run."""
        if self.sampled is None:
            return trained
        return TokenScores(torch.where(self.from_training_T, trained.bits, self.sampled.bits))

    def unaudited(self, batch: Batch) -> dict[str, int]:
        """Trained tokens that are not compared with the engine's, by reason."""
        left_out_T = torch.zeros_like(self.is_comparable_T) if self.is_left_out_T is None else self.is_left_out_T
        missing_T = ~self.is_comparable_T & ~left_out_T
        return {
            "mixed_kv": int((missing_T & (batch.version_T < 0)).sum()),
            "version_not_held": int((missing_T & (batch.version_T >= 0)).sum()),
            "share": int(left_out_T.sum()),
        }


class Scorer:
    """Every set of weights that this trainer can score with: the model, its older versions, the reference.

    Args:
        decoder: under training.
        copies: of its versions.
    """

    def __init__(
        self, decoder: Decoder, copies: ForwardCopies, config: RunConfig, dtype: torch.dtype, world: World
    ) -> None:
        self._decoder, self._copies, self._config, self._dtype, self._world = decoder, copies, config, dtype, world
        self._shell: Decoder | None = None
        self._reference: HostShards | None = None

    def keep_reference(self, decoder: Decoder) -> None:
        """This decoder's weights as they are now, in the published dtype, are the reference from here on; kept on the host."""
        shards = {name: local.to(self._dtype, copy=True) for name, local in local_shards(decoder).items()}
        mine = {name: local.shape for name, local in local_shards(self._decoder).items()}
        if mine != {name: shard.shape for name, shard in shards.items()}:
            raise ValueError(
                f"algorithm.kl_reference {self._config.algorithm.kl_reference} has another architecture than "
                f"{self._config.model}; give one with the same layers and sizes"
            )
        self._reference = HostShards(shards)

    def decoder_at(self, step: int) -> Decoder:
        """A decoder whose forward uses the weights of a held version; valid until the next call."""
        held = {c.version.step: c for c in self._copies.held}
        if held[step] is self._copies.current:
            return self._decoder
        fill(self._shared_shell(), held[step].shards)
        return self._shared_shell()

    def score(self, batch: Batch) -> Scores:
        """Logprobs of every trainable token that must exist before the first gradient."""
        needs_proximal = len(batch.mini_steps) > 1 or self._config.algorithm.is_decided_before
        current = score_batch(self._decoder, batch, self._world) if needs_proximal else None
        copies = [self._copies.find(version) for version in batch.versions]
        is_current_T = torch.tensor([copy is self._copies.current for copy in copies] + [False])[batch.version_T]
        is_held_T = torch.tensor([copy is not None for copy in copies] + [False])[batch.version_T]
        is_older_T = is_held_T & ~is_current_T
        is_left_out_T = is_older_T & ~self._is_selected(batch)
        sampled = current
        if bool(is_older_T.any()):
            sampled = TokenScores.blank(batch.num_tokens) if current is None else TokenScores(current.bits.clone())
        for index, copy in enumerate(copies):
            of_T = (batch.version_T == index) & is_older_T & ~is_left_out_T
            if copy is not None and bool(of_T.any()):
                assert sampled is not None
                self._score_under(copy.version.step, batch, of_T, sampled)
        return Scores(
            sampled=sampled,
            is_comparable_T=is_held_T & ~is_left_out_T,
            from_training_T=is_current_T & (current is None),
            proximal_T=None if current is None else current.logprob_T,
            reference_T=self._score_reference(batch),
            is_left_out_T=is_left_out_T,
        )

    def _score_under(self, step: int, batch: Batch, of_T: Tensor, into: TokenScores) -> None:
        """Runs only the groups that hold such tokens."""
        places = batch.group_N[batch.sequence_T[of_T]].unique().tolist()
        part = part_of(batch, places, self._config.micro_batch_tokens)
        scores = score_batch(self.decoder_at(step), replace(batch, mini_steps=(part,)), self._world)
        into.bits[:, of_T] = scores.bits[:, of_T]

    def _score_reference(self, batch: Batch) -> Tensor | None:
        if self._config.algorithm.kl == "none":
            return None
        assert self._reference is not None, "keep_reference was not called"
        fill(self._shared_shell(), self._reference)
        return score_batch(self._shared_shell(), batch, self._world).logprob_T

    def _shared_shell(self) -> Decoder:
        """One gradient-free model whose weights come and go, however many versions there are."""
        if self._shell is None:
            self._shell = build_shell(self._decoder.config, self._decoder.ops, self._dtype, self._world)
        return self._shell

    def _is_selected(self, batch: Batch) -> Tensor:
        """[T] bool: the same groups whatever the cut, the world and the restart."""
        share = self._config.audit_share
        names = (f"{self._config.run}.{self._config.seed}.{g.prompt_number}" for g in batch.groups)
        drawn = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") for name in names]
        selected_G = torch.tensor([d < share * 2**32 for d in drawn], dtype=torch.bool)
        return selected_G[batch.group_N[batch.sequence_T]]
