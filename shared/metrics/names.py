"""Every metric once: name, kind, unit in the name, labels, help. Labels are bounded; a trajectory id is never one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
DELTAS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1, 2, 5, 10, 20)
STEPS = (0, 1, 2, 3, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


# flow
TRAJECTORIES = Metric("timzero_trajectories", "gauge", "Trajectories of the run by state", ("run", "state"))
TRAJECTORIES_ACCEPTED = Metric("timzero_trajectories_accepted_total", "counter", "Trajectories accepted", ("run",))
TRAJECTORIES_DROPPED = Metric(
    "timzero_trajectories_dropped_total", "counter", "Trajectories dropped", ("run", "reason")
)
REPLACED_GROUPS = Metric(
    "timzero_replaced_groups_total", "counter", "Groups sampled again because too few samples were left", ("run",)
)
QUEUE_DEPTH = Metric("timzero_queue_depth", "gauge", "Groups in the training queue, leased ones included", ("run",))
REWARD_WAIT_SECONDS = Metric("timzero_reward_wait_seconds", "histogram", "From generated to rewarded", ("run",))
REWARD_LATE = Metric(
    "timzero_reward_late_total", "counter", "Rewards refused because the trajectory was sealed", ("run",)
)
GATE_CLOSED = Metric("timzero_admission_gate_closed_total", "counter", "Prompts refused with 429", ("run",))
GATE_STEP = Metric("timzero_admission_gate_step", "gauge", "First batch that the admission gate refuses", ("run",))
LAG_LIMIT = Metric(
    "timzero_lag_limit_steps", "gauge", "Steps that a trained token's version may be old: lag, or max_lag", ("run",)
)
TRAJECTORIES_INGESTED = Metric(
    "timzero_trajectories_ingested_total", "counter", "Of those accepted, trajectories sampled elsewhere", ("run",)
)
INGEST_REFUSED = Metric(
    "timzero_ingest_refused_total", "counter", "Groups sampled elsewhere that were refused", ("run", "reason")
)
HTTP_REQUESTS = Metric("timzero_http_requests_total", "counter", "HTTP requests", ("route", "method", "status"))
HTTP_SECONDS = Metric("timzero_http_request_seconds", "histogram", "HTTP request time", ("route",))
DISPATCHED_GROUPS = Metric("timzero_dispatched_groups_total", "counter", "Groups sent to a replica", ("run",))
CONTINUED_TRAJECTORIES = Metric(
    "timzero_continued_trajectories_total", "counter", "Partial trajectories continued on another replica", ("run",)
)
REPLICA_FAILURES = Metric("timzero_replica_failures_total", "counter", "Generate streams that broke", ("reason",))

# engine
SAMPLED_TOKENS = Metric("timzero_sampled_tokens_total", "counter", "Tokens sampled", ("replica",))
PREFILL_TOKENS = Metric("timzero_prefill_tokens_total", "counter", "Prompt and recomputed tokens run", ("replica",))
PREFIX_HIT_TOKENS = Metric(
    "timzero_prefix_hit_tokens_total", "counter", "Tokens found in the prefix cache", ("replica",)
)
PREEMPTIONS = Metric("timzero_preemptions_total", "counter", "Sequences preempted for recompute", ("replica",))
CONTINUED_TOKENS = Metric(
    "timzero_continued_tokens_total", "counter", "Tokens sampled behind another replica's prefix", ("replica",)
)
ENGINE_STEP_SECONDS = Metric("timzero_engine_step_seconds", "histogram", "One engine step", ("replica",))
ENGINE_SECONDS = Metric(
    "timzero_engine_seconds_total",
    "counter",
    "Time of steps: schedule, prepare, wait and read on the host; forward, sample and idle (waiting for the host) on the device, "
    "of which full and full_idle with every place taken",
    ("replica", "phase"),
)
ENGINE_STEPS = Metric(
    "timzero_engine_steps_total",
    "counter",
    "Steps, by whether they replayed a graph: graph, eager",
    ("replica", "mode"),
)
CAPTURED_GRAPHS = Metric("timzero_captured_graphs", "gauge", "Graphs captured, of steps and of draws", ("replica",))
DROPPED_ROWS = Metric(
    "timzero_engine_dropped_rows_total",
    "counter",
    "Rows sampled behind the end of a sequence, which was not known when their step was launched",
    ("replica",),
)
RUNNING_SEQUENCES = Metric("timzero_running_sequences", "gauge", "Sequences in the batch", ("replica",))
WAITING_SEQUENCES = Metric("timzero_waiting_sequences", "gauge", "Sequences waiting for a place", ("replica",))
KV_USAGE = Metric("timzero_kv_usage_ratio", "gauge", "Share of KV pages in use", ("replica",))
KERNELS = Metric(
    "timzero_kernels",
    "info",
    "Implementation executed per operation, read back, and the fingerprint of its numerics",
    ("role",),
)

# weights
POLICY_STEP = Metric("timzero_policy_step", "gauge", "Version held", ("role", "member"))
WEIGHT_SYNC_SECONDS = Metric("timzero_weight_sync_seconds", "histogram", "Time of one phase", ("phase",))
WEIGHT_SYNC_BYTES = Metric("timzero_weight_sync_bytes_total", "counter", "Bytes moved", ("transport",))
PUBLISH_BYTES = Metric(
    "timzero_publish_bytes_total", "counter", "Bytes that the trainer sent or wrote to publish", ("run",)
)
PUBLISH_FULL_BYTES = Metric(
    "timzero_publish_full_bytes_total", "counter", "Bytes of the versions that it published", ("run",)
)
DELTA_FALLBACKS = Metric(
    "timzero_delta_fallbacks_total", "counter", "Deltas given up for the full version", ("phase", "reason")
)
SOURCE_FALLBACKS = Metric(
    "timzero_weight_source_fallbacks_total",
    "counter",
    "Versions that were not had from the trainer's memory, and came from weight_sync",
    ("transport", "reason"),
)
WEIGHT_SYNC_FAILURES = Metric("timzero_weight_sync_failures_total", "counter", "Failed phases", ("phase",))
REPLICAS = Metric("timzero_replicas", "gauge", "Registered replicas by state", ("state",))
PARITY_MISMATCH = Metric(
    "timzero_parity_mismatch_tokens_total", "counter", "Probe tokens with differing bits", ("replica",)
)

# exactness
COMPARED_TOKENS = Metric("timzero_tim_compared_tokens_total", "counter", "Tokens scored at their own version", ("run",))
DIFFERING_TOKENS = Metric(
    "timzero_tim_differing_tokens_total", "counter", "Of those, tokens whose bits differ", ("run",)
)
TIM_DELTA = Metric("timzero_tim_abs_delta", "histogram", "|trainer - engine logprob|, same version", ("run",), DELTAS)
TIM_MAX_DELTA = Metric("timzero_tim_max_abs_delta", "gauge", "Largest |delta| of the last step", ("run",))
TOP1_FLIPS = Metric("timzero_tim_top1_flips_total", "counter", "Tokens whose argmax differs", ("run",))
INGESTED_DELTA = Metric(
    "timzero_ingested_abs_delta",
    "histogram",
    "|trainer - sampler logprob| of trained tokens that another engine sampled, same version",
    ("run",),
    DELTAS,
)
NONFINITE = Metric("timzero_nonfinite_total", "counter", "Non-finite logprobs or rewards refused", ("run",))

# trainer
STEP = Metric("timzero_step", "gauge", "Next step to train", ("run",))
STEP_SECONDS = Metric("timzero_step_seconds", "histogram", "One phase of a training step", ("run", "phase"))
STALENESS_STEPS = Metric(
    "timzero_staleness_steps", "histogram", "Step minus version of a trained token", ("run",), STEPS
)
TRAINED_TOKENS = Metric("timzero_trained_tokens_total", "counter", "Sampled tokens trained on", ("run",))
LOSS = Metric("timzero_loss", "gauge", "Policy loss of the last step", ("run",))
REWARD = Metric("timzero_reward_mean", "gauge", "Mean reward of the last step", ("run",))
GRAD_NORM = Metric("timzero_grad_norm", "gauge", "Gradient norm before clipping", ("run",))
ENTROPY = Metric("timzero_entropy", "gauge", "Mean entropy at the sampling temperature", ("run",))
LAST_STEP_TIMESTAMP = Metric(
    "timzero_last_step_timestamp_seconds", "gauge", "End of the last step, unix time", ("run",)
)
CHECKPOINT_STEP = Metric("timzero_checkpoint_step", "gauge", "Last durable checkpoint", ("run",))
OPTIMIZER_STEPS_SKIPPED = Metric(
    "timzero_optimizer_steps_skipped_total",
    "counter",
    "Optimizer steps left out: nothing was accepted, or the gradient is not finite",
    ("run",),
)
REJECTED_TRAJECTORIES = Metric(
    "timzero_rejected_trajectories_total", "counter", "Trajectories that the correction kept out of the loss", ("run",)
)
CORRECTION = Metric(
    "timzero_correction",
    "gauge",
    "Trainer before the step against sampler, last step: k1, k3, chi2_token, ess_raw, ess_applied, ppl_ratio, skew_index",
    ("run", "statistic"),
)
MISMATCH = Metric(
    "timzero_mismatch",
    "gauge",
    "Scalars of steps.jsonl, last step: series same_version and correction by staleness bucket, ingested, staleness, drift",
    ("run", "series", "staleness", "statistic"),
)
ACCUMULATED_MISMATCH = Metric(
    "timzero_accumulated_mismatch",
    "gauge",
    "Summed over a trajectory, trainer before the step against sampler, last step; by the longest length of the bucket",
    ("run", "statistic", "length"),
)
TRAJECTORY_K3 = Metric(
    "timzero_trajectory_k3", "histogram", "k3 summed over a trajectory, as a correction sees it", ("run",), DELTAS
)
CORRECTION_DELTA = Metric(
    "timzero_correction_abs_delta", "histogram", "|trainer before the step - sampler logprob|", ("run",), DELTAS
)
EQUAL_FRACTION = Metric(
    "timzero_tim_equal_fraction",
    "gauge",
    "Share of the compared tokens with equal bits, last step; 1 in exact mode",
    ("run",),
)
ULP_MAX = Metric(
    "timzero_tim_max_ulp", "gauge", "Largest distance in float32 values, same version, last step", ("run",)
)
UNAUDITED_TOKENS = Metric(
    "timzero_tim_unaudited_tokens_total",
    "counter",
    "Trained tokens that were not scored at their own version: mixed_kv, version_not_held, share",
    ("run", "reason"),
)
REJECTED_TOKENS = Metric(
    "timzero_rejected_tokens_total",
    "counter",
    "Tokens that one filter alone would keep out of the loss",
    ("run", "reason"),
)
UNTRAINED_GROUPS = Metric(
    "timzero_untrained_groups_total",
    "counter",
    "Groups left out by dynamic sampling: uniform, surplus",
    ("run", "reason"),
)
CLIP = Metric("timzero_clip_ratio", "gauge", "Shares of the tokens that the clip cut, last step", ("run", "statistic"))
REFERENCE_KL = Metric(
    "timzero_reference_kl",
    "gauge",
    "Against the reference policy, last step: coef, penalty, k1, k3",
    ("run", "statistic"),
)
LINEAGE_FORKS = Metric(
    "timzero_lineage_forks_total",
    "counter",
    "Versions trained again to other weights and published in a new lineage",
    ("run",),
)
