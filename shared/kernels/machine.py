"""What this machine is, which dtype suits it, and the way to its devices."""

import contextlib
import functools
import platform
from pathlib import Path

import torch


def default_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies it natively (elsewhere it is slower than float32), otherwise float32."""
    native = {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if native & set(_cpu_info().get("flags", "").split()) else torch.float32


def cpu_model() -> str:
    """The CPU's name, family, model and stepping."""
    info = _cpu_info()
    parts = [info.get("model name", platform.processor() or platform.machine())]
    parts += [f"{key.split()[-1]} {info[key]}" for key in ("cpu family", "model", "stepping") if key in info]
    return ", ".join(parts)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there; the host does not wait for the copy."""
    if tensor.device.type == device.type:
        return tensor
    # From pageable memory a copy would wait for everything that the device still has to do.
    return tensor.pin_memory().to(device, non_blocking=True)


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a GPU this thread's own for the block. A thread begins with the first GPU whatever the others compute on, and what it
    does there, if only going back to it, takes that GPU's memory for a context."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().split("\n\n")[0].splitlines()
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {"flags": info.get("Features", ""), **info}
