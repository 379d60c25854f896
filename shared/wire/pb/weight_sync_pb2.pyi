from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAW: _ClassVar[Encoding]
    GAPS: _ClassVar[Encoding]
    BITMAP: _ClassVar[Encoding]
RAW: Encoding
GAPS: Encoding
BITMAP: Encoding

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "nbytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("lineage", "step", "digest")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    step: int
    digest: str
    def __init__(self, lineage: _Optional[int] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run", "version", "tensors", "model_config_json", "run_config_json", "fingerprint", "uri", "probe_token_ids", "probe_logprobs", "base_digest", "source")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    PROBE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: Version
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    model_config_json: str
    run_config_json: str
    fingerprint: str
    uri: str
    probe_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    probe_logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    base_digest: str
    source: Source
    def __init__(self, run: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., model_config_json: _Optional[str] = ..., run_config_json: _Optional[str] = ..., fingerprint: _Optional[str] = ..., uri: _Optional[str] = ..., probe_token_ids: _Optional[_Iterable[bytes]] = ..., probe_logprobs: _Optional[_Iterable[bytes]] = ..., base_digest: _Optional[str] = ..., source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("name", "offset", "data", "encoding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    data: bytes
    encoding: Encoding
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., encoding: _Optional[_Union[Encoding, str]] = ...) -> None: ...

class PublishChunk(_message.Message):
    __slots__ = ("epoch", "manifest", "chunk", "announce")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    manifest: Manifest
    chunk: TensorChunk
    announce: bool
    def __init__(self, epoch: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ..., announce: _Optional[bool] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: Version
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("run", "oldest_step", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    oldest_step: int
    epoch: int
    def __init__(self, run: _Optional[str] = ..., oldest_step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class RetainReply(_message.Message):
    __slots__ = ("num_dropped",)
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    def __init__(self, num_dropped: _Optional[int] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("version", "published_at", "nbytes", "replicas_ready")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_READY_FIELD_NUMBER: _ClassVar[int]
    version: Version
    published_at: float
    nbytes: int
    replicas_ready: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., published_at: _Optional[float] = ..., nbytes: _Optional[int] = ..., replicas_ready: _Optional[int] = ...) -> None: ...

class ListVersionsReply(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionInfo]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionInfo, _Mapping]]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("run", "digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    digest: str
    def __init__(self, run: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("replica", "incarnation", "address", "kv_capacity_tokens")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    address: str
    kv_capacity_tokens: int
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., kv_capacity_tokens: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("heartbeat_s", "run")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    run: str
    def __init__(self, heartbeat_s: _Optional[float] = ..., run: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("replica", "incarnation", "manifest_digest")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    manifest_digest: str
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("replica", "incarnation")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DeregisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run", "digest", "names", "base_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    digest: str
    names: _containers.RepeatedScalarFieldContainer[str]
    base_digest: str
    def __init__(self, run: _Optional[str] = ..., digest: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class SetNeededRequest(_message.Message):
    __slots__ = ("run", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class SetNeededReply(_message.Message):
    __slots__ = ("published",)
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    published: bool
    def __init__(self, published: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica", "incarnation", "address", "state", "reason", "version")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    incarnation: str
    address: str
    state: str
    reason: str
    version: Version
    def __init__(self, replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("run", "replicas", "versions", "needed_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    needed_step: int
    def __init__(self, run: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., needed_step: _Optional[int] = ...) -> None: ...
