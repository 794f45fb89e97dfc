from backends.tei_protos import tei_pb2 as _tei_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Target(_message.Message):
    __slots__ = ("instance_name", "model_id", "instance_index")
    INSTANCE_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    instance_name: str
    model_id: str
    instance_index: int
    def __init__(self, instance_name: _Optional[str] = ..., model_id: _Optional[str] = ..., instance_index: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: Target
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedRequest, _Mapping]] = ...) -> None: ...

class EmbedSparseRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedSparseRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedSparseRequest, _Mapping]] = ...) -> None: ...

class EmbedAllRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EmbedAllRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EmbedAllRequest, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictRequest, _Mapping]] = ...) -> None: ...

class PredictPairRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.PredictPairRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.PredictPairRequest, _Mapping]] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankRequest, _Mapping]] = ...) -> None: ...

class RerankStreamRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.RerankStreamRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.RerankStreamRequest, _Mapping]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.EncodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.EncodeRequest, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("target", "request")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    target: Target
    request: _tei_pb2.DecodeRequest
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., request: _Optional[_Union[_tei_pb2.DecodeRequest, _Mapping]] = ...) -> None: ...

class EmbedArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "normalize", "noop")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    normalize: bool
    noop: bool
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: bool = ..., normalize: bool = ..., noop: bool = ...) -> None: ...

class EmbedArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...

class EmbedSparseArrowRequest(_message.Message):
    __slots__ = ("target", "arrow_ipc", "truncate", "noop")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    NOOP_FIELD_NUMBER: _ClassVar[int]
    target: Target
    arrow_ipc: bytes
    truncate: bool
    noop: bool
    def __init__(self, target: _Optional[_Union[Target, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., truncate: bool = ..., noop: bool = ...) -> None: ...

class EmbedSparseArrowResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...
