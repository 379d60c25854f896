"""Every operation that can touch a logprob (torch; on CUDA triton too)."""

from shared.kernels.attention_layout import AttentionLayout
from shared.kernels.logprob import LogprobOutput
from shared.kernels.machine import current_device, default_dtype, to_device
from shared.kernels.ops import InexactKernelError, Mode, Ops, build_ops
from shared.kernels.sampling import SampleOutput, SamplingParams
from shared.kernels.self_check import fingerprint, self_check

__all__ = [
    "AttentionLayout",
    "InexactKernelError",
    "LogprobOutput",
    "Mode",
    "Ops",
    "SampleOutput",
    "SamplingParams",
    "build_ops",
    "current_device",
    "default_dtype",
    "fingerprint",
    "self_check",
    "to_device",
]
