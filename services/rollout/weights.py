"""From a manifest to a model that can be served, and back to the digest of what is served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.rollout.samples import BadManifest, UnservableRun, Version
from shared.config import structure
from shared.kernels import InexactKernelError, Ops, build_ops, fingerprint, self_check
from shared.models import Decoder, ModelConfig, named_weights
from shared.transfer.digests import checksum
from shared.wire.pb.weight_sync_pb2 import Manifest
from shared.wire.run import RunConfig
from shared.wire.tensors import RawTensor, check_manifest, manifest_digest, tensor_entry

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What a manifest says about the run, read and checked."""

    config: RunConfig
    model: ModelConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, manifest: Manifest) -> ServedRun:
        """Raises BadManifest."""
        try:
            check_manifest(manifest)
            config = structure(RunConfig, json.loads(manifest.run_config_json))
            model = ModelConfig.from_hf(json.loads(manifest.model_config_json))
        except (ValueError, KeyError, TypeError) as error:
            raise BadManifest(f"manifest of run {manifest.run}: {error}") from error
        names = {e.dtype for e in manifest.tensors}
        if len(names) != 1 or not names <= DTYPES.keys():
            raise BadManifest(f"all weights must have one dtype of {', '.join(DTYPES)}, got {', '.join(sorted(names))}")
        longest = max((len(ids) // 4 for ids in manifest.probe_token_ids), default=0)
        if longest > config.max_model_len:
            raise BadManifest(f"a probe of {longest} tokens exceeds max_model_len {config.max_model_len}")
        return cls(config, model, DTYPES[names.pop()])


@dataclass(frozen=True, slots=True)
class Numerics:
    """Operations that were found to keep the row contract here, and the name of everything their bits depend on."""

    ops: Ops
    fingerprint: str


def certified(run: ServedRun, device: str = "cpu") -> Numerics:
    """Builds and checks the operations for a run; takes about a second. Call it in the thread that will compute.

    Raises UnservableRun when exact mode can't be had here.
    """
    try:
        ops = build_ops(run.config.numerics, device)
        self_check(
            ops,
            run.dtype,
            linear_shapes=run.model.linear_shapes,
            heads=run.model.heads,
            sliding_window=run.model.window_in_use,
        )
        if ops.has_paged_kernels:
            # Needs triton. Now, while another version may be served, and not within the swap.
            from shared.models.merged import certify_merged

            certify_merged(ops, run.model, run.dtype)
    except (InexactKernelError, ValueError) as error:
        raise UnservableRun(str(error)) from error
    return Numerics(ops, fingerprint(ops, run.dtype))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version, ready to compute. Never written to: a swap replaces the whole object."""

    manifest: Manifest
    run: ServedRun
    numerics: Numerics
    decoder: Decoder
    head32: Tensor | None
    """[V, D] float32, the head as the exact product on a CPU takes it; None elsewhere."""
    checksum: Tensor | None = None
    """[number of weights] int64 on the GPU, of the verified bytes; None on a CPU, where the digest itself can be had in time."""

    @property
    def version(self) -> Version:
        v = self.manifest.version
        return Version(lineage=v.lineage, step=v.step, digest=v.digest)


def build_model(
    manifest: Manifest,
    run: ServedRun,
    numerics: Numerics,
    tensors: Mapping[str, RawTensor | Tensor],
    *,
    device: torch.device | str = "cpu",
) -> ServedModel:
    """Puts verified bytes into a decoder of its own.

    Args:
        tensors: bytes, which are copied, or tensors on the device, which are taken over.

    Raises BadManifest when names or shapes are not the model's.
    """
    with torch.device("meta"):
        decoder = Decoder(run.model, numerics.ops)
    state = {
        name: tensor if isinstance(tensor, Tensor) else _owned(tensor, run.dtype).to(device)
        for name, tensor in tensors.items()
    }
    try:
        decoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise BadManifest(f"the tensors of run {manifest.run} do not fit its model config: {error}") from error
    decoder.requires_grad_(False).eval()
    head32 = numerics.ops.widen_head(decoder.head_weight)
    is_on_gpu = decoder.head_weight.is_cuda
    return ServedModel(
        manifest, run, numerics, decoder, head32, checksum(dict(named_weights(decoder))) if is_on_gpu else None
    )


@torch.no_grad()
def adopt(served: ServedModel, staged: ServedModel) -> ServedModel:
    """The staged version in the memory of the served one, so that captured graphs go on with it; copies on the device.

    Afterwards `served` is no version any more: between two steps, by the thread that computes.
    """
    target = dict(named_weights(served.decoder))
    for name, weight in named_weights(staged.decoder):
        target[name].copy_(weight)
    head32 = served.numerics.ops.widen_head(served.decoder.head_weight)
    return replace(staged, decoder=served.decoder, head32=head32)


def _owned(raw: RawTensor, dtype: torch.dtype) -> Tensor:
    """A copy in an allocation of torch's own: aligned as its kernels like it, gone from the file or message it came in."""
    tensor = torch.empty(raw.shape, dtype=dtype)
    if raw.nbytes:
        tensor.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(raw.data, np.uint8)
    return tensor


def raw_tensors(model: ServedModel) -> dict[str, RawTensor]:
    """The tensors that the decoder computes from, as bytes; shared with it where they lie in the CPU's memory."""
    return {name: _raw(w) for name, w in named_weights(model.decoder)}


def held_digest(model: ServedModel) -> str:
    """The manifest digest of the tensors that the decoder computes from, read now.

    On a GPU by way of a checksum: the bytes' digest was verified when it was taken.
    """
    if model.checksum is not None and torch.equal(checksum(dict(named_weights(model.decoder))), model.checksum):
        return model.version.digest
    return manifest_digest(tensor_entry(name, _raw(w)) for name, w in named_weights(model.decoder))


def _raw(tensor: Tensor) -> RawTensor:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
