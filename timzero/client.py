"""Python client of the gateway's HTTP API. No torch; docs/http.md explains routes and rules.

>>> from timzero.client import ApiError, Client
>>> with Client("http://127.0.0.1:8000", api_key=None) as client:
...     client.create_run({"run": "demo", "model": "/models/smol", "num_steps": 2, "prompts_per_step": 1})
...     results = client.post_prompts("demo", [
...         {"number": 0, "prompt_id": "task-0", "n": 8, "sampling": {"max_tokens": 6},
...          "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The answer is"}],
...          "reward": {"sources": ["grader"]}, "metadata": {"answer": "4"}}])
...     # [{"index": 0, "status": 202, "number": 0, "group_id": "demo.0", "trajectory_ids": ["demo.0.0", ...]}]
...     # status 200: accepted before with the same body; 4xx: refused, see results[i]["problem"]; 429: the gate is closed
...     for event in client.stream_events("demo", last_event_id="0", deadline_s=60):
...         if event.type == "trajectory.awaiting_reward":
...             t = client.trajectory("demo", event.trajectory_id)   # text, token_ids, logprobs (float32 array), metadata
...             client.put_reward("demo", event.trajectory_id, "grader", 1.0 if " 4" in t["text"] else 0.0)
...     evaluation = client.create_eval("demo", [{"prompt": "2 + 3 ="}], sampling={"temperature": 0.0, "max_tokens": 6})
...     evaluation = client.wait_eval("demo", evaluation["eval_id"], deadline_s=60)
...     evaluation["items"][0]["samples"][0]["text"]

Every call has a deadline (`deadline_s`, default the client's `timeout_s`) within which transport errors and answers that
the server calls retryable are tried again, with the Retry-After it names. Nothing happens twice by that: a POST carries an
Idempotency-Key unless its own ids make it harmless to repeat. An answer that stays an error raises `ApiError` with the
problem document. A Client may be used from several threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import httpx_sse
import numpy as np

from timzero.sampled import packed, parts
from timzero.transport import MSGPACK, ApiError, DeadlineError, Transport, decoded, retry_after_s

__all__ = ["ApiError", "Client", "DeadlineError", "Event"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run's stream. `cursor` is what `last_event_id` takes."""

    cursor: str
    type: str
    trajectory_id: str
    group_id: str
    data: Mapping[str, Any]


