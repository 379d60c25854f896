"""A posted group becomes what an engine of ours would have recorded, or is refused: never something in between."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.gateway.ingest import sampled_group
from services.gateway.ingest_schemas import SampledBatch, SampledGroup
from services.gateway.problems import Problem
from services.gateway.schemas import Refused
from services.gateway.tokenizer import Tokenizer
from shared.wire.codec import decode_trajectory, encode_trajectory
from shared.wire.run import RunConfig

VOCAB = 50
TOKENIZER = Tokenizer("m", None, VOCAB)
CONFIG = RunConfig(run="r", model="m", num_steps=3, prompts_per_step=2, samples_per_prompt=2, lag=1, max_model_len=24)

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
logprobs = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    token_ids = draw(ids)
    values = np.array(draw(st.lists(logprobs, min_size=len(token_ids), max_size=len(token_ids))), np.float32)
    raw = {"logprobs_f32": values.tobytes()} if draw(st.booleans()) else {"logprobs": values.astype(float).tolist()}
    top1 = {"top1": draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(token_ids), max_size=len(token_ids)))}
    rewards = {"rewards": {"default": draw(st.floats(-1, 1))}}
    optional = (top1 if draw(st.booleans()) else {}) | (rewards if draw(st.booleans()) else {})
    return {"token_ids": token_ids, "finish_reason": draw(st.sampled_from(["stop", "length"])), **raw, **optional}


def body(of: list[dict[str, Any]], prompt: list[int], number: int = 0) -> dict[str, Any]:
    return {"number": number, "prompt_token_ids": prompt, "version": {"digest": "d"}, "sampling": {"temperature": 1.0},
            "sampler": "x", "samples": of}  # fmt: skip


@given(st.lists(samples(), min_size=2, max_size=2), ids, st.integers(0, 5))
def test_valid_group_keeps_every_bit_and_names_its_batchs_version(
    of: list[dict[str, Any]], prompt: list[int], number: int
) -> None:
    group = sampled_group(TOKENIZER, CONFIG, SampledGroup.model_validate(body(of, prompt, number)))
    step = CONFIG.version_for(CONFIG.batch_of(number))
    named = group.sampled_by(lineage=3, step=step, digest="full")
    assert named.fingerprint != group.fingerprint, "so it must be asked for before"
    for index, (posted, trajectory) in enumerate(zip(of, named.trajectories, strict=True)):
        t = decode_trajectory(encode_trajectory(trajectory))
        raw = posted.get("logprobs_f32") or np.array(posted["logprobs"], np.float32).tobytes()
        assert (t.trajectory_id, t.sampler, t.sample_index) == (f"r.{number}.{index}", "x", index)
        assert t.token_ids.tolist() == prompt + posted["token_ids"]
        assert t.logprobs.tobytes() == raw
        assert t.top1.tolist() == posted.get("top1", [-1] * len(posted["token_ids"]))
        assert t.loss_mask.tolist() == [0] * len(prompt) + [1] * len(posted["token_ids"])
        assert (t.spans[1].policy_step, t.spans[1].lineage, t.spans[1].manifest_digest) == (step, 3, "full")
        assert dict(group.rewards[index]) == posted.get("rewards", {})


@given(st.lists(st.floats(width=64), min_size=1, max_size=12), st.booleans())
def test_group_is_taken_exactly_when_every_logprob_is_one(values: list[float], as_bytes: bool) -> None:
    with np.errstate(over="ignore"):
        as_float32 = np.array(values).astype(np.float32)
    raw = {"logprobs_f32": as_float32.tobytes()} if as_bytes else {"logprobs": values}
    sample = {"token_ids": [1] * len(values), "finish_reason": "stop", **raw}
    item = SampledGroup.model_validate(body([sample, sample], [1]))
    if all(math.isfinite(v) and v <= 0 for v in as_float32.tolist()):
        group = sampled_group(TOKENIZER, CONFIG, item)
        assert group.trajectories[0].logprobs.tobytes() == as_float32.tobytes()
    else:
        with pytest.raises(Problem) as caught:
            sampled_group(TOKENIZER, CONFIG, item)
        assert caught.value.code == "logprob-invalid"
        assert caught.value.extra["nonfinite"] == sum(not math.isfinite(v) for v in as_float32.tolist())


@given(
    st.dictionaries(
        st.sampled_from(["token_ids", "logprobs", "logprobs_f32", "text", "finish_reason", "rewards", "top1"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.floats(), max_size=3),
        max_size=5,
    )
)
def test_anything_else_is_refused_by_name_and_breaks_nothing(sample: dict[str, Any]) -> None:
    (item,) = SampledBatch.model_validate({"items": [body([sample, sample], [1])]}).items
    if isinstance(item, Refused):
        assert all(e.pointer.startswith("/samples/") and e.detail for e in item.errors)
        return
    with contextlib.suppress(Problem):
        sampled_group(TOKENIZER, CONFIG, item)


def test_text_is_told_why_it_can_not_be_trained() -> None:
    with pytest.raises(ValidationError, match="text can't be turned back into the ids that were sampled"):
        SampledGroup.model_validate(body([{"text": "yes", "finish_reason": "stop"}] * 2, [1]))


def test_example_of_the_documentation_is_one() -> None:
    section = (Path(__file__).parents[2] / "docs" / "http.md").read_text().split("## Trajectories sampled elsewhere")[1]
    posted = json.loads(section.split("--json '")[1].split("}'\n```")[0].replace("'$DIGEST'", "d") + "}")
    (item,) = SampledBatch.model_validate(posted).items
    assert isinstance(item, SampledGroup)
    assert item.version.digest == "d"
