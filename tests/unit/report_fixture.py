"""A run's data as a gateway would give it, made up but consistent, for the report's tests."""

import math
import random

from timzero.report.data import ReportData, Sample

PHASES = ("lease", "score", "train", "publish")


def make_data(*, numerics="exact", num_steps=25, num_replicas=2, dropped=None, state="completed") -> ReportData:
    rng = random.Random(7)
    start, size, n = 1_800_000_000.0, 8, 8
    steps, samples = [], []
    generated_at = start
    trained_at = start + 4
    for s in range(num_steps):
        reward = 0.2 + 0.75 / (1 + math.exp(-(s - 10) / 3)) + rng.uniform(-0.05, 0.05)
        generation_begin = max(generated_at, trained_at - 6 if s > 1 else start)
        for g in range(size):
            replica = f"rollout-{g % num_replicas}"
            begin = generation_begin + rng.uniform(0, 0.2)
            end = begin + rng.uniform(1.5, 2.6)
            generated_at = max(generated_at, end)
            samples += [
                Sample(
                    number=s * size + g,
                    state="trained",
                    step=s,
                    replicas=[replica],
                    began=begin,
                    ended=end,
                    rewarded=end + 0.05,
                    versions=[[max(0, s - 1), rng.randint(3, 6)]],
                    reward=float(rng.random() < reward),
                )
                for _ in range(n)
            ]
        times = {"lease": [trained_at, max(trained_at, generated_at)]}
        at = times["lease"][1]
        for phase, seconds in (("score", 0.9), ("train", 2.2), ("publish", 0.5)):
            times[phase] = [at, at + seconds * rng.uniform(0.9, 1.1)]
            at = times[phase][1]
        if s % 5 == 0 and s:
            times["checkpoint"] = [trained_at - 0.4, trained_at]
        trained_at = at
        tokens = sum(x.versions[0][1] for x in samples[-64:])
        noise = 0.0 if numerics == "exact" else 1.0
        steps.append(
            {
                "cursor": f"{s}-0",
                "step": s,
                "epoch": 1,
                "metrics": {
                    "publish_bytes": 2_000_000,
                    "full_bytes": 100_000_000,
                    "reward_mean": reward,
                    "reward_std": 0.3,
                    "loss": -0.01,
                    "grad_norm": 1.2 - 0.02 * s,
                    "entropy": 2.5 / (1 + s / 5),
                    "lag": float(s > 0),
                    "tokens": tokens,
                    "tokens_per_s": tokens / (at - times["lease"][0]),
                    "weights_digest": f"{s:064x}",
                    "phases": times,
                    "time": at,
                    "tim": {
                        "compared_tokens": tokens,
                        "uncompared_tokens": 0,
                        "differing_tokens": int(noise * tokens * 0.9),
                        "differing_bits": int(noise * tokens * 6),
                        "ulp_max": 0,
                        "top1_flips": int(noise * 3),
                        "nonfinite": 0,
                        "abs_mean": noise * 4e-2,
                        "abs_p99": noise * 0.2 * rng.uniform(0.8, 1.2),
                        "abs_max": noise * 0.44 * rng.uniform(0.6, 1.4),
                    },
                },
            }
        )
    dropped = dropped or {}
    trained = len(samples)
    return ReportData(
        run={
            "run": "products",
            "state": state,
            "reason": "" if state == "completed" else "mismatch",
            "detail": "",
            "created": start - 9,
            "step": num_steps,
            "durable_step": num_steps,
            "lineage": 0,
            "config": {
                "run": "products",
                "model": "/models/smollm2-135m-instruct",
                "numerics": numerics,
                "num_steps": num_steps,
                "prompts_per_step": size,
                "samples_per_prompt": n,
                "lag": 1,
                "seed": 0,
                "optimizer": {"lr": 2e-5},
            },
        },
        metrics={
            "accepted": trained + sum(dropped.values()),
            "trained": trained,
            "dropped": dropped,
            "live": 0,
            "rewards_late": 0,
            "evaluations": {"evaluated": 128},
        },
        steps=steps,
        samples=samples,
        evaluations=[
            {"name": "before", "step": 0, "accuracy": 0.31, "mean_reward": 0.31, "num_tasks": 64},
            {"name": "after", "step": num_steps, "accuracy": 0.98, "mean_reward": 0.98, "num_tasks": 64},
        ],
    )
