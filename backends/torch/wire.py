"""What travels between gateway and engine: the contract's structs as msgpack over HTTP.

The boot message and the state lines between the parent process and the engine live here too.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from backends.contract import Capabilities, Reply, Work
from backends.torch.kinds import Pooling, Task

MEDIA_TYPE = "application/msgpack"
# What arrays may hold: float32 and int32, as both ends' processors have them.
NUMBERS = frozenset({"<f4", "<i4"})


class Boot(msgspec.Struct, frozen=True):
    """What the parent tells an engine on its first line of standard input, as JSON.

    batch_tokens: tokens of one forward pass; None is by the device. queue_tokens: the most that may
    wait.
    """

    name: str
    model: str
    socket_path: str
    status_fd: int
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    compiled: bool = False
    task: Task | None = None
    pooling: Pooling | None = None
    trust_remote_code: bool = False
    batch_tokens: int | None = None
    queue_tokens: int = 2_000_000


class State(msgspec.Struct, frozen=True):
    """A child's report to its parent, one JSON line each; failed means starting again is no use."""

    state: Literal["loading", "ready", "failed"]
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
