"""Versions on their way: what taking one costs a replica that samples, every transport, and deltas of training."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.page import charts
from benchmarks.page.charts import Point
from benchmarks.page.goals import NOT_MEASURED, Goal, at_least, at_most
from benchmarks.page.results import Found, Results, percent, ratio, table

MOST_PAUSE_MS, MOST_TOTAL_S, LEAST_SPEED, LEAST_GB = 50.0, 1.5, 0.9, 1.0
"""Targets: sampling stands still; a version from the trainer's weights to a replica that samples with it; tokens/s during
Prepare over undisturbed; gRPC on loopback, GB/s."""
TAKING = {
    "gather_s": "gathering", "digest_s": "digests", "announce_s": "announcing", "prepare_s": "Prepare", "commit_s": "Commit",
    "total_s": "in all",
}  # fmt: skip
WAYS = ("digest_s", "publish_s", "fetch_s", "total_s")
RATES = {"publish_rate": "publishing", "fetch_rate": "fetching"}
MB = 1e6


def servings(every: Sequence[Results]) -> list[tuple[Results, Found]]:
    """Each replica that was measured, by the record of its pause."""
    return [(r, found) for r in every for found in r.all("serving", "pause_s")]


def serving_table(every: Sequence[Results]) -> str:
    """One column per replica."""
    runs = servings(every)

    def of(metric: str, scale: float = 1.0, digits: int = 0) -> list[str]:
        return [f"{scale * r.value('serving', metric, f['mode'], **f['params']):,.{digits}f}" for r, f in runs]

    speed = [r.first("serving", "prepare_tokens_per_s", f["mode"], **f["params"]) for r, f in runs]
    return table(["", *(r.where for r, _ in runs)], [
        ["model", *(f["params"]["model"] for _, f in runs)],
        ["bytes, GB", *(f"{f['params']['bytes'] / 1e9:.2f}" for _, f in runs)],
        ["transport", *(f["mode"] for _, f in runs)],
        ["samples at once", *(str(f["params"]["sequences"]) for _, f in runs)],
        ["versions", *(str(f["params"]["versions"]) for _, f in runs)],
        *([f"{name}, ms", *of(metric, 1e3)] for metric, name in TAKING.items()),
        ["of it sampling stands still, ms", *of("pause_s", 1e3, 1)],
        ["tokens/s, undisturbed", *of("tokens_per_s")],
        ["tokens/s, during Prepare", *of("prepare_tokens_per_s")],
        ["during Prepare / undisturbed", *(f"{f['ratio']:.2f}" for f in speed)],
    ])  # fmt: skip


def serving(every: Sequence[Results]) -> str:
    if not servings(every):
        return ""
    return f"""\
### A replica that takes versions while it samples

Random weights; trainer, weight_sync and replica are processes of their own, and every version's probe agrees to the
bit before it is used. Prepare copies a version beside the one that samples and checks it, Commit changes them
between two steps. Samples go on afterwards: what they computed again of their contexts is not in the pause. Medians
over versions.

{serving_table(every)}"""


def serving_goals(r: Results) -> list[Goal]:
    """Of every replica that was measured."""
    return [goal for found in r.all("serving", "pause_s") or (None,) for goal in goals_of_replica(r, found)]


def goals_of_replica(r: Results, pause: Found | None) -> list[Goal]:
    where = {"mode": pause["mode"], **pause["params"]} if pause else {}
    total = r.maybe("serving", "total_s", **where)
    speed = ratio(r.maybe("serving", "prepare_tokens_per_s", **where))
    name = f"weights: {r.where}" + (f", {pause['params']['model']} by {pause['mode']}" if pause else "")
    pause_ms = 1e3 * pause["value"] if pause else None
    return [
        at_most(f"{name}, sampling stands still", MOST_PAUSE_MS, pause_ms, "ms", digits=1),
        at_most(f"{name}, a version in all", MOST_TOTAL_S, total["value"] if total else None, "s"),
        at_least(f"{name}, tokens/s during Prepare / undisturbed", LEAST_SPEED, speed, digits=2),
    ]


def transports(r: Results) -> str:
    """Every way by which a version was sent and fetched."""
    found = r.all(None, "total_s")
    found = [f for f in found if f["case"] != "serving"]
    if not found:
        return ""
    rows = []
    for f in found:
        where = {"case": f["case"], "mode": f["mode"], **f["params"]}
        sent, rates = (
            r.value(metric="publish_bytes", **where),
            [f"{r.value(metric=m, **where) / 1e3:.2f}" for m in RATES],
        )
        if f["case"] == "shm":
            # nothing but a name is sent
            rates[0] = "-"
        rows.append([
            f["params"]["model"], f["case"], f["mode"], *(f"{r.value(metric=m, **where):.3f}" for m in WAYS),
            *rates, f"{sent / MB:,.1f}", percent(sent / f["params"]["bytes"]),
        ])  # fmt: skip
    header = ["model", "transport", "bytes", "digests, s", "publish, s", "fetch, s", "in all, s", "publish, GB/s",
              "fetch, GB/s", "sent, MB", "of full"]  # fmt: skip
    return f"""\
