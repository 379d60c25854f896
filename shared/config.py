"""TOML file + environment + command line -> frozen dataclasses. An unknown key is an error that names the nearest key.

Later sources win: file, then environment (`TIMZERO_<SERVICE>_<FIELD>`, nested fields joined by `__`), then `key=value`
arguments (nested keys joined by dots). A text from the environment or the command line is read as the field's own type
and, where it is none (lists, tables), as a TOML value. "none" is None in a field that may be None, since TOML has no null.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.masking import MASK, is_credential

T = TypeVar("T")

EXIT_CONFIG = 2
"""Exit code of a process that was given a configuration it can't run with."""


class ConfigError(ValueError):
    """What is wrong with the configuration, the value got, and what to do. Never holds a credential."""


def strict(cls: type[T]) -> type[T]:
    """Marks a dataclass so that `structure` refuses unknown keys and wrong types inside it."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return cls


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Building one takes milliseconds, and the gateway reads a run's configuration with every request."""
_hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""Every look compiles each field's annotation anew."""


def structure(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds `cls` from plain values. Raises ConfigError naming every bad field."""
    _refuse_unknown(cls, values, prefix="")
    try:
        return _adapter(cls).validate_python(dict(values))
    except ValidationError as error:
        # Without the cause: its text repeats the values, credentials among them.
        raise ConfigError("; ".join(_line(cls, e) for e in error.errors())) from None


def unstructure(config: Any) -> dict[str, Any]:
    """The inverse of `structure`, JSON-ready."""
    return _adapter(type(config)).dump_python(config, mode="json")


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
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read configuration {path}: {error}") from error
        if isinstance(values.get(service), dict):
            values = values[service]
    prefix = f"TIMZERO_{service.upper()}_"
    for name, text in (os.environ if environ is None else environ).items():
        if name.startswith(prefix):
            _assign(cls, values, name[len(prefix) :].lower().split("__"), text, source=name)
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(f"expected key=value, got {word!r}")
        _assign(cls, values, key.split("."), text, source=key)
    return structure(cls, _with_nulls(cls, values))


def load_or_exit(cls: type[T], *, service: str, argv: Sequence[str] | None = None) -> T:
    """For a service's `__main__`: `python -m services.NAME [FILE.toml] [key=value ...]`. Exits with EXIT_CONFIG on error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(w in ("-h", "--help") for w in words):
        print(f"usage: python -m services.{service} [CONFIG.toml] [key=value ...]\n\nkeys:")
        for key in keys(cls):
            print(f"  {key.name}: {key.type} = {key.default}")
            print(textwrap.indent(textwrap.fill(key.doc, 100), "      "), end="\n" if key.doc else "")
        raise SystemExit(0)
    path = words.pop(0) if words and "=" not in words[0] else None
    try:
        return load(cls, service=service, path=path, overrides=words)
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from error


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a configuration, as help and documentation show it."""

    name: str
    type: str
    default: str
    doc: str


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration in order, nested ones with dots; `doc` is the string below the field."""
    hints, docs = _hints_of(cls), _field_docs(cls)
    for f in fields(cls):
        nested = _dataclass_in(hints[f.name])
        if nested is not None and f.default_factory is nested:
            yield from keys(nested, f"{prefix}{f.name}.")
            continue
        if f.default_factory is not MISSING:
            default = "computed"  # on this machine: nothing that documentation could quote
        else:
            default = (
                "required"
                if f.default is MISSING
                else repr(str(f.default) if isinstance(f.default, Path) else f.default)
            )
        yield Key(f"{prefix}{f.name}", str(f.type), default, docs.get(f.name, ""))


def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field.target.id] = " ".join(text.split())
    return docs


def _assign(cls: type, values: dict[str, Any], path: Sequence[str], text: str, *, source: str) -> None:
    kind: Any = cls
    for depth, key in enumerate(path):
        owner = _dataclass_in(kind)
        kind = _hints_of(owner).get(key) if owner is not None else None
        if depth < len(path) - 1:
            values = values.setdefault(key, {})
            if not isinstance(values, dict):
                raise ConfigError(f"{source}: {'.'.join(path[: depth + 1])} is a value and has no keys of its own")
    values[path[-1]] = text if kind is not None and _reads_as(kind, text) else _toml_value(text)


def _with_nulls(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints, out = _hints_of(cls), dict(values)
    for key, value in values.items():
        kind = hints.get(key)
        nested = _dataclass_in(kind)
        if value == "none" and type(None) in get_args(kind):
            out[key] = None
        elif nested is not None and isinstance(value, Mapping):
            out[key] = _with_nulls(nested, value)
    return out


def _reads_as(kind: Any, text: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(text)
    except ValidationError:
        return False
    return True


def _toml_value(text: str) -> Any:
    """A TOML value where the text is one (lists, booleans, numbers), else the text itself."""
    try:
        table = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["x"] if len(table) == 1 else text


def _line(cls: type, error: Any) -> str:
    where = ".".join(map(str, error["loc"])) or cls.__name__
    if error["type"] == "value_error":  # from __post_init__: the text holds the value, the input is the whole record
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{where} is required"
    got = MASK if any(is_credential(str(part)) for part in error["loc"]) else repr(error["input"])
    return f"{where}: {error['msg']}, got {got}"


def _dataclass_in(kind: Any) -> type | None:
    """The configuration class that a field holds: `C`, `C | None`."""
    found = [k for k in (kind, *get_args(kind)) if isinstance(k, type) and is_dataclass(k)]
    return found[0] if found else None


def _refuse_unknown(cls: type, values: Mapping[str, Any], prefix: str) -> None:
    hints = _hints_of(cls)
    known = [f.name for f in fields(cls)]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {prefix}{key}; the nearest key is {prefix}{near[0]}")
        nested = _dataclass_in(hints[key])
        if nested is not None and isinstance(value, Mapping):
            _refuse_unknown(nested, value, f"{prefix}{key}.")
