from shared.wire.pb import weight_sync_pb2 as _weight_sync_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "max_tokens", "stop_token_ids", "stop", "top_p", "top_k", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    top_p: float
    top_k: int
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("trajectory_id", "sample_index", "token_ids")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    sample_index: int
    token_ids: bytes
    def __init__(self, trajectory_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run", "manifest_digest", "seed", "prompt_number", "prompt_token_ids", "sampling", "samples", "evaluation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    manifest_digest: str
    seed: int
    prompt_number: int
    prompt_token_ids: bytes
    sampling: SamplingParams
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    evaluation: bool
    def __init__(self, run: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_number: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., evaluation: _Optional[bool] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("version", "fingerprint", "chunks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    version: _weight_sync_pb2.Version
    fingerprint: str
    chunks: _containers.RepeatedCompositeFieldContainer[GenerateChunk]
    def __init__(self, version: _Optional[_Union[_weight_sync_pb2.Version, _Mapping]] = ..., fingerprint: _Optional[str] = ..., chunks: _Optional[_Iterable[_Union[GenerateChunk, _Mapping]]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("trajectory_id", "start", "token_ids", "logprobs", "top1", "kv", "finish_reason")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP1_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    start: int
    token_ids: bytes
    logprobs: bytes
    top1: bytes
    kv: str
    finish_reason: str
    def __init__(self, trajectory_id: _Optional[str] = ..., start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top1: _Optional[bytes] = ..., kv: _Optional[str] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("trajectory_ids",)
    TRAJECTORY_IDS_FIELD_NUMBER: _ClassVar[int]
    trajectory_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trajectory_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class PrepareWeightsRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _weight_sync_pb2.Manifest
    def __init__(self, manifest: _Optional[_Union[_weight_sync_pb2.Manifest, _Mapping]] = ...) -> None: ...

class PrepareWeightsReply(_message.Message):
    __slots__ = ("manifest_digest", "fingerprint", "seconds")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    fingerprint: str
    seconds: float
    def __init__(self, manifest_digest: _Optional[str] = ..., fingerprint: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("manifest_digest", "mode")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    mode: str
    def __init__(self, manifest_digest: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...

class CommitWeightsReply(_message.Message):
    __slots__ = ("manifest_digest", "probe_tokens", "probe_differing", "pause_seconds", "pause_parts")
    class PausePartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROBE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBE_DIFFERING_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_PARTS_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    probe_tokens: int
    probe_differing: int
    pause_seconds: float
    pause_parts: _containers.ScalarMap[str, float]
    def __init__(self, manifest_digest: _Optional[str] = ..., probe_tokens: _Optional[int] = ..., probe_differing: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., pause_parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AbortWeightsRequest(_message.Message):
    __slots__ = ("manifest_digest",)
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    def __init__(self, manifest_digest: _Optional[str] = ...) -> None: ...

class AbortWeightsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids", "temperature")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    temperature: float
    def __init__(self, token_ids: _Optional[_Iterable[bytes]] = ..., temperature: _Optional[float] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "manifest_digest")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    manifest_digest: str
    def __init__(self, logprobs: _Optional[_Iterable[bytes]] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("replica", "manifest_digest", "lineage", "policy_step", "num_running", "num_waiting", "kv_usage", "num_preemptions", "num_sampled_tokens", "num_prefix_hit_tokens", "num_continued_tokens", "kernels", "fingerprint", "staged_digest", "max_model_len", "is_recomputing", "recompute_seconds")
    class KernelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTINUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STAGED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    IS_RECOMPUTING_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    manifest_digest: str
    lineage: int
    policy_step: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    num_sampled_tokens: int
    num_prefix_hit_tokens: int
    num_continued_tokens: int
    kernels: _containers.ScalarMap[str, str]
    fingerprint: str
    staged_digest: str
    max_model_len: int
    is_recomputing: bool
    recompute_seconds: float
    def __init__(self, replica: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., lineage: _Optional[int] = ..., policy_step: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_continued_tokens: _Optional[int] = ..., kernels: _Optional[_Mapping[str, str]] = ..., fingerprint: _Optional[str] = ..., staged_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., is_recomputing: _Optional[bool] = ..., recompute_seconds: _Optional[float] = ...) -> None: ...
