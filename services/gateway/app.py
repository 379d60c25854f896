"""The routes of the HTTP API. No logic: each checks the scope, calls one function, and answers in JSON or msgpack.

request ─▶ edge (id, key, body) ─▶ BodyRoute (JSON or msgpack, Idempotency-Key) ─▶ route ─▶ store, weight_sync
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response, Security
from fastapi.security import HTTPBearer
from sse_starlette import EventSourceResponse

from services.gateway import answers, evals, events, ingest, prompts, runs, schemas, trajectories, views
from services.gateway.bodies import BodyRoute, reply, wants_msgpack
from services.gateway.context import Gateway
from services.gateway.ingest_schemas import SampledBatch
from services.gateway.problems import Problem, ProblemDocument, event_stream, responses
from shared.wire.pb import weight_sync_pb2 as pb
from shared.wire.run import RunConfig, RunState
from shared.wire.types import State

bearer = HTTPBearer(auto_error=False, description="API key with scopes; see docs/http.md")

RunName = Annotated[str, Path(max_length=64, description="Name of the run")]
TrajectoryId = Annotated[str, Path(max_length=256)]
Cursor = Annotated[str, Query(max_length=64, description="`next_cursor` of the page before")]
Place = Annotated[str, Query(pattern=r"^[0-9]{0,12}$", description="`next_cursor` of the page before")]
Limit = Annotated[int, Query(ge=1, le=256)]

_EVENT_DATA = {"contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/StreamEvent"}}


def require(scope: str) -> Any:
    async def check(request: Request, _: Annotated[Any, Security(bearer)]) -> None:
        if not request.state.caller.allows(scope):
            raise Problem("forbidden", f"key {request.state.caller.name} lacks the scope {scope}")

    return Depends(check)


def gateway_of(request: Request) -> Gateway:
    return request.app.state.gateway


def document(request: Request) -> Callable[[Problem], ProblemDocument]:
    return lambda problem: problem.document(instance=request.url.path, request_id=request.state.request_id)


read = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[require("trajectories:read")])
admin = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[require("admin")])
prompt_writer = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[require("prompts:write")])
trajectory_writer = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[require("trajectories:write")])
reward_writer = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[require("rewards:write")])
probes = APIRouter()


# runs


@admin.post("/runs", tags=["runs"], status_code=201, response_model=answers.Run,
            responses={200: {"model": answers.Run, "description": "It exists with this configuration"},
                       **responses("run-exists", "run-active", "model-unavailable", "idempotency-in-progress")})  # fmt: skip
async def create_run(request: Request, body: RunConfig) -> Response:
    """Creates a run. One run is active at a time; posting an equal configuration again returns the run."""
    record, is_new = await runs.create(gateway_of(request), body)
    return reply(request, views.run(record), 201 if is_new else 200, {"Location": f"/v1/runs/{record.run}"})


@read.get("/runs", tags=["runs"], response_model=answers.RunPage, responses=responses())
async def list_runs(request: Request, cursor: Cursor = "", limit: Limit = 100) -> Response:
    """Newest first."""
    page = await gateway_of(request).store.list_runs(cursor=cursor, limit=limit)
    return reply(request, answers.RunPage(runs=[views.run(r) for r in page.items], next_cursor=page.next_cursor))


@read.get("/runs/{run}", tags=["runs"], response_model=answers.Run, responses=responses())
async def get_run(request: Request, run: RunName) -> Response:
    return reply(request, views.run(await gateway_of(request).store.get_run(run)))


@admin.post("/runs/{run}:pause", tags=["runs"], response_model=answers.Run,
            responses=responses("run-state", "idempotency-in-progress"))  # fmt: skip
async def pause_run(request: Request, run: RunName, body: schemas.Reason = schemas.OPERATOR) -> Response:
    """Nothing is leased for training and no prompt is started while a run is paused; evaluations go on."""
    record = await gateway_of(request).store.set_run_state(run, RunState.PAUSED, reason=body.reason)
    return reply(request, views.run(record))


@admin.post("/runs/{run}:resume", tags=["runs"], response_model=answers.Run,
            responses=responses("run-state", "idempotency-in-progress"))  # fmt: skip
async def resume_run(request: Request, run: RunName) -> Response:
    return reply(request, views.run(await gateway_of(request).store.set_run_state(run, RunState.RUNNING)))


@admin.post("/runs/{run}:stop", tags=["runs"], response_model=answers.Run,
            responses=responses("run-state", "idempotency-in-progress"))  # fmt: skip
async def stop_run(request: Request, run: RunName, body: schemas.Reason = schemas.OPERATOR) -> Response:
    """Ends a run for good: what is live is dropped as cancelled. Everything stays readable."""
    record = await gateway_of(request).store.set_run_state(run, RunState.STOPPED, reason=body.reason)
    return reply(request, views.run(record))


# prompts and trajectories


@prompt_writer.post("/runs/{run}/prompts", tags=["prompts"], status_code=202, response_model=answers.PromptResults,
                    responses={207: {"model": answers.PromptResults, "description": "Some items were refused"},
                               **responses("capacity-exhausted", "idempotency-in-progress")})  # fmt: skip
async def post_prompts(request: Request, run: RunName, body: schemas.PromptBatch) -> Response:
    """Accepts training prompts; each item has a status of its own. What is accepted is on disk, its trajectory ids allotted.

    Posting an equal item again returns the same ids. 429 where the closed admission gate refuses every item.
    """
    return _accepted(request, await prompts.post(gateway_of(request), run, body.items, document(request)))


def _accepted(request: Request, results: list[answers.PromptResult]) -> Response:
    status = 202 if all(r.status < 300 for r in results) else 207
    is_closed = any(r.status == 429 for r in results)
    headers = {"Retry-After": str(gateway_of(request).config.gate_retry_s)} if is_closed else None
    return reply(request, answers.PromptResults(items=results), status, headers)


@trajectory_writer.post("/runs/{run}/trajectories", tags=["trajectories"], status_code=202,
                        response_model=answers.PromptResults,
                        responses={207: {"model": answers.PromptResults, "description": "Some groups were refused"},
                                   **responses("capacity-exhausted", "weight-sync-unavailable",
                                               "idempotency-in-progress")})  # fmt: skip
async def post_trajectories(request: Request, run: RunName, body: SampledBatch) -> Response:
    """Accepts groups that another engine sampled with a published version of this run: token ids and logprobs, not text.

    A group takes the place of a prompt, and each has a status of its own, as there. From here on it is rewarded and trained
    like any other. Its logprobs are expected to differ from the trainer's: they are measured apart, and corrected.
    """
    return _accepted(request, await ingest.post(gateway_of(request), run, body.items, document(request)))


@admin.post("/runs/{run}/groups/{number}:cancel", tags=["prompts"], response_model=answers.CancelledGroup,
            responses=responses("run-state", "group-sealed", "idempotency-in-progress"))  # fmt: skip
async def cancel_group(request: Request, run: RunName, number: Annotated[int, Path(ge=0, lt=2**31)]) -> Response:
    """Drops a prompt's samples as cancelled, for good: its batch is trained without them.

    The way out of a run that a group keeps paused: a reward that will never come, samples that the trainer refuses.
    """
    dropped = await gateway_of(request).store.cancel_group(run, number)
    return reply(request, answers.CancelledGroup(group_id=f"{run}.{number}", number=number, dropped=dropped))


@read.get("/runs/{run}/trajectories", tags=["trajectories"], response_model=answers.TrajectoryPage,
          responses=responses("archive-unavailable"))  # fmt: skip
async def list_trajectories(
    request: Request, run: RunName, cursor: Place = "", state: State | None = None, limit: Limit = 100,
    view: Literal["summary", "full"] = "summary",
    id: Annotated[list[str], Query(max_length=256, description="Only these, those that exist; nothing else selects")] = [],  # noqa: B006
) -> Response:  # fmt: skip
    """In the order of acceptance; evaluations are not among them unless named."""
    page = await trajectories.page(
        gateway_of(request), run, ids=id, cursor=cursor, state=state, limit=limit, full=view == "full",
        decimals=not wants_msgpack(request),
    )  # fmt: skip
    return reply(request, page)


@read.get("/runs/{run}/trajectories/stream", tags=["trajectories"],
          responses={200: {"description": "Server-sent events; `data` of each is a StreamEvent",
                           "content": event_stream(_EVENT_DATA)},
                     **responses("streams-exhausted", "shutting-down")}, response_class=EventSourceResponse)  # fmt: skip
async def stream_events(
    request: Request,
    run: RunName,
    type: Annotated[list[str], Query(description="Only events of these types")] = [],  # noqa: B006
    timeout_s: Annotated[float, Query(gt=0, le=86_400, description="The stream ends after so long")] = 3600.0,
) -> Response:
    """Every change of a trajectory's or the run's state. `Last-Event-ID` resumes behind that event, default from the first."""
    stream = await events.open_stream(
        gateway_of(request).store, gateway_of(request).feeds, run,
        after=events.checked_cursor(request.headers.get("last-event-id", "0")),
        types=frozenset(type), timeout_s=timeout_s, max_streams=gateway_of(request).config.max_streams,
    )  # fmt: skip
    return EventSourceResponse(stream, ping=gateway_of(request).config.heartbeat_s, sep="\n", send_timeout=30)


@read.get("/runs/{run}/trajectories/{trajectory_id}", tags=["trajectories"], response_model=answers.Trajectory,
          responses=responses("archive-unavailable"))  # fmt: skip
async def get_trajectory(request: Request, run: RunName, trajectory_id: TrajectoryId) -> Response:
    """The whole record of a training or evaluation sample."""
    _, tokenizer = await gateway_of(request).run(run)
    record = await trajectories.get(gateway_of(request), run, trajectory_id)
    return reply(request, views.trajectory(record, tokenizer, decimals=not wants_msgpack(request)))


# rewards


@reward_writer.put("/runs/{run}/trajectories/{trajectory_id}/rewards/{source}", tags=["rewards"],
                   response_model=answers.RewardAnswer,
                   responses=responses("reward-revision-conflict", "reward-too-late", "reward-source"))  # fmt: skip
async def put_reward(
    request: Request, run: RunName, trajectory_id: TrajectoryId, source: Annotated[schemas.Name, Path()],
    body: schemas.RewardBody,
) -> Response:  # fmt: skip
    """Records a reward; it is on disk when this answers. It may come before the sample is generated."""
    return reply(request, await trajectories.put_reward(gateway_of(request), run, trajectory_id, source, body))


@reward_writer.post("/runs/{run}/rewards:batch", tags=["rewards"], response_model=answers.RewardResults,
                    responses={207: {"model": answers.RewardResults, "description": "Some items were refused"},
                               **responses("idempotency-in-progress")})  # fmt: skip
async def post_rewards(request: Request, run: RunName, body: schemas.RewardBatch) -> Response:
    results = await trajectories.put_rewards(gateway_of(request), run, body.items, document(request))
    return reply(request, answers.RewardResults(items=results), 200 if all(r.status < 300 for r in results) else 207)


# evaluations


@prompt_writer.post("/runs/{run}/evals", tags=["evaluations"], status_code=202, response_model=answers.EvalSummary,
                    responses=responses("version-unknown", "not-ready", "idempotency-in-progress"))  # fmt: skip
async def create_eval(request: Request, run: RunName, body: schemas.EvalBody) -> Response:
    """Accepts an evaluation, pinned to a version; it is never trained, and goes on after the run's end."""
    record = await evals.create(gateway_of(request), run, body)
    return reply(request, views.eval_summary(record), 202, {"Location": f"/v1/runs/{run}/evals/{record.eval}"})


