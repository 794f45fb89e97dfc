"""Wire between gateway and engine: the contract's structs as msgpack over HTTP.

The boot message and the state lines between the parent process and the engine are defined here too.
"""

from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np

from backends.contract import Capabilities, ModelState, Reply, Residence, TokenizerSettings, Work
from backends.recipe.options import DTypeName, Pooling, RerankFamily, RerankPrompt, Runtime, Task

MEDIA_TYPE = "application/msgpack"
# Types of array elements: float32 and int32, little-endian as both ends' processors store them.
DTYPES = frozenset({"<f4", "<i4"})


class ModelBoot(msgspec.Struct, frozen=True):
    """Settings of one model that an engine process serves.

    name: its upstream's. model: hub id or path. batch_tokens: tokens of one forward pass, None for the
    device's default. queue_tokens: bound of the queue. preload: load it at start. waits: work that arrives
    before it is loaded waits for the load, and is refused otherwise. code_revision: commit of the repository
    with the model's code.
    """

    name: str
    model: str
    revision: str | None = None
    dtype: DTypeName | None = None
    device: str | None = None
    compiled: bool = False
    runtime: Runtime = "torch"
    task: Task | None = None
    pooling: Pooling | None = None
    rerank_template: RerankFamily | RerankPrompt | None = None
    adapter: str | None = None
    trust_remote_code: bool = False
    code_revision: str | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()
    batch_tokens: int | None = None
    queue_tokens: int = 2_000_000
    preload: bool = True
    waits: bool = True


class SmokeLoad(msgspec.Struct, frozen=True):
    """Result of one load, and of one text through the model.

    error: why it failed. tokens_max: most tokens of an input. load_s: time of both.
    """

    error: str | None = None
    operations: tuple[str, ...] = ()
    dimensions: int | None = None
    tokens_max: int | None = None
    load_s: float | None = None


class EngineBoot(msgspec.Struct, frozen=True):
    """Boot message of an engine, the first line of its standard input, as JSON.

    memory_bytes: the most that all loaded models may hold together. idle_s: time without work after which a
    model is unloaded. None is no bound.
    """

    socket_path: str
    status_fd: int
    models: tuple[ModelBoot, ...]
    memory_bytes: int | None = None
    idle_s: float | None = None


class State(msgspec.Struct, frozen=True):
    """State of one model as the engine reports it to its parent, one JSON line each."""

    model: str
    state: ModelState
    detail: str = ""


class WeightSizes(msgspec.Struct, frozen=True):
    """Bytes of a checkpoint's weight files, their elements, and estimated bytes in memory; None: unknown."""

    file_bytes: int | None = None
    elements: int | None = None
    memory_bytes: int | None = None


class Inspection(msgspec.Struct, frozen=True):
    """Result of the inspection of a checkpoint whose weights were not loaded.

    checkpoint: folder of its files. refusal: why it does not load; fields that could not be read are None.
    packed: True if batches are computed without padding, None if only a load can show it.
    template: a reranker's prompt with its placeholders. notes: guesses, and settings that may be missing.
    """

    model: str
    checkpoint: str | None = None
    refusal: str | None = None
    kind: str | None = None
    architectures: tuple[str, ...] = ()
    capabilities: Capabilities | None = None
    packed: bool | None = None
    template: str | None = None
    weights: WeightSizes = WeightSizes()
    notes: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """One piece of work. timeout_s: remaining time of the attempt."""

    work: Work
    timeout_s: float


class Refusal(msgspec.Struct, frozen=True):
    """Reason that there is no reply. kind, input_index: of a BackendError."""

    kind: str
    message: str
    input_index: int | None = None


def _pack(value: Any) -> Any:
    # msgspec calls this for types that it does not know: arrays.
    if isinstance(value, np.ndarray) and value.dtype.str in DTYPES:
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    raise TypeError(f"cannot send {getattr(value, 'dtype', type(value).__name__)}")


def _unpack(_type: type, value: Any) -> Any:
    dtype, shape, data = value
    if dtype not in DTYPES:
        raise ValueError(f"unknown numbers: {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=_unpack)
refusal_decoder = msgspec.msgpack.Decoder(Refusal)
capabilities_decoder = msgspec.msgpack.Decoder(Capabilities)
residence_decoder = msgspec.msgpack.Decoder(Residence)


def address_of(socket_path: str, model: str) -> str:
    """Return the address of an engine's model: the socket as the host of a URL, the model as its path."""
    return f"http+unix://{quote(socket_path, safe='')}/{quote(model, safe='')}"


def socket_and_base(address: str) -> tuple[str, str]:
    """Return the socket's path, and the base URL of the model behind it."""
    parts = urlsplit(address)
    return unquote(parts.netloc), f"http://engine{parts.path}"
