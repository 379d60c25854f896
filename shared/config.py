"""TOML file + environment + command line -> frozen dataclasses. An unknown key is an error that names the nearest key.

Later sources win: file, then environment (`TIMZERO_<SERVICE>_<FIELD>`, nested fields joined by `__`), then `key=value`
arguments (nested keys joined by dots).
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

EXIT_CONFIG = 2
"""Exit code of a process that was given a configuration it can't run with."""


class ConfigError(ValueError):
    """What is wrong with the configuration, the value got, and what to do."""


def strict(cls: type[T]) -> type[T]:
    """Marks a dataclass so that `structure` refuses unknown keys and wrong types inside it."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return cls


def structure(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds `cls` from plain values. Raises ConfigError naming every bad field."""
    _refuse_unknown(cls, values, prefix="")
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or cls.__name__}: {e['msg']}, got {e['input']!r}" for e in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from error


def unstructure(config: Any) -> dict[str, Any]:
    """The inverse of `structure`, JSON-ready."""
    return TypeAdapter(type(config)).dump_python(config, mode="json") if is_dataclass(config) else asdict(config)


def load(
    cls: type[T],
    *,
    service: str,
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> T:
    """Args:
        cls: dataclass marked with `strict`.
        service: names the TOML table, where the file has one, and the environment prefix.
        path: TOML file, or None.
        overrides: `key=value` words of the command line.
        environ: defaults to the process environment.

    Raises: ConfigError.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read configuration {path}: {error}") from error
        if isinstance(values.get(service), dict):
            values = values[service]
    prefix = f"TIMZERO_{service.upper()}_"
    for name, text in (os.environ if environ is None else environ).items():
        if name.startswith(prefix):
            _assign(values, name[len(prefix) :].lower().split("__"), text)
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(f"expected key=value, got {word!r}")
        _assign(values, key.split("."), text)
    return structure(cls, values)


def load_or_exit(cls: type[T], *, service: str, argv: Sequence[str] | None = None) -> T:
    """For a service's `__main__`: `python -m services.NAME [FILE.toml] [key=value ...]`. Exits with EXIT_CONFIG on error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(w in ("-h", "--help") for w in words):
        print(f"usage: python -m services.{service} [CONFIG.toml] [key=value ...]\n\nkeys:")
        for f in fields(cls):  # type: ignore[arg-type]
            print(f"  {f.name}: {f.type}")
        raise SystemExit(0)
    path = words.pop(0) if words and "=" not in words[0] else None
    try:
        return load(cls, service=service, path=path, overrides=words)
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from error


def _assign(values: dict[str, Any], keys: Sequence[str], text: str) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = _scalar(text)


def _scalar(text: str) -> Any:
    """A TOML value where the text is one (lists, booleans, numbers), else the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _refuse_unknown(cls: type, values: Mapping[str, Any], prefix: str) -> None:
    known = {f.name for f in fields(cls)}
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key {prefix}{key}; the nearest key is {prefix}{near[0]}" if near else f"unknown key {key}"
            )
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _refuse_unknown(hints[key], value, f"{prefix}{key}.")  # type: ignore[arg-type]
