"""What each correction does to the samples of another engine: plain transformers in bfloat16 against the trainer's forward.

    transformers.generate ──▶ ids, logprobs ──▶ the trainer's logprobs of the same ids under the same weights
                                                   └▶ per preset: weights, rejections, gradient

    python -m benchmarks.corrections [--model DIRECTORY] [--tokens 48] [--out FILE]

The gradient is the loss's with respect to the logprobs, which is what a correction changes; its distance is that to the
gradient of `disabled`, |g - g0| / |g0|. Rewards are drawn at random: what they are does not touch weights and filters.

Legend: T sampled tokens, N trajectories.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness import Record, Recorder
from services.trainer.advantage import advantages
from services.trainer.filters import accept, keep_tokens
from services.trainer.loss import policy_loss, token_scale
from services.trainer.mismatch import Divergence, divergence
from shared.kernels import build_ops
from shared.models import load_model, packed_layout
from shared.wire.algorithm import AlgorithmConfig
from timzero import model

PRESETS = (
    "disabled",
    "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs",
    "decoupled_geo_rs", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "prime_rl",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of France?", "Write a sentence about the sea.", "Name three colours.", "What is 17 plus 25?",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one preset does to a batch."""

    preset: str
    weight_mean: float
    weight_min: float
    weight_max: float
    rejected_tokens: float
    """Share."""
    rejected_trajectories: float
    """Share."""
    gradient_change: float
    """|g - g0| / |g0|, g0 uncorrected."""


def sample_group(
    directory: Path, prompt: Sequence[int], *, n: int, max_new_tokens: int, temperature: float = 1.0, seed: int = 0
) -> list[dict[str, Any]]:
    """Samples of one prompt by plain transformers in bfloat16, as `POST /v1/runs/{run}/trajectories` takes them.

    Returns: `token_ids`, `top1` (int64 arrays), `logprobs` (float32 array, of the distribution sampled from), `finish_reason`.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ends = plain.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    output = plain.generate(
        torch.tensor([list(prompt)] * n), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
    )  # fmt: skip
    logprob_NSV = torch.stack(output.scores, dim=1).float().log_softmax(-1)
    sampled_NS = output.sequences[:, len(prompt) :]
    samples = []
    for ids_S, logprob_SV in zip(sampled_NS, logprob_NSV, strict=True):
        stops = [i for i, token in enumerate(ids_S.tolist()) if token in ends]
        length = stops[0] + 1 if stops else len(ids_S)
        ids_S, logprob_SV = ids_S[:length], logprob_SV[:length]
        samples.append(
            {
                "token_ids": ids_S.numpy(),
                "logprobs": logprob_SV.gather(1, ids_S[:, None])[:, 0].numpy(),
                "top1": logprob_SV.argmax(-1).numpy(),
                "finish_reason": "stop" if stops else "length",
            }
        )
    return samples


@torch.no_grad()
def trainer_logprobs(directory: Path, prompt: Sequence[int], samples: Sequence[dict[str, Any]]) -> Tensor:
    """[T] float32: the exact forward of trainer and engine, of all samples one after the other."""
    decoder = load_model(directory, build_ops("exact"), torch.bfloat16)
    logprobs = []
    for sample in samples:
        targets = torch.as_tensor(sample["token_ids"])
        ids = torch.cat([torch.tensor(list(prompt)), targets])
        rows = torch.arange(len(prompt) - 1, len(ids) - 1)
        layout = packed_layout([len(ids)])
        logprobs.append(decoder.score(ids, layout.positions, layout, rows, targets, torch.ones(len(rows))).logprob)
    return torch.cat(logprobs)


def effect(preset: str, train_T: Tensor, rollout_T: Tensor, sequence_T: Tensor, group_N: Tensor) -> Effect:
    """Args:
    train_T, rollout_T: [T] float32 logprobs under the same weights.
    sequence_T: [T] int64 trajectory of each token.
    group_N: [N] int64 group of each trajectory.
    """
    config, n = AlgorithmConfig(preset=preset), len(group_N)
    rewards = torch.from_numpy(np.random.default_rng(0).normal(size=n))
    accepted_N = accept(train_T, rollout_T, sequence_T, n, config).accepted_N
    scale_T = token_scale(config.aggregation, sequence_T, n, config.aggregation_length)

    def gradient_of(config: AlgorithmConfig, accepted_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, weights, what is kept."""
        advantage_N = advantages(
            config.advantage,
            reward_N=rewards,
            group_N=group_N,
            num_tokens_N=sequence_T.bincount(minlength=n),
            accepted_N=accepted_N,
        )
        advantage_T = advantage_N.float()[sequence_T]
        kept_T = accepted_N[sequence_T] & keep_tokens(train_T, rollout_T, advantage_T, sequence_T, n, config)
        logprob_T = train_T.clone().requires_grad_()
        loss = policy_loss(
            config, logprob_T=logprob_T, proximal_T=train_T, rollout_T=rollout_T, advantage_T=advantage_T,
            accepted_T=kept_T, scale_T=scale_T, sequence_T=sequence_T, segment_T=sequence_T,
        )  # fmt: skip
        loss.loss.backward()
        assert logprob_T.grad is not None
        return logprob_T.grad, loss.weight_T, kept_T

    plain_T, _, _ = gradient_of(AlgorithmConfig(preset="disabled"), torch.ones(n, dtype=torch.bool))
    gradient_T, weight_T, kept_T = gradient_of(config, accepted_N)
    return Effect(
        preset=preset,
        weight_mean=float(weight_T.mean()),
        weight_min=float(weight_T.min()),
        weight_max=float(weight_T.max()),
        rejected_tokens=float((~kept_T).float().mean()),
        rejected_trajectories=float((~accepted_N).float().mean()),
        gradient_change=float((gradient_T - plain_T).norm() / plain_T.norm()),
    )