### By transport

On {r.origin()[0]}, over loopback: the trainer publishes, then one replica fetches and verifies, one after the
other. Rates are the model's bytes over the time, whatever was sent. "synthetic" is a model of random bits. Through
shared memory publishing only names the version, and the copy is the replica's. [operations.md](operations.md) says
what bounds gRPC.

{table(header, rows)}"""


def grpc_goals(r: Results) -> list[Goal]:
    """Of all bytes, every model."""
    return [
        at_least(f"weights: {r.where}, gRPC on loopback, {name}{of}", LEAST_GB, value, "GB/s", digits=2)
        for metric, name in RATES.items()
        for of, value in [
            (f", {f['params']['model']}", f["value"] / 1e3) for f in r.all("grpc", metric, "full")
        ] or [("", None)]
    ]  # fmt: skip


def versions(r: Results) -> list[Found]:
    """Deltas of training, in order."""
    return r.all("training", "publish_bytes", "delta")


def delta_chart(r: Results) -> str:
    points = [Point(x=f["params"]["version"], y=f["value"] / MB, label="") for f in versions(r)]
    p = versions(r)[0]["params"]
    title = f"Bytes of each version of {p['model']} as a delta, of {p['full_bytes'] / MB:,.0f} MB, learning rate {power(p['lr'])}"
    return charts.points(title, ("version", "MB"), {"delta": points})


def deltas(r: Results) -> str:
    found = versions(r)
    if not found:
        return ""
    p, sizes = found[0]["params"], [f["value"] / MB for f in found]
    shares = [f["value"] / f["params"]["full_bytes"] for f in found]
    verified = r.value("training", "verified_versions", "delta")
    return f"""\
### Deltas of training

{len(found)} steps of the main job with {p["model"]} at the learning rate {power(p["lr"])}: a version takes {min(sizes):.1f} to
{max(sizes):.1f} MB instead of {p["full_bytes"] / MB:,.1f}, {percent(min(shares))} to {percent(max(shares))}. A reader
that computes nothing applied each to the version before; {verified:.0f} of {len(found)} came out with the digest
that the trainer had announced.

![Bytes of each version](plots/weight_delta.svg)

{learning_rates(r)}"""


def power(lr: float) -> str:
    """
    >>> power(2e-05)
    '2e-5'
    """
    return re.sub(r"e([+-])0", r"e\1", f"{lr:.0e}")


def learning_rates(r: Results) -> str:
    """What a delta takes by learning rate, from a checkpoint and from masters that training has moved."""
    found = r.all("learning_rate", "bytes_share", "delta")
    if not found:
        return ""
    starts, rates = (list(dict.fromkeys(f["params"][key] for f in found)) for key in ("masters", "lr"))
    names = {
        "checkpoint": "first step from a bfloat16 checkpoint",
        "settled": "later, masters between two bfloat16 values",
    }
    rows = []
    for start in starts:
        shares = (
            [
                r.value("learning_rate", metric, "delta", masters=start, lr=lr)
                for metric in ("bytes_share", "changed_share")
            ]
            for lr in rates
        )
        rows.append([names.get(start, start), *(f"{percent(size)} ({percent(changed)})" for size, changed in shares)])
    return f"""\
One AdamW step with random gradients moves every weight by the whole learning rate, which is more than training
does; the share of all bytes that its delta takes, and in brackets of weights that changed:

{table(["learning rate", *map(power, rates)], rows)}"""


def delta_goals(r: Results) -> list[Goal]:
    found = versions(r)
    if not found:
        return [Goal(f"weights: {r.where}, deltas of training with the right digest", "all", NOT_MEASURED, None)]
    verified = r.value("training", "verified_versions", "delta")
    words = f"{verified:.0f} of {len(found)}"
    return [Goal(f"weights: {r.where}, deltas of training with the right digest", "all", words, verified == len(found))]


def goals(cpu: Results, h200: Results) -> list[Goal]:
    return [*serving_goals(h200), *grpc_goals(cpu), *delta_goals(cpu)]


def plots(r: Results) -> dict[str, str]:
    return {"weight_delta": delta_chart(r)} if versions(r) else {}


def section(cpu: Results, h200: Results) -> str:
    pieces = list(filter(None, (serving((h200, cpu)), transports(cpu), deltas(cpu))))
    return "\n\n".join(["## Weights in motion", *pieces]) if pieces else ""
