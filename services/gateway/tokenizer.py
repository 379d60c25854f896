"""Text to token ids, once and only here, and back to text for people and graders. transformers without torch.

Text is derived from ids and never the other way round: what was tokenised here is stored as ids and stays as it is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.gateway.problems import Problem
from services.gateway.schemas import Message, PromptText


class Tokenizer:
    """One model's tokenizer and vocabulary.

    Args:
        model: Hugging Face directory or hub name.
        tokenizer: of transformers; None where the model ships none, so that prompts are token ids only.
        vocab_size: rows of the embedding.
    """

    def __init__(self, model: str, tokenizer: Any, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        # The Rust tokenizer is not safe for calls from several threads at once.
        self._lock = threading.Lock()

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def encode(self, item: PromptText) -> list[int]:
        """Token ids of a prompt in any of its three forms.

        Raises: Problem prompt-empty, token-out-of-range, chat-template, model-unavailable.
        """
        if item.prompt_token_ids is not None:
            ids = item.prompt_token_ids
        elif item.prompt is not None:
            ids = self._encode(item.prompt, special=True)
        else:
            assert item.messages is not None
            ids = self._encode(self._render(item.messages, item.continue_final_message), special=False)
        if not ids:
            raise Problem("prompt-empty", "the prompt has no token; send at least one")
        if (worst := max(ids)) >= self.vocab_size:
            raise Problem(
                "token-out-of-range", f"token id {worst}; {self.model} has {self.vocab_size} token ids, from 0"
            )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Text without special tokens; None where the model has no tokenizer."""
        if self._tokenizer is None:
            return None
        with self._lock:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str:
        """Text of one token, special ones included; `<ID>` where the model has no tokenizer."""
        if self._tokenizer is None:
            return f"<{token_id}>"
        with self._lock:
            return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(self._text_tokenizer()(text, add_special_tokens=special)["input_ids"])

    def _render(self, messages: Sequence[Message], continue_final: bool | None) -> str:
        from jinja2 import TemplateError

        if continue_final is None:
            continue_final = messages[-1].role == "assistant"
        plain = [m.model_dump() for m in messages]
        with self._lock:
            try:
                text = self._text_tokenizer().apply_chat_template(
                    plain,
                    tokenize=False,
                    add_generation_prompt=not continue_final,
                    continue_final_message=continue_final,
                )
            except (TemplateError, ValueError, TypeError, KeyError) as error:
                raise Problem("chat-template", f"{self.model}: {error}") from error
        return str(text)

    def _text_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise Problem("model-unavailable", f"{self.model} has no tokenizer; send prompt_token_ids")
        return self._tokenizer


class Tokenizers:
    """Tokenizers by model, each loaded once in a thread.

    Args:
        timeout_s: deadline of loading one (a hub name may have to be fetched).
        on_load: called in that thread once one is there.
    """

    def __init__(self, timeout_s: float, *, on_load: Callable[[], None] = lambda: None) -> None:
        self._timeout_s = timeout_s
        self._on_load = on_load
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    async def get(self, model: str) -> Tokenizer:
        """Raises: Problem model-unavailable."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(asyncio.to_thread(self._load, model))
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._timeout_s)
        except TimeoutError:
            raise Problem("model-unavailable", f"loading {model} takes longer than {self._timeout_s} s") from None
        except ModelError as error:
            self._loading.pop(model, None)
            raise Problem("model-unavailable", str(error)) from error

    def _load(self, model: str) -> Tokenizer:
        tokenizer = load(model)
        self._on_load()
        return tokenizer


class ModelError(ValueError):
    """There is no such model, or its files can't be read."""


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load(model: str) -> Tokenizer:
    """Raises ModelError."""
    try:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(model)
        directory = Path(model)
        # A directory without a tokenizer is fine: its prompts are token ids.
        has_text = not directory.is_dir() or any((directory / name).exists() for name in _TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(model) if has_text else None
        return Tokenizer(model, tokenizer, int(config.get_text_config().vocab_size))
    except Exception as error:
        # Whatever is wrong with the files of a model: the tokenizers library raises bare Exception for some of it.
        raise ModelError(f"cannot load {model}: {error}") from error
