"""HTTP underneath the client: deadlines, retries, msgpack, and problem documents as exceptions."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgpack
import tenacity

MSGPACK = "application/msgpack"


class ApiError(Exception):
    """The server answered with an error. `document` is its RFC 9457 problem document."""

    def __init__(self, status: int, document: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        self.status = status
        self.document = dict(document)
        self.code: str = self.document.get("code", "")
        self.retryable: bool = bool(self.document.get("retryable", status in (502, 503, 504)))
        self.retry_after_s = retry_after_s
        fields = "".join(f"; {e.get('pointer')}: {e.get('detail')}" for e in self.document.get("errors", ()))
        super().__init__(
            f"{status} {self.code or self.document.get('title', '')}: {self.document.get('detail', '')}{fields}"
        )

    @classmethod
    def of(cls, response: httpx.Response) -> ApiError:
        """Args: response: read already."""
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            # Not the gateway itself but a proxy in front of it.
            document = {"title": response.reason_phrase, "detail": response.text[:500], "status": response.status_code}
        return cls(response.status_code, document, retry_after_s(response))


class DeadlineError(TimeoutError):
    """The call's deadline passed; the message says what was being waited for."""


class Transport:
    """Args:
    base_url, api_key, timeout_s: as of `timzero.client.Client`.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=base_url.rstrip("/"), headers=headers)
        self.timeout_s = timeout_s

    def pages(
        self, path: str, field: str, params: Mapping[str, Any], deadline_s: float | None, cursor: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Items of a list, page by page. The deadline is each page's."""
        while True:
            query = {**params, **({"cursor": cursor} if cursor else {})}
            page = decoded(self.request("GET", path, params=query, accept=MSGPACK, deadline_s=deadline_s))
            yield from page[field]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def json(self, method: str, path: str, *, deadline_s: float | None, **kwargs: Any) -> dict[str, Any]:
        return decoded(self.request(method, path, deadline_s=deadline_s, **kwargs))

    def request(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float | None,
        accept: str = "application/json",
        msgpack_body: Any = None,
        retry_gate: bool = True,
        repeatable: bool = False,
        **kwargs: Any,
    ) -> httpx.Response:
        """Args:
            deadline_s: of all attempts together; None: `timeout_s`.
            retry_gate: False: a 429 is not tried again.
            repeatable: a POST that is harmless to repeat by its own ids, and so needs no Idempotency-Key, which a gateway
                that dies in the middle would hold for a minute.

        Raises: ApiError, or httpx.TransportError when nothing answered before the deadline.
        """
        deadline = time.monotonic() + (self.timeout_s if deadline_s is None else deadline_s)
        headers = {"Accept": accept}
        if method == "POST" and not repeatable:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        if msgpack_body is not None:
            headers["Content-Type"] = MSGPACK
            kwargs["content"] = msgpack.packb(msgpack_body)

        def attempt() -> httpx.Response:
            left_s = max(0.05, deadline - time.monotonic())
            response = self.http.request(method, path, headers=headers, timeout=left_s, **kwargs)
            if response.status_code >= 400:
                raise ApiError.of(response)
            return response

        def may_retry(error: BaseException) -> bool:
            if isinstance(error, ApiError):
                return error.retryable and (retry_gate or error.status != 429)
            return isinstance(error, httpx.TransportError)

        def out_of_time(state: tenacity.RetryCallState) -> bool:
            return time.monotonic() + (state.upcoming_sleep or 0.0) >= deadline

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_retry), wait=_wait_s, stop=out_of_time, reraise=True
        )
        return retrying(attempt)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Retry-After where the server named one, else exponential from 0.1 s to 5 s with jitter."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, ApiError) and error.retry_after_s is not None:
        return error.retry_after_s
    return min(5.0, 0.1 * 2 ** min(state.attempt_number, 8)) * random.uniform(0.5, 1.0)


def decoded(response: httpx.Response) -> dict[str, Any]:
    if response.headers.get("content-type", "").startswith(MSGPACK):
        return msgpack.unpackb(response.content)
    return response.json()


def retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of the Retry-After header; None where there is none."""
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