@read.get("/runs/{run}/evals", tags=["evaluations"], response_model=answers.EvalPage, responses=responses())
async def list_evals(request: Request, run: RunName, cursor: Place = "", limit: Limit = 100) -> Response:
    await gateway_of(request).store.get_run(run)
    page = await gateway_of(request).store.list_evals(run, cursor=cursor, limit=limit)
    return reply(
        request, answers.EvalPage(evals=[views.eval_summary(r) for r in page.items], next_cursor=page.next_cursor)
    )


@read.get("/runs/{run}/evals/{eval_id}", tags=["evaluations"], response_model=answers.Eval, responses=responses())
async def get_eval(
    request: Request, run: RunName, eval_id: Annotated[int, Path(ge=0, le=2**53)],
    wait_s: Annotated[float, Query(ge=0, le=30, description="Hold the answer back until complete, at most so long")] = 0.0,
) -> Response:  # fmt: skip
    """Samples per item, those that are finished; `state` says whether all are."""
    gateway = gateway_of(request)
    _, tokenizer = await gateway.run(run)
    record = await events.wait_for_eval(gateway.store, gateway.feeds, run, eval_id, wait_s)
    return reply(request, views.evaluation(record, tokenizer))


# what the run did


@read.get("/runs/{run}/versions", tags=["versions"], response_model=answers.Versions,
          responses=responses("weight-sync-unavailable"))  # fmt: skip
