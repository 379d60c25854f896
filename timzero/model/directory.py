"""A Hugging Face model directory: written whole or not at all, and checked before it is used. numpy and safetensors, no torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open


class ModelError(ValueError):
    """A model that can't be had: what was asked for, what was found, what to do."""


def write_atomically(target: Path, write: Callable[[Path], None]) -> Path:
    """Calls `write` with a new empty directory beside `target`, then renames it there.

    A process that dies half-way leaves no `target`; of two that write at the same time one wins and the other's is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        staging = Path(name) / target.name
        staging.mkdir()
        write(staging)
        for path in staging.iterdir():
            _sync(path)
        if not target.exists():
            os.rename(staging, target)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_weights(path: Path, tensors: Mapping[str, np.ndarray], dtype: Literal["float32", "bfloat16"]) -> None:
    """Writes float32 arrays as they are or, rounded to nearest even, as bfloat16, in name order.

    The file is a safetensors one: length of the header (uint64), header (JSON), bytes. numpy has no bfloat16, so the
    library's own writer for numpy can't be used.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name in sorted(tensors):
        values = tensors[name]
        data = bfloat16_bytes(values) if dtype == "bfloat16" else np.ascontiguousarray(values, "<f4").tobytes()
        header[name] = {
            "dtype": "BF16" if dtype == "bfloat16" else "F32",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        blobs.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs)


def bfloat16_bytes(values: np.ndarray) -> bytes:
    """Float32 values as little-endian bfloat16, rounded to nearest, ties to even. Refuses what is not finite."""
    if not np.isfinite(values).all():
        raise ModelError("a weight that is not finite can't be written")
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def check(path: Path) -> Path:
    """Returns the absolute path of a directory that holds a model, its weights and its tokenizer. Raises ModelError."""
    problems = []
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory")
    for name in ("config.json", "tokenizer.json"):
        problem = _json_problem(path / name)
        if problem:
            problems.append(problem)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        problems.append("no *.safetensors (convert other formats with transformers' save_pretrained)")
    index = path / "model.safetensors.index.json"
    if index.exists() and not _json_problem(index):
        wanted = set(json.loads(index.read_text()).get("weight_map", {}).values())
        problems += [f"{name} is in the index but missing" for name in sorted(wanted - {w.name for w in weights})]
    for file in weights:
        try:
            with safe_open(str(file), framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} can't be read ({error}); it may be half downloaded")
    if problems:
        raise ModelError(f"{path} is no usable model directory: " + "; ".join(problems))
    return path.resolve()


def _json_problem(path: Path) -> str | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {path.name}"
    except (OSError, ValueError) as error:
        return f"{path.name} can't be read ({error})"
    if path.name == "config.json" and "model_type" not in values:
        return "config.json names no model_type"
    return None


def copy_into(source: Path) -> Callable[[Path], None]:
    """A writer for `write_atomically` that copies the files of a model directory, following links."""

    def write(staging: Path) -> None:
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, staging / path.name)

    return write
