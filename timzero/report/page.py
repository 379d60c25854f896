"""One self-contained HTML page: styles and charts are inside, nothing is fetched."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timzero.report import charts
from timzero.report.data import ReportData

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def render(data: ReportData) -> str:
    """The page as text."""
    config = data.run["config"]
    sections = [
        _header(data),
        _tiles(data),
        '<div class="grid">',
        _card("Reward", "Mean over the step's trajectories. Evaluation tasks come from the same generator as the training tasks.",
              charts.reward(data)),
        _card("Training-inference mismatch", "Trainer minus engine, same token, same weights.", charts.tim(data)),
        _card("Tokens compared", "Every trained token is scored again under the version that sampled it.",
              charts.differing(data)),
        _card("Staleness", _staleness(config), charts.staleness(data)),
        _card("Throughput", "Sampled tokens trained on, per second of wall time.", charts.throughput(data)),
        _card("Step time", "Trainer phases; waiting is time without a complete batch.", charts.step_time(data)),
        _card("Entropy", "Of the sampled distribution, mean over tokens.", charts.entropy(data)),
        _card("Gradient norm", "Before clipping.", charts.grad_norm(data)),
        "</div>",
        _card("Who worked when", "Generation of one batch overlaps training on the one before.",
              charts.timeline(data), wide=True),
        '<div class="grid">',
        _card("Drops by reason", "", charts.drops(data) or '<p class="note">No trajectory was dropped.</p>'),
        _card("Counts", "accepted = trained + dropped + live, at every moment and after every crash.", _counts(data)),
        "</div>",
        _card("Run", "", _table(_flat(config)), wide=True),
    ]  # fmt: skip
    title = html.escape(f"{data.run['run']} · timzero report")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _lag(config: Mapping[str, Any]) -> str:
    return f"lag {config['lag']}" if config.get("max_lag") is None else f"max_lag {config['max_lag']}"


def _staleness(config: Mapping[str, Any]) -> str:
    if config.get("max_lag") is None:
        return f"Fixed lag {config['lag']}: batch s is sampled by version max(0, s - {config['lag']})."
    return f"No token of batch s is sampled by a version before s - {config['max_lag']}; the mean of each step."


def _header(data: ReportData) -> str:
    run, config = data.run, data.run["config"]
    kind = {"completed": "", "failed": " bad"}.get(run["state"], " other")
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run["created"]))
    reason = f": {run['reason']} {run['detail']}" if run["reason"] else ""
    return (
        f'<h1>{html.escape(run["run"])}<span class="badge{kind}">{html.escape(run["state"] + reason)}</span></h1>'
        f'<p class="sub">{html.escape(config["model"])} · {html.escape(config["numerics"])} numerics · '
        f"{config['prompts_per_step']} prompts × {config['samples_per_prompt']} samples a step · {_lag(config)} · "
        f"seed {config['seed']} · created {created}</p>"
    )


def _tiles(data: ReportData) -> str:
    steps = data.summaries
    differing, compared = sum(s.differing_bits for s in steps), sum(s.compared_tokens for s in steps)
    tiles = []
    if data.evaluations:
        accuracy = " → ".join(f"{e['accuracy']:.2f}" for e in data.evaluations)
        tiles.append((accuracy, f"evaluation accuracy, {data.evaluations[0]['num_tasks']} tasks", ""))
    if steps:
        tiles.append((f"{steps[0].reward:.2f} → {steps[-1].reward:.2f}", "reward, first and last step", ""))
    is_exact = data.run["config"]["numerics"] == "exact"
    tiles += [
        (
            f"{differing:,}",
            f"differing bits in {compared:,} tokens",
            "good" if not differing else "bad" if is_exact else "",
        ),
        (f"{len(steps)} / {data.run['config']['num_steps']}", "steps trained", ""),
        (f"{sum(s.tokens for s in steps):,}", "sampled tokens trained on", ""),
    ]
    seconds = _duration(data)
    if seconds:
        tiles.append((f"{seconds:,.0f} s", "from the first sample to the last step", ""))
    cells = "".join(
        f'<div class="tile {kind}"><b>{value}</b><span>{label}</span></div>' for value, label, kind in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _duration(data: ReportData) -> float:
    began = [s.began for s in data.samples if s.began is not None]
    ended = [float(s.metrics["time"]) for s in data.summaries if "time" in s.metrics]
    return max(ended) - min(began) if began and ended else 0.0


def _published(data: ReportData) -> str:
    rows = [s.metrics for s in data.summaries if s.metrics.get("full_bytes")]
    sent, full = (sum(int(row[key]) for row in rows) for key in ("publish_bytes", "full_bytes"))
    return f"{sent:,} for {full:,} of weights ({100 * sent / full:.1f} %)" if full else "unknown"


def _counts(data: ReportData) -> str:
    m = data.metrics
    dropped = sum(m["dropped"].values())
    holds = m["accepted"] == m["trained"] + dropped + m["live"]
    rows: dict[str, Any] = {
        "equation": f"{m['accepted']:,} = {m['trained']:,} + {dropped:,} + {m['live']:,}"
        + ("" if holds else " DOES NOT HOLD"),
        "rewards that came too late": m["rewards_late"],
        "evaluation samples": ", ".join(f"{n:,} {state}" for state, n in m["evaluations"].items() if n) or "none",
        "weights digest": data.summaries[-1].digest if data.summaries else "none",
        "bytes published": _published(data),
    }
    return _table(rows)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in config.items():
        rows |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return rows


def _table(rows: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(k)}</td><td><code>{html.escape(str(v))}</code></td></tr>" for k, v in rows.items()
    )
    return f"<table>{cells}</table>"


def _card(title: str, note: str, body: str, *, wide: bool = False) -> str:
    text = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(title)}</h2>{text}{body}</section>'
