from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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

class AcquireRequest(_message.Message):
    __slots__ = ("run", "manifest_digest", "replica", "member", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    manifest_digest: str
    replica: str
    member: str
    epoch: int
    def __init__(self, run: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., replica: _Optional[str] = ..., member: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("shm", "ipc", "broadcast")
    SHM_FIELD_NUMBER: _ClassVar[int]
    IPC_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    shm: SharedMemory
    ipc: DeviceMemory
    broadcast: Round
    def __init__(self, shm: _Optional[_Union[SharedMemory, _Mapping]] = ..., ipc: _Optional[_Union[DeviceMemory, _Mapping]] = ..., broadcast: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("host", "path", "nbytes", "inode")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    host: str
    path: str
    nbytes: int
    inode: int
    def __init__(self, host: _Optional[str] = ..., path: _Optional[str] = ..., nbytes: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("host", "uuid", "handle", "storage_bytes", "storage_offset", "nbytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    uuid: str
    handle: bytes
    storage_bytes: int
    storage_offset: int
    nbytes: int
    def __init__(self, host: _Optional[str] = ..., uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., storage_bytes: _Optional[int] = ..., storage_offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("store", "epoch", "rank", "size", "nbytes", "bucket_bytes", "timeout_s")
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    store: str
    epoch: int
    rank: int
    size: int
    nbytes: int
    bucket_bytes: int
    timeout_s: float
    def __init__(self, store: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., nbytes: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...
