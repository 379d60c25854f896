"""Writes docs/configuration.md from the configuration classes: `make docs`. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.trainer.config import TrainerConfig
from services.weight_sync.config import WeightSyncConfig
from shared.config import keys
from shared.wire.run import RunConfig
from timzero.envs import KINDS
from timzero.job import EvaluationTable, LocalTable, SamplingTable

TARGET = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

Generated from the configuration classes by `make docs`; do not edit.

Every service takes `python -m services.NAME [CONFIG.toml] [key=value ...]`. Sources, later ones win:

1. the TOML file: the table `[NAME]` where the file has one, else the whole file;
2. the environment: `TIMZERO_NAME_KEY`, for example `TIMZERO_GATEWAY_PORT=8000`; nested keys are joined by `__`;
3. the command line: `key=value`; nested keys are joined by dots.

A value from the environment or the command line is read as the key's own type, lists and tables as TOML
(`keys=["a", "b"]`). `none` clears a key whose type allows None. An unknown key is an error that names the nearest one and
ends the process with exit code 2. `--help` prints the same keys as below.

In Kubernetes set `enableServiceLinks: false`: a Service called `timzero-gateway` would otherwise put
`TIMZERO_GATEWAY_PORT=tcp://...` into the environment of every pod.
"""

RUN = "`POST /v1/runs`, or the table `[run]` of a file for `timzero train`. The same for every service."

SECTIONS = (
    ("A run", RUN, RunConfig),
    ("`timzero train`: `[sampling]`", "", SamplingTable),
    ("`timzero train`: `[evaluation]`", "", EvaluationTable),
    ("`timzero train`: `[local]`", "", LocalTable),
    *((f'`timzero train`: `[environment]` with `type = "{name}"`', "", kind[0]) for name, kind in KINDS.items()),
    ("gateway", "", GatewayConfig),
    ("rollout", "", RolloutConfig),
    ("trainer", "", TrainerConfig),
    ("weight_sync", "", WeightSyncConfig),
)


def table(cls: type) -> str:
    rows = [f"| `{k.name}` | `{escaped(k.type)}` | {shown(k.default)} | {escaped(k.doc)} |" for k in keys(cls)]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def shown(default: str) -> str:
    return default if default in ("required", "computed") else f"`{escaped(default)}`"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def document() -> str:
    parts = [INTRODUCTION]
    for title, text, cls in SECTIONS:
        parts.append("\n\n".join(filter(None, [f"## {title}", text, table(cls)])))
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


if __name__ == "__main__":
    TARGET.write_text(document())
