"""What travels between gateway and engine: the contract's structs as msgpack over HTTP.

The boot message and the state lines between the parent process and the engine live here too.
"""

from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np

from backends.contract import Capabilities, ModelState, Reply, Residence, Work
from backends.torch.options import Pooling, Task

MEDIA_TYPE = "application/msgpack"
# What arrays may hold: float32 and int32, as both ends' processors have them.
NUMBERS = frozenset({"<f4", "<i4"})


class ModelBoot(msgspec.Struct, frozen=True):
    """One model that an engine's process is to serve. name: its upstream's; model: a hub id or a path.

    batch_tokens: tokens of one forward pass; None is by the device. queue_tokens: the most that may
    wait. preload: whether it is loaded before anybody asks. waits: whether who asks earlier waits for it.
    """

    name: str
    model: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    compiled: bool = False
    task: Task | None = None
    pooling: Pooling | None = None
    trust_remote_code: bool = False
    batch_tokens: int | None = None
    queue_tokens: int = 2_000_000
    preload: bool = True
    waits: bool = True


class Boot(msgspec.Struct, frozen=True):
    """What the parent tells an engine on its first line of standard input, as JSON.

    memory_bytes: the most that models in memory may hold together. idle_s: after how long without work one
    leaves it. None is no bound.
    """

    socket_path: str
    status_fd: int
    models: tuple[ModelBoot, ...]
    memory_bytes: int | None = None
    idle_s: float | None = None


class State(msgspec.Struct, frozen=True):
    """An engine's report on one of its models to its parent, one JSON line each."""

    model: str
    state: ModelState
    detail: str = ""


class Request(msgspec.Struct, frozen=True):
    """One piece of work; timeout_s is what is left of the attempt when it is sent."""

    work: Work
    timeout_s: float


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no reply; kind is a BackendError's."""

    kind: str
    message: str


def _pack(value: Any) -> Any:
    # msgspec hands over only what it does not know: arrays.
    if isinstance(value, np.ndarray) and value.dtype.str in NUMBERS:
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    raise TypeError(f"cannot send {getattr(value, 'dtype', type(value).__name__)}")


def _unpack(_type: type, value: Any) -> Any:
    number, shape, data = value
    if number not in NUMBERS:
        raise ValueError(f"unknown numbers: {number}")
    return np.frombuffer(data, dtype=number).reshape(shape)


encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=_unpack)
refusal_decoder = msgspec.msgpack.Decoder(Refusal)
capabilities_decoder = msgspec.msgpack.Decoder(Capabilities)
residence_decoder = msgspec.msgpack.Decoder(Residence)


def address_of(socket_path: str, model: str) -> str:
    """Where a model of an engine is: the socket as a URL's host, the model as its path."""
    return f"http+unix://{quote(socket_path, safe='')}/{quote(model, safe='')}"


def socket_and_base(address: str) -> tuple[str, str]:
    """The socket's path, and the base URL of the model behind it."""
    parts = urlsplit(address)
    return unquote(parts.netloc), f"http://engine{parts.path}"
