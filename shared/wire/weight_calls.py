"""Calls to weight_sync: deadlines, what is tried again, when a delta is given up, and what an error means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import grpc
import structlog
import tenacity

from shared.metrics import names
from shared.metrics.server import metric
from shared.wire.tensors import DigestMismatch

T = TypeVar("T")
log = structlog.get_logger()


class WeightSyncError(RuntimeError):
    """weight_sync refused or did not answer; the text says which, with address and reason."""


class Fenced(WeightSyncError):
    """A trainer with a newer epoch owns the run: this one must stop."""


class VersionConflict(WeightSyncError):
    """The step exists in this lineage with another digest: publish under a new lineage."""


class UnknownVersion(WeightSyncError):
    """weight_sync doesn't hold this version (any more)."""


class RefusedError(WeightSyncError):
    """This replica can't serve the run; the text is weight_sync's reason."""


TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
_ERRORS = {
    grpc.StatusCode.FAILED_PRECONDITION: Fenced,
    grpc.StatusCode.ALREADY_EXISTS: VersionConflict,
    grpc.StatusCode.NOT_FOUND: UnknownVersion,
}


def call(timeout_s: float) -> dict[str, Any]:
    """A call to a server that is down waits until it is up again, within the deadline."""
    return {"timeout": timeout_s, "wait_for_ready": True}


def retry(attempt: Callable[[float], T], *, address: str, deadline_s: float) -> T:
    """Calls `attempt(seconds left)` until it answers something final."""
    end = time.monotonic() + deadline_s
    deadline_has_passed = tenacity.stop_before_delay(deadline_s)
    policy = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_transient),
        stop=lambda state: deadline_has_passed(state) or _is_damaged_again(state),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0) + tenacity.wait_random(0.0, 0.1),
        before_sleep=lambda state: log.warning(
            "weight_sync call failed, trying again", weight_sync=address, reason=_reason(state)
        ),
        reraise=True,
    )
    try:
        return policy(lambda: attempt(end - time.monotonic()))
    except grpc.RpcError as error:
        raise translated(error, address) from error


def delta_or_full(
    attempt: Callable[..., T], base: Any | None, *, phase: Literal["publish", "fetch"], address: str, deadline_s: float
) -> T:
    """`retry` of `attempt(seconds left, against=base)`, and without the base from where that turned out to be of no use."""
    against = base

    def either(timeout_s: float) -> T:
        nonlocal against
        if against is None:
            return attempt(timeout_s, against=None)
        end = time.monotonic() + timeout_s
        try:
            return attempt(timeout_s, against=against)
        except (grpc.RpcError, DigestMismatch) as error:
            reason = _no_use(error, phase)
            if not reason:
                raise
            against = None
            metric(names.DELTA_FALLBACKS).labels(phase, reason).inc()
            log.warning("delta given up, going on with all bytes", phase=phase, reason=reason, detail=_detail(error))
        return attempt(end - time.monotonic(), against=None)

    return retry(either, address=address, deadline_s=deadline_s)


def _no_use(error: Any, phase: str) -> str:
    """Why a delta can't succeed; empty for an error that has nothing to do with it."""
    if isinstance(error, DigestMismatch) or error.code() == grpc.StatusCode.DATA_LOSS:
        return "mismatch"
    # What a fetch does not find is the version itself.
    return "no_base" if phase == "publish" and error.code() == grpc.StatusCode.NOT_FOUND else ""


def _is_transient(error: BaseException) -> bool:
    # Bytes that were damaged on their way are sent again.
    return isinstance(error, grpc.RpcError) and error.code() in (*TRANSIENT, grpc.StatusCode.DATA_LOSS)


def _is_damaged_again(state: tenacity.RetryCallState) -> bool:
    """Three times in a row it is not the way that damages them."""
    error = state.outcome.exception() if state.outcome else None
    is_damaged = isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.DATA_LOSS
    return is_damaged and state.attempt_number >= 3


def _reason(state: tenacity.RetryCallState) -> str:
    return _detail(state.outcome.exception() if state.outcome else None)


def _detail(error: BaseException | None) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)


def translated(error: Any, address: str) -> WeightSyncError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return WeightSyncError(
            f"weight_sync at {address} did not answer in time. Is it running? "
            f"Start it with: python -m services.weight_sync host=... port=... ({details})"
        )
    return _ERRORS.get(code, WeightSyncError)(f"weight_sync at {address}: {code.name}: {details}")