class Client:
    """Args:
    base_url: of the gateway, e.g. "http://127.0.0.1:8000".
    api_key: bearer token, or None where the gateway has no keys.
    timeout_s: default deadline of a call, retries included.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._transport = Transport(base_url, api_key, timeout_s)
        self.base_url = base_url
        self.timeout_s = timeout_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.http.close()

    # runs

    def create_run(self, config: Mapping[str, Any], *, deadline_s: float | None = None) -> dict[str, Any]:
        """Creates a run, or returns the one that has this very configuration. ApiError run-exists when it differs."""
        return self._transport.json("POST", "/v1/runs", json=dict(config), deadline_s=deadline_s, repeatable=True)

    def get_run(self, run: str, *, deadline_s: float | None = None) -> dict[str, Any]:
        """`state`, `reason`, `step`, `durable_step`, `config`, ..."""
        return self._transport.json("GET", f"/v1/runs/{run}", deadline_s=deadline_s)

    def runs(self, *, deadline_s: float | None = None) -> Iterator[dict[str, Any]]:
        return self._transport.pages("/v1/runs", "runs", {}, deadline_s)

    def pause(self, run: str, reason: str = "operator", *, deadline_s: float | None = None) -> dict[str, Any]:
        return self._transport.json(
            "POST", f"/v1/runs/{run}:pause", json={"reason": reason}, deadline_s=deadline_s, repeatable=True
        )

    def resume(self, run: str, *, deadline_s: float | None = None) -> dict[str, Any]:
        return self._transport.json("POST", f"/v1/runs/{run}:resume", json={}, deadline_s=deadline_s, repeatable=True)

    def stop(self, run: str, reason: str = "operator", *, deadline_s: float | None = None) -> dict[str, Any]:
        return self._transport.json(
            "POST", f"/v1/runs/{run}:stop", json={"reason": reason}, deadline_s=deadline_s, repeatable=True
        )

    # prompts, trajectories, rewards

    def post_prompts(
        self,
        run: str,
        items: Sequence[Mapping[str, Any]],
        *,
        gate_deadline_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Posts prompts; posting an equal one again is harmless and returns the same ids.

        Args:
            items: as in the module's example and docs/http.md.
            gate_deadline_s: how long to go on posting items that the closed admission gate refuses. 0: once.

        Returns: one result per item, in order; status 202 accepted, 200 accepted before, 429 gate closed, other: refused.
        """
        return self._post_items(f"/v1/runs/{run}/prompts", items, gate_deadline_s, deadline_s)

    def post_trajectories(
        self,
        run: str,
        groups: Sequence[Mapping[str, Any]],
        *,
        gate_deadline_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Posts groups that an engine of yours sampled with a published version of the run; equal ones again are harmless.

        Args:
            groups: as docs/http.md has them. Token ids, top1 and logprobs of a sample may be numpy arrays; `logprobs` that are a
                float32 array travel as their very bits.
            gate_deadline_s: as of `post_prompts`.

        Returns: one result per group, as of `post_prompts`.
        """
        results: list[dict[str, Any]] = []
        for part in parts([packed(group) for group in groups]):
            answer = self._post_items(f"/v1/runs/{run}/trajectories", part, gate_deadline_s, deadline_s)
            results += [{**result, "index": len(results) + i} for i, result in enumerate(answer)]
        return results

    def cancel_group(self, run: str, number: int, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Drops a prompt's samples for good; its batch is trained without them. ApiError group-sealed when that is too late."""
        path = f"/v1/runs/{run}/groups/{number}:cancel"
        return self._transport.json("POST", path, json={}, deadline_s=deadline_s, repeatable=True)

    def _post_items(
        self, path: str, items: Sequence[Mapping[str, Any]], gate_deadline_s: float, deadline_s: float | None
    ) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = [{} for _ in items]
        open_indices = list(range(len(items)))
        gate_deadline = time.monotonic() + gate_deadline_s
        while open_indices:
            answer, retry_after_s = self._post_once(path, [items[i] for i in open_indices], deadline_s)
            for i, result in zip(open_indices, answer, strict=True):
                results[i] = {**result, "index": i}
            open_indices = [i for i in open_indices if results[i]["status"] == 429]
            left_s = gate_deadline - time.monotonic()
            if not open_indices or left_s <= 0:
                break
            time.sleep(min(retry_after_s, left_s))
        return results

    def _post_once(
        self, path: str, items: list[Mapping[str, Any]], deadline_s: float | None
    ) -> tuple[list[dict[str, Any]], float]:
        """Returns: results and the seconds after which a gate that is closed may be open."""
        try:
            response = self._transport.request(
                "POST",
                path,
                msgpack_body={"items": items},
                deadline_s=deadline_s,
                retry_gate=False,
                repeatable=True,
            )
        except ApiError as error:
            if error.code != "capacity-exhausted":
                raise
            refused = {"status": 429, "problem": error.document}
            return [{"index": i, **refused} for i in range(len(items))], error.retry_after_s or 1.0
        return decoded(response)["items"], retry_after_s(response) or 1.0

    def trajectory(self, run: str, trajectory_id: str, *, deadline_s: float | None = None) -> dict[str, Any]:
        """The full record. `logprobs` is a float32 array with the engine's very bits, None before it is generated."""
        response = self._transport.request(
            "GET", f"/v1/runs/{run}/trajectories/{trajectory_id}", accept=MSGPACK, deadline_s=deadline_s
        )
        return _with_arrays(decoded(response))

    def trajectories(
        self,
        run: str,
        *,
        state: str | None = None,
        ids: Sequence[str] | None = None,
        full: bool = False,
        limit: int = 256,
        deadline_s: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """All trajectories of a run, in cursor order, page by page.

        Args:
            state: only those in this state.
            ids: only these (at most 256, none for an empty list), evaluation samples included; the state does not matter
                then. None: all.
            full: records as `trajectory` returns them instead of summaries.
        """
        if ids is not None and not ids:
            return
        params = {"limit": limit, **({"state": state} if state else {}), **({"view": "full"} if full else {})}
        params |= {"id": list(ids)} if ids else {}
        for item in self._transport.pages(f"/v1/runs/{run}/trajectories", "trajectories", params, deadline_s):
            yield _with_arrays(item) if full else item

    def stream_events(
        self, run: str, *, last_event_id: str = "0", deadline_s: float, types: Iterable[str] = ()
    ) -> Iterator[Event]:
        """Events of the run behind `last_event_id` ("0": from the beginning), until the deadline.

        A broken connection is opened again where it broke; no event is lost or given twice. Ends silently at the deadline.
        """
        deadline = time.monotonic() + deadline_s
        backoff_s = 0.1
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                for event in self._stream_once(run, last_event_id, left_s, list(types)):
                    last_event_id, backoff_s = event.cursor, 0.1
                    yield event
                    if time.monotonic() >= deadline:
                        return
                # The server ends a stream at its deadline, and when it shuts down.
                failure_wait_s = backoff_s
            except httpx.TransportError:
                failure_wait_s = backoff_s
            except ApiError as error:
                if not error.retryable:
                    raise
                failure_wait_s = max(backoff_s, error.retry_after_s or 0.0)
            time.sleep(max(0.0, min(failure_wait_s, deadline - time.monotonic())))
            backoff_s = min(2 * backoff_s, 2.0)

    def _stream_once(self, run: str, last_event_id: str, left_s: float, types: list[str]) -> Iterator[Event]:
        params: dict[str, Any] = {"timeout_s": round(left_s, 3), **({"type": types} if types else {})}
        # Heartbeats come every few seconds, so a read that waits longer means a dead connection.
        timeout = httpx.Timeout(min(self.timeout_s, left_s), read=min(30.0, left_s + 1.0))
        with httpx_sse.connect_sse(
            self._transport.http,
            "GET",
            f"/v1/runs/{run}/trajectories/stream",
            params=params,
            headers={"Last-Event-ID": last_event_id},
            timeout=timeout,
        ) as source:
            if source.response.status_code != 200:
                source.response.read()
                raise ApiError.of(source.response)
            for sse in source.iter_sse():
                # Behind a heartbeat httpx_sse gives an event without data, which is none.
                if not sse.data:
                    continue
                data = json.loads(sse.data)
                yield Event(sse.id, sse.event, data.get("trajectory_id", ""), data.get("group_id", ""), data)

    def put_reward(
        self,
        run: str,
        trajectory_id: str,
        source: str,
        value: float,
        *,
        revision: int = 0,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """Idempotent; a higher revision replaces. ApiError reward-too-late once the trajectory is sealed."""
        path = f"/v1/runs/{run}/trajectories/{trajectory_id}/rewards/{source}"
        return self._transport.json("PUT", path, json={"value": value, "revision": revision}, deadline_s=deadline_s)

    def put_rewards(
        self, run: str, rewards: Sequence[Mapping[str, Any]], *, deadline_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Args: rewards: `{trajectory_id, source, value, revision?}`. Returns: one result per reward, `status` as of a PUT."""
        path = f"/v1/runs/{run}/rewards:batch"
        response = self._transport.request(
            "POST", path, msgpack_body={"items": list(rewards)}, deadline_s=deadline_s, repeatable=True
        )
        return decoded(response)["items"]

    # evaluations

    def create_eval(
        self,
        run: str,
        items: Sequence[Mapping[str, Any]],
        *,
        n: int = 1,
        sampling: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Args:
        items: prompts (`prompt`, `messages` or `prompt_token_ids`).
        n: samples per item.
        sampling: temperature 0 (the default) is greedy.
        fields: `version` (policy step to pin; default: the newest published one), `seed`, `metadata`.
        """
        body = {"items": list(items), "n": n, "sampling": dict(sampling or {}), **fields}
        return self._transport.json("POST", f"/v1/runs/{run}/evals", json=body, deadline_s=deadline_s)

    def evals(self, run: str, *, deadline_s: float | None = None) -> Iterator[dict[str, Any]]:
        """The run's evaluations in the order of acceptance, without their items."""
        return self._transport.pages(f"/v1/runs/{run}/evals", "evals", {}, deadline_s)

    def get_eval(
        self, run: str, eval_id: int, *, wait_s: float = 0.0, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Args: wait_s: how long the server may hold the answer back until the evaluation is complete."""
        path = f"/v1/runs/{run}/evals/{eval_id}"
        return self._transport.json("GET", path, params={"wait_s": wait_s} if wait_s else {}, deadline_s=deadline_s)

    def wait_eval(self, run: str, eval_id: int, *, deadline_s: float) -> dict[str, Any]:
        """The evaluation once all its samples are generated. Raises DeadlineError."""
        deadline = time.monotonic() + deadline_s
        while (left_s := deadline - time.monotonic()) > 0:
            evaluation = self.get_eval(run, eval_id, wait_s=min(left_s, 20.0), deadline_s=left_s + self.timeout_s)
            if evaluation["state"] != "running":
                return evaluation
        raise DeadlineError(f"evaluation {eval_id} of run {run} is not complete after {deadline_s} s")

    # what the run did

    def steps(self, run: str, *, after: str | None = None, deadline_s: float | None = None) -> Iterator[dict[str, Any]]:
        """What the trainer recorded per step: `cursor`, `step`, `epoch`, `metrics`, behind the cursor `after`.

        A step that was trained again after a restart appears again; the last one counts.
        """
        return self._transport.pages(f"/v1/runs/{run}/steps", "steps", {}, deadline_s, cursor=after)

    def metrics(self, run: str, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Snapshot: accepted, trained, dropped by reason, live, queue depth, gate, newest step."""
        return self._transport.json("GET", f"/v1/runs/{run}/metrics", deadline_s=deadline_s)

    def versions(self, run: str, *, deadline_s: float | None = None) -> list[dict[str, Any]]:
        """Published and retained versions, ascending."""
        return self._transport.json("GET", f"/v1/runs/{run}/versions", deadline_s=deadline_s)["versions"]

    def version(self, run: str, step: int, *, deadline_s: float | None = None) -> dict[str, Any]:
        """One version with its manifest."""
        return self._transport.json("GET", f"/v1/runs/{run}/versions/{step}", deadline_s=deadline_s)

    def ready(self, *, deadline_s: float = 5.0) -> bool:
        """One look at /readyz; False while a dependency is missing or nothing answers."""
        try:
            return self._transport.http.get("/readyz", timeout=deadline_s).status_code == 200
        except httpx.TransportError:
            return False


def _with_arrays(trajectory: dict[str, Any]) -> dict[str, Any]:
    """msgpack's raw logprob bytes as a float32 array."""
    raw = trajectory.pop("logprobs_f32", None)
    trajectory["logprobs"] = None if raw is None else np.frombuffer(raw, dtype="<f4")
    return trajectory
