"""Hugging Face model directories in and out."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared.kernels import Ops
from shared.models.config import ModelConfig, token_ids
from shared.models.decoder import Decoder
from shared.models.recompute import Recompute

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30
_DOWNLOADS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def resolve_model(name_or_dir: str | Path) -> Path:
    """A local directory as it is; a Hugging Face name downloaded to the hub's cache (or found there).

    Raises:
        ValueError: neither a model directory nor a name that the hub can serve.
    """
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"{path} has no config.json; name a Hugging Face model directory")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name_or_dir), allow_patterns=_DOWNLOADS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {str(name_or_dir)!r} is no local directory and could not be downloaded ({error}); check the name, "
            "set HF_TOKEN if the model is gated, or pass the path of a directory that holds config.json and *.safetensors"
        ) from error


def load_config(directory: str | Path) -> ModelConfig:
    """The config of a model directory, end-of-sequence ids of generation_config.json included."""
    directory = Path(directory)
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    extra = token_ids(json.loads(generation.read_text()).get("eos_token_id"))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra))))


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises:
        ValueError: a directory without any.
    """
    directory = Path(directory)
    if (directory / _INDEX).exists():
        files = sorted(set(json.loads((directory / _INDEX).read_text())["weight_map"].values()))
    elif (directory / _WEIGHTS).exists():
        files = [_WEIGHTS]
    else:
        raise ValueError(f"{directory} holds neither {_WEIGHTS} nor {_INDEX}; convert the weights to safetensors")
    return [directory / file for file in files]


def read_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model directory, file by file, names in order.

    Raises:
        ValueError: a directory without safetensors.
    """
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)


def load_model(
    directory: str | Path, ops: Ops, dtype: torch.dtype, *, activation_checkpointing: Recompute = "none"
) -> Decoder:
    """A decoder with the directory's weights, cast to dtype, on the device of ops.

    Raises:
        ValueError: an unsupported model, or tensors that are missing, unknown or of another shape.
    """
    config = load_config(directory)
    with torch.device("meta"):
        decoder = Decoder(config, ops, activation_checkpointing=activation_checkpointing)
    state = {}
    for name, tensor in read_tensors(directory):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        state[name] = tensor.to(device=ops.device, dtype=dtype)
    try:
        decoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights in {directory} do not fit its config.json: {error}") from error
    return decoder


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name in a stable order, a tied head once (under the embedding's name)."""
    return iter(sorted(decoder.named_parameters()))


def save_model(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    companions_from: str | Path | None = None,
) -> None:
    """Write a directory that transformers, and `load_model`, can read.

    Args:
        weights: by Hugging Face name (`dict(named_weights(decoder))`, or a gathered state dict).
        config: the architecture.
        directory: created if need be.
        dtype: to cast to; None keeps each tensor's own.
        companions_from: the model directory whose tokenizer and generation config are copied, or None.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in sorted(weights.items())
    }
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    save_config(config, directory, dtype=next(iter(tensors.values())).dtype, companions_from=companions_from)


def save_sharded(
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    companions_from: str | Path | None = None,
) -> None:
    """Like `save_model`, for weights that do not fit into memory together: one file's tensors are held at a time.

    Args:
        shapes: of every tensor, by Hugging Face name.
        read: the tensor of a name, asked for once each, in the order of the names.
        dtype: of the files.
        max_file_bytes: a file is closed before it would exceed them; a larger tensor has a file of its own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    room = 0
    for name in sorted(shapes):
        size = math.prod(shapes[name]) * dtype.itemsize
        if not files or size > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= size
    count = len(files)
    index = {}
    for number, names in enumerate(files, 1):
        file = _WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        tensors = {name: read(name).detach().to(device="cpu", dtype=dtype).contiguous() for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
    if count > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        (directory / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    save_config(config, directory, dtype=dtype, companions_from=companions_from)


def save_config(
    config: ModelConfig, directory: Path, *, dtype: torch.dtype, companions_from: str | Path | None
) -> None:
    """config.json, and copies of the companions; arguments as for `save_model`."""
    hf = {**config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    for name in _COMPANIONS:
        if companions_from is not None and (Path(companions_from) / name).exists():
            shutil.copyfile(Path(companions_from) / name, directory / name)
