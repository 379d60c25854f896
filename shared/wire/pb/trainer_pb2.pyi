from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "phase", "step", "lineage", "manifest_digest", "checkpoint_step", "epoch", "world_size", "kernels", "fingerprint", "last_step_timestamp")
    class KernelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    run: str
    phase: str
    step: int
    lineage: int
    manifest_digest: str
    checkpoint_step: int
    epoch: int
    world_size: int
    kernels: _containers.ScalarMap[str, str]
    fingerprint: str
    last_step_timestamp: float
    def __init__(self, run: _Optional[str] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., lineage: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., kernels: _Optional[_Mapping[str, str]] = ..., fingerprint: _Optional[str] = ..., last_step_timestamp: _Optional[float] = ...) -> None: ...
