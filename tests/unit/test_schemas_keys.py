"""API keys, problem documents, and the tokens of samples under way: what needs no server."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.auth import LOCAL, SCOPES, Keyring, check_bind, is_loopback, main, parse_key
from services.gateway.choices import TextCutter
from services.gateway.problems import CODES, FieldError, Problem
from services.gateway.progress import Progress
from shared.config import ConfigError
from shared.wire.pb import rollout_pb2 as pb
from shared.wire.types import float32_bytes, int32_bytes


def entry(name: str, key: str, *scopes: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}:{','.join(scopes)}"


def test_key_is_found_among_others_with_its_scopes() -> None:
    keyring = Keyring([entry("a", "ka", "admin"), entry("b", "kb", "prompts:write", "rewards:write")])
    found = keyring.authenticate("Bearer kb")
    assert found.name == "b"
    assert [found.allows(s) for s in SCOPES] == [True, True, False, False, False]
    assert all(keyring.authenticate("bearer ka").allows(s) for s in SCOPES)


@given(st.text())
def test_nothing_else_is_a_key(header: str) -> None:
    with pytest.raises(Problem) as caught:
        Keyring([entry("a", "a key that hypothesis does not know", "admin")]).authenticate(header)
    assert caught.value.code == "unauthenticated"


def test_digest_itself_is_no_key() -> None:
    line = entry("a", "ka", "admin")
    with pytest.raises(Problem):
        Keyring([line]).authenticate(f"Bearer {line.split(':')[1]}")


def test_without_keys_everybody_local_may_do_everything() -> None:
    assert Keyring([]).authenticate(None) is LOCAL
    assert all(LOCAL.allows(s) for s in SCOPES)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a",
        "a:b",
        "a:plain-key:admin",
        f"a:{'A' * 64}:admin",
        f":{'0' * 64}:admin",
        f"a:{'0' * 64}:",
        f"a:{'0' * 64}:x",
    ],
)
def test_malformed_entry_is_refused_without_repeating_it(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key(line)
    assert "plain-key" not in str(caught.value)


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ"):
        Keyring([entry("a", "1", "admin"), entry("a", "2", "admin")])


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_only_loopback_may_be_bound_without_a_key(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    if not expected:
        with pytest.raises(ConfigError):
            check_bind(host, Keyring([]))
        check_bind(host, Keyring([entry("a", "1", "admin")]))


def test_made_key_works_and_is_not_in_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "rewards:write"]) == 0
    key, line = (text.rsplit(": ", 1)[1] for text in capsys.readouterr().out.splitlines())
    assert key not in line
    assert Keyring([line]).authenticate(f"Bearer {key}").scopes == {"rewards:write"}
    assert main(["ops", "everything"]) == 2


@pytest.mark.parametrize("code", CODES)
def test_every_code_makes_a_document_and_an_openai_error(code: str) -> None:
    problem = Problem(code, "what", errors=[FieldError(pointer="/a", detail="b")], retry_after_s=3, limit=7)
    document = problem.document(instance="/x", request_id="r").model_dump()
    assert document["type"] == f"urn:timzero:problem:{code}"
    assert 400 <= document["status"] == CODES[code].status < 600
    assert (document["limit"], document["errors"], problem.headers["Retry-After"]) == (
        7,
        [{"pointer": "/a", "detail": "b"}],
        "3",
    )
    error = problem.openai().error
    assert (error.code, error.param) == (code, "a")


def test_retryable_says_whether_the_same_request_may_succeed() -> None:
    assert {c for c, (status, _, retryable) in CODES.items() if retryable} == {
        "body-timeout", "idempotency-in-progress", "capacity-exhausted", "streams-exhausted", "shutting-down",
        "valkey-unavailable", "archive-unavailable", "weight-sync-unavailable", "not-ready",
        "generation-failed", "deadline-exceeded",
    }  # fmt: skip


# tokens under way


def chunk(start: int, tokens: list[int], finish_reason: str = "", name: str = "t") -> pb.GenerateChunk:
    logprobs = float32_bytes(-np.asarray(tokens, np.float32))
    return pb.GenerateChunk(
        trajectory_id=name, start=start, token_ids=int32_bytes(tokens), logprobs=logprobs, finish_reason=finish_reason
    )


def test_progress_gives_what_is_behind_a_position() -> None:
    progress = Progress()
    progress.observe(chunk(0, [1, 2]))
    progress.observe(chunk(2, [3]))
    tokens, logprobs = progress.after("t", 1)
    assert (tokens, logprobs.tolist()) == ([2, 3], [-2.0, -3.0])
    assert progress.after("t", 3)[0] == progress.after("other", 0)[0] == []


def test_progress_takes_a_sample_that_begins_again_and_forgets_one_that_ended() -> None:
    progress = Progress()
    progress.observe(chunk(0, [1, 2, 3]))
    progress.observe(chunk(0, [1]))
    assert progress.after("t", 0)[0] == [1]
    progress.observe(chunk(1, [2], finish_reason="stop"))
    assert progress.after("t", 0)[0] == []


def test_progress_is_bounded_and_never_has_a_gap() -> None:
    progress = Progress(max_samples=2)
    for name in "abc":
        progress.observe(chunk(0, [1], name=name))
    progress.observe(chunk(1, [2], name="a"))
    assert [progress.after(name, 0)[0] for name in "abc"] == [[], [1], [1]]


def test_progress_wakes_who_waits() -> None:
    async def run() -> None:
        progress = Progress()
        waiter = asyncio.create_task(progress.wait_beyond(progress.generation))
        await asyncio.sleep(0)
        assert not waiter.done()
        progress.observe(chunk(0, [1]))
        async with asyncio.timeout(5):
            await waiter
            await progress.wait_beyond(0)

    asyncio.run(run())


class Utf8:
    """A tokenizer whose tokens are the bytes of UTF-8, so that a character may need several."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@given(st.text(), st.lists(st.integers(min_value=1, max_value=5), min_size=1))
def test_pieces_of_text_add_up_whatever_the_chunks(text: str, sizes: list[int]) -> None:
    tokens = list(text.encode())
    cutter, pieces, at, turn = TextCutter(Utf8()), [], 0, 0  # type: ignore[arg-type]
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        pieces.append(cutter.add(tokens[at : at + size], last=False))
        at, turn = at + size, turn + 1
    pieces.append(cutter.add([], last=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in p for p in pieces[:-1] if "\ufffd" not in text)
