"""Fills the tables of docs/scaling.md from its formulas: `make docs`. A test compares the two.

Legend: N GPUs, P parameters, T packed tokens of a micro-batch on one GPU, D hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).with_name("scaling.md")

HBM = 141e9
"""Bytes of an H200, of which 5 % are left to the allocator, NCCL and the driver."""
COLLECTIVE = 400e9
"""Bytes/s that one GPU takes in from all others: 8 x 400 Gb/s a node, and about what NVLink gives inside one."""
PEAK, MFU = 989e12, 0.40
LAG = 1
NODE = 8


@dataclass(frozen=True)
class Model:
    """A decoder's dimensions; experts 0 is dense, otherwise every layer routes each token to `active` of them."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    active: int = 1
    is_tied: bool = False

    @property
    def attention(self) -> int:
        """Parameters of one layer's projections and norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv) + 2 * self.head_dim + 2 * self.hidden

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def router(self) -> int:
        return self.experts * self.hidden

    @property
    def layer(self) -> int:
        return self.attention + self.router + max(self.experts, 1) * self.expert

    @property
    def root(self) -> int:
        """Embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def active_parameters(self) -> int:
        """That one token meets."""
        return self.layers * (self.attention + self.router + self.active * self.expert) + self.root

    def kept(self, recompute: str, size: int = 2) -> int:
        """Bytes that one token keeps in one layer until the backward.

        Args:
            recompute: none | elementwise | mlp | layer.
            size: bytes of an activation.
        """
        d, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.active * self.inner
        # Both residuals; queries and keys before and after the head norms and the rotation; values; attention's output.
        elements = 2 * d + 3 * q + 3 * kv
        # One float32 a row: scales of the head norms, log-sum-exp of attention.
        scalars = 2 * self.heads + self.kv_heads
        if recompute == "layer":
            return d * size
        if recompute in ("elementwise", "none"):
            elements += 2 * inner
        if recompute == "none":
            elements += 2 * d + inner
            scalars += 2
        # Experts read a copy of each token's row and write one, for each that it is routed to.
        elements += 2 * self.active * d if self.experts and recompute != "mlp" else 0
        return elements * size + 4 * scalars

    @property
    def kv_bytes(self) -> int:
        """Of the cache, per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


QWEN3 = {"head_dim": 128, "vocab": 151936}
MODELS = (
    Model("8B", 36, 4096, 12288, 32, 8, **QWEN3),
    Model("32B", 64, 5120, 25600, 64, 8, **QWEN3),
    Model("235B-A22B", 94, 4096, 1536, 64, 4, **QWEN3, experts=128, active=8),
)
SMALL = Model("1.7B", 28, 2048, 6144, 16, 8, **QWEN3, is_tied=True)
SIZES = (8, 64, 512)
TOKENS = (16384, 32768)
HEAD_ROWS, HEAD_GRADIENT_ROWS = 1024, 2048


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU while it trains."""

    state: float
    """Masters and two moments, float32."""
    gradients: float
    """float32."""
    copies: float
    """bfloat16 casts of the current version and the LAG before it."""
    gathered: float
    """Two layers and the root in bfloat16; of one layer the gradient in bfloat16 and in float32, to be reduced."""
    activations: float
    head: float
    """Logits of HEAD_ROWS rows, gradients of HEAD_GRADIENT_ROWS; the float32 gradient of the head's weight."""

    @property
    def total(self) -> float:
        """The largest moment: gradients replace activations as the backward goes on."""
        return self.state + self.copies + self.gathered + max(self.activations + self.head, self.gradients)


def memory(model: Model, gpus: int, tokens: int, recompute: str) -> Memory:
    """Of pure FSDP2, resharded behind every forward."""
    p = model.parameters
    return Memory(
        state=12 * p / gpus,
        gradients=4 * p / gpus,
        copies=2 * (LAG + 1) * p / gpus,
        gathered=2 * (2 * model.layer + model.root) + 6 * model.layer,
        # What is kept, and what one layer holds while it is computed again.
        activations=tokens * (model.layers * model.kept(recompute) + model.kept("none")),
        head=(4 * HEAD_ROWS + 2 * HEAD_GRADIENT_ROWS) * model.vocab + 4 * model.vocab * model.hidden,
    )


def traffic(model: Model, gpus: int) -> tuple[float, float, float]:
    """Bytes that one GPU takes in per micro-batch: gathers of forward and backward, reduction, the scoring forward of an older
    version."""
    share = (gpus - 1) / gpus
    return 2 * 2 * model.parameters * share, 4 * model.parameters * share, 2 * model.parameters * share


