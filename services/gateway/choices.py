"""Choices of OpenAI's answers from sampled tokens, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from services.gateway import openai_schemas as api
from services.gateway.tokenizer import Tokenizer
from shared.wire.types import float32_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some sampled tokens of one choice; the last piece says why it ended."""

    index: int
    trajectory_id: str
    token_ids: Sequence[int]
    logprobs: np.ndarray
    """float32, one per token."""
    text: str
    text_offset: int = 0
    """Characters of the choice before this piece."""
    finish_reason: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    """In the first piece of a choice."""


class Writer(Protocol):
    """How one of the two routes shapes its answers."""

    @property
    def id_prefix(self) -> str: ...

    def answer(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.Envelope: ...

    def chunk(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.Envelope: ...


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    with_logprobs: bool
    id_prefix: str = "cmpl"

    def answer(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.Completion:
        return api.Completion(**envelope, choices=[self._choice(p, tokenizer) for p in pieces])

    def chunk(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.Completion:
        return self.answer(envelope, pieces, tokenizer)

    def _choice(self, piece: Piece, tokenizer: Tokenizer) -> api.CompletionChoice:
        logprobs = None
        if self.with_logprobs:
            tokens = [tokenizer.token(t) for t in piece.token_ids]
            offsets = np.cumsum([piece.text_offset, *map(len, tokens)])[:-1].tolist()
            logprobs = api.CompletionLogprobs(
                tokens=tokens, token_logprobs=piece.logprobs.astype("float64").tolist(), text_offset=offsets
            )
        return api.CompletionChoice(**_common(piece), text=piece.text, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class ChatWriter:
    with_logprobs: bool
    id_prefix: str = "chatcmpl"

    def answer(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.ChatCompletion:
        choices = [
            api.ChatChoice(
                **_common(p),
                message=api.ChatMessage(role="assistant", content=p.text),
                logprobs=self._logprobs(p, tokenizer),
            )
            for p in pieces
        ]
        return api.ChatCompletion(**envelope, choices=choices)

    def chunk(self, envelope: dict[str, Any], pieces: Sequence[Piece], tokenizer: Tokenizer) -> api.ChatCompletionChunk:
        choices = [
            api.ChatChunkChoice(
                **_common(p),
                delta=api.ChatMessage(role="assistant" if p.prompt_token_ids is not None else None, content=p.text),
                logprobs=self._logprobs(p, tokenizer),
            )
            for p in pieces
        ]
        return api.ChatCompletionChunk(**envelope, choices=choices)

    def _logprobs(self, piece: Piece, tokenizer: Tokenizer) -> api.ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        content = []
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            token = tokenizer.token(token_id)
            content.append(api.TokenLogprob(token=token, logprob=float(logprob), bytes=list(token.encode())))
        return api.ChatLogprobs(content=content)


def _common(piece: Piece) -> dict[str, Any]:
    return {
        "index": piece.index,
        "finish_reason": piece.finish_reason,
        "token_ids": list(piece.token_ids),
        "logprobs_f32": float32_bytes(piece.logprobs),
        "trajectory_id": piece.trajectory_id,
        "prompt_token_ids": None if piece.prompt_token_ids is None else list(piece.prompt_token_ids),
    }


class TextCutter:
    """Turns the growing tokens of one choice into pieces of text that add up to the text of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.num_characters = 0

    def add(self, token_ids: Sequence[int], *, last: bool) -> str:
        """The text that is new. What may still change (half a character) waits for later tokens, unless this is the last."""
        self.token_ids += token_ids
        text = self._tokenizer.decode(self.token_ids) or ""
        if not last:
            text = text.rstrip("\ufffd")
        new = text[self.num_characters :]
        self.num_characters += len(new)
        return new