async def list_versions(request: Request, run: RunName) -> Response:
    """Published and retained versions, ascending."""
    found = await gateway_of(request).versions(run)
    return reply(request, answers.Versions(versions=[answers.Version(**views.version_fields(v)) for v in found]))


@read.get("/runs/{run}/versions/{step}", tags=["versions"], response_model=answers.VersionDetail,
          responses=responses("version-unknown", "weight-sync-unavailable"))  # fmt: skip
async def get_version(request: Request, run: RunName, step: Annotated[int, Path(ge=0, le=2**53)]) -> Response:
    """With the tensors of its manifest."""
    gateway = gateway_of(request)
    info = await gateway.version(run, step)
    manifest = await gateway.weight_sync.GetManifest(
        pb.GetManifestRequest(run=run, digest=info.version.digest), timeout=gateway.config.rpc_timeout_s
    )
    return reply(request, views.version_detail(info, manifest))


@read.get("/runs/{run}/metrics", tags=["runs"], response_model=answers.Metrics, responses=responses())
async def get_metrics(request: Request, run: RunName) -> Response:
    """accepted = trained + dropped + live, and where everything is."""
    return reply(request, await runs.metrics(gateway_of(request), run))


@read.get("/runs/{run}/steps", tags=["runs"], response_model=answers.Steps, responses=responses())
async def list_steps(
    request: Request, run: RunName, cursor: Cursor = "0", limit: Annotated[int, Query(ge=1, le=1000)] = 1000
) -> Response:
    """What the trainer recorded per step, oldest first."""
    return reply(request, await runs.steps(gateway_of(request), run, events.checked_cursor(cursor), limit))


# probes


@probes.get("/healthz", tags=["probes"], response_model=answers.Health)
async def healthz() -> answers.Health:
    """The process is alive."""
    return answers.Health(status="ok")


@probes.get("/readyz", tags=["probes"], response_model=answers.Readiness, responses={503: responses("not-ready")[503]})
async def readyz(request: Request) -> answers.Readiness:
    """Valkey and weight_sync answer, and a replica is ready where samples wait to be generated."""
    return await runs.readiness(gateway_of(request))


ROUTERS = (probes, admin, prompt_writer, trajectory_writer, reward_writer, read)