def computing(model: Model, tokens: int) -> float:
    """Seconds of forward and backward of one micro-batch, attention aside."""
    return 6 * model.active_parameters * tokens / (PEAK * MFU)


def gb(value: float) -> str:
    return f"{value / 1e9:,.1f}" if value < 99.95e9 else f"{value / 1e9:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def models() -> str:
    rows = [
        [
            m.name, f"{m.parameters / 1e9:.2f}", f"{m.active_parameters / 1e9:.2f}", gb(2 * m.layer), gb(2 * m.root),
            *(f"{m.kept(r) * m.layers / 1e6:.2f}" for r in ("none", "elementwise", "mlp", "layer")),
        ]
        for m in (SMALL, *MODELS)
    ]  # fmt: skip
    header = [
        "model",
        "P, 1e9",
        "active",
        "layer, GB",
        "root, GB",
        *(f"{r}, MB a token" for r in ("none", "elementwise", "mlp", "layer")),
    ]
    return table(header, rows)


def memory_rows(tokens: int, recompute: str) -> list[list[str]]:
    rows = []
    for model in MODELS:
        for gpus in SIZES:
            m = memory(model, gpus, tokens, recompute)
            parts = (m.state, m.gradients, m.copies, m.gathered, m.activations, m.head, m.total)
            fits = "yes" if m.total < 0.95 * HBM else "no"
            rows.append([model.name, str(gpus), *map(gb, parts), fits])
    return rows


def memory_table(tokens: int, recompute: str) -> str:
    header = [
        "model",
        "GPUs",
        "state",
        "gradients",
        "copies",
        "gathered",
        "activations",
        "head",
        "peak, GB",
        "fits 141 GB",
    ]
    return table(header, memory_rows(tokens, recompute))


def traffic_table() -> str:
    rows = []
    for model in MODELS:
        for gpus in SIZES:
            gathers, reduction, scoring = traffic(model, gpus)
            seconds = (gathers + reduction + scoring) / COLLECTIVE
            work = computing(model, TOKENS[0]) * 4 / 3
            needed = TOKENS[0] * seconds / work
            rows.append(
                [model.name, str(gpus), gb(gathers), gb(reduction), gb(scoring), f"{seconds:.2f}", f"{work:.2f}",
                 f"{needed:,.0f}", f"{gpus * TOKENS[0] / 1e6:.2f}"]
            )  # fmt: skip
    header = [
        "model", "GPUs", "gathers, GB", "reduction, GB", "scoring, GB", "network, s", "computing, s", "tokens to hide it",
        "tokens of one round, 1e6",
    ]  # fmt: skip
    return table(header, rows)


def publish_table() -> str:
    rows = []
    for model in MODELS:
        size = 2 * model.parameters
        rows.append([model.name, gb(size), *(f"{size / rate:,.1f}" for rate in (1.25e9, 12.5e9, 50e9))])
    return table(["model", "version, GB", "10 Gb/s, s", "100 Gb/s, s", "400 Gb/s, s"], rows)


def rollout_table() -> str:
    rows = []
    for model in MODELS:
        for gpus in (1, 2, 4, 8):
            weights = 2 * model.parameters / gpus
            for staged, name in ((2, "yes"), (1, "no")):
                room = 0.9 * HBM - staged * weights
                # Heads are split, so GPUs beyond the KV heads hold copies of them.
                cache = model.kv_bytes / min(gpus, model.kv_heads)
                if room > 0 and (staged == 2 or 2 * weights > 0.9 * HBM):
                    rows.append(
                        [
                            model.name,
                            str(gpus),
                            gb(weights),
                            name,
                            f"{model.kv_bytes / 1e3:.0f}",
                            f"{room / cache / 1e3:,.0f}",
                        ]
                    )
    return table(
        [
            "model",
            "GPUs of a replica",
            "weights a GPU, GB",
            "staging beside them",
            "KV, kB a token",
            "tokens in the cache, 1e3",
        ],
        rows,
    )


TABLES: dict[str, Callable[[], str]] = {
    "models": models,
    "memory 16384 mlp": lambda: memory_table(TOKENS[0], "mlp"),
    "memory 32768 layer": lambda: memory_table(TOKENS[1], "layer"),
    "traffic": traffic_table,
    "publish": publish_table,
    "rollout": rollout_table,
}


def document() -> str:
    """The page with its tables made anew."""
    text = TARGET.read_text()
    for name, make in TABLES.items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"{TARGET} has {count} places for the table {name!r}"
    return text


if __name__ == "__main__":
    TARGET.write_text(document())
