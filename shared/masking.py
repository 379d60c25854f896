"""Which names hold credentials, and text without them: for logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

MASK = "***"

_ALWAYS = {"authorization", "cookie", "credential", "credentials", "passphrase", "passwd", "password", "passwords",
           "secret", "secrets"}  # fmt: skip
_AS_LAST_WORD = {"apikey", "apikeys", "auth", "key", "keys", "token"}
_BEFORE_TOKENS = {"access", "api", "auth", "bearer", "refresh"}
_NOT_CREDENTIALS = {"idempotency_key"}

_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s/@]+@", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer)\s+[^\s,;'\"]+", re.IGNORECASE)


def is_credential(name: str) -> bool:
    """True for `api_key`, `valkey_password`, `api_tokens`; False for `num_tokens`, `token_ids`, `monkey`.

    A word that merely contains "key" or "token" is none: counts of tokens are what this project logs most.
    """
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w]
    if not words or "_".join(words) in _NOT_CREDENTIALS:
        return False
    if _ALWAYS & set(words) or words[-1] in _AS_LAST_WORD:
        return True
    return words[-1] == "tokens" and len(words) > 1 and words[-2] in _BEFORE_TOKENS


def masked_text(text: str) -> str:
    """`text` without bearer tokens and without the passwords of URLs."""
    return _BEARER.sub(rf"\1 {MASK}", _URL_PASSWORD.sub(rf"\1:{MASK}@", text))


def masked(value: Any) -> Any:
    """`value` with every credential inside it replaced: in maps, dataclasses, sequences and text."""
    if isinstance(value, str):
        return masked_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: MASK if v and is_credential(str(k)) else masked(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(v) for v in value]
    return value