def measure(
    directory: Path, prompts: Sequence[Sequence[int]], *, n: int, max_new_tokens: int
) -> tuple[Divergence, int, list[Effect]]:
    """How far the two paths lie apart, over how many tokens, and what every preset makes of it."""
    groups = [sample_group(directory, p, n=n, max_new_tokens=max_new_tokens, seed=i) for i, p in enumerate(prompts)]
    train_T = torch.cat([trainer_logprobs(directory, p, g) for p, g in zip(prompts, groups, strict=True)])
    samples = [s for group in groups for s in group]
    rollout_T = torch.from_numpy(np.concatenate([s["logprobs"] for s in samples]))
    lengths_N = torch.tensor([len(s["token_ids"]) for s in samples])
    sequence_T = torch.repeat_interleave(torch.arange(len(samples)), lengths_N)
    group_N = torch.arange(len(prompts)).repeat_interleave(n)
    effects = [effect(preset, train_T, rollout_T, sequence_T, group_N) for preset in PRESETS]
    return divergence(train_T, rollout_T), len(train_T), effects


def table(effects: Sequence[Effect]) -> list[list[str]]:
    """Rows of text, a header first."""
    rows = [["preset", "weights: mean", "least", "largest", "rejected tokens", "trajectories", "gradient moves by"]]
    for e in effects:
        weights = [f"{x:.3f}" for x in (e.weight_mean, e.weight_min, e.weight_max)]
        shares = [f"{100 * x:.1f} %" for x in (e.rejected_tokens, e.rejected_trajectories, e.gradient_change)]
        rows.append([f"`{e.preset}`", *weights, *shares])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as of `timzero model get`")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--tokens", type=int, default=48, help="sampled per trajectory, at most")
    parser.add_argument("--out", type=Path, help="JSON file of the records")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/corrections.md has it")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    directory = model.get(args.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    apart, num_tokens, effects = measure(directory, prompts, n=args.samples, max_new_tokens=args.tokens)
    recorder = Recorder(args.out)
    params = {"model": args.model, "tokens": num_tokens}
    for metric, value in (("abs_delta_mean", apart.abs_mean), ("abs_delta_max", apart.abs_max), ("k3", apart.k3)):
        recorder.add(Record("corrections", "mismatch", params, "exact", metric, value, "nat", baseline="transformers"))
    for e in effects:
        for metric in ("weight_mean", "weight_max", "rejected_tokens", "rejected_trajectories", "gradient_change"):
            value = getattr(e, metric)
            recorder.add(Record("corrections", e.preset, params, "exact", metric, value, "1", baseline="disabled"))
    recorder.save()
    header, *rows = table(effects)
    print(f"{num_tokens} tokens: |delta| mean {apart.abs_mean:.3f}, p99 {apart.abs_p99:.3f}, max {apart.abs_max:.3f}")
    if args.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)))
    else:
        shown = Table(*header)
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)


if __name__ == "__main__":
    main()
