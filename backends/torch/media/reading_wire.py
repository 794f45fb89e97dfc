"""Wire between an engine and its reading processes: a picture or recording, and its features."""

from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.contract import Audio, Image, PatchGrid, Truncate
from backends.torch.inputs.sequences import Features, InputSequence, ReadPart

PROCESS_MODULE = "backends.torch.media.reading_process"
# Processor time of one picture. The largest take 1 to 5 s; a decoder that takes more was made to.
CPU_S_MAX = 10
# Memory of one picture beyond that of the libraries: 16 to 20 bytes for each of 89 megapixels, and the rest.
READING_BYTES_MAX = 2 * 1024**3
# Requests to the process with the libraries: fork a reading process; end one, whose number follows.
FORK, END = b"f", b"e"
NUMBER_BYTES = 8
# Number formats of arrays, as both ends' processors store them.
DTYPES = frozenset({"<f4", "<i8", "<i4", "|b1", "|u1"})
ReaderKind: TypeAlias = Literal["image", "audio", "page"]


class ReadsMedium(Protocol):
    """Reader of pictures or of recordings."""

    @property
    def medium(self) -> type[Image | Audio]:
        """Class of the parts that it reads."""

    @property
    def tokens_max(self) -> int:
        """Most tokens of a part."""

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of one part. Raises: InvalidWork."""

    def probe(self) -> InputSequence:
        """Return the features of a part made up, to try a network with."""


class ReadRequest(msgspec.Struct, frozen=True):
    """A picture or recording to read with the reader of a checkpoint.

    load: number of the load that it belongs to; the files may have changed since another.
    """

    kind: ReaderKind
    checkpoint: str
    part: Image | Audio
    truncate: Truncate
    load: int = 0


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of one input of a network."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ReadReply(msgspec.Struct, frozen=True):
    """Features of a part, or why there are none.

    error: kind of a BackendError, "" for none.
    """

    arrays: dict[str, Array] = {}
    tokens: int = 0
    grid: PatchGrid | None = None
    is_cut: bool = False
    error: str = ""
    message: str = ""


encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(ReadRequest)
reply_decoder = msgspec.msgpack.Decoder(ReadReply)


def reply_of(part: ReadPart) -> ReadReply:
    """Return the features of a part as they travel. Raises: TypeError."""
    features = part.sequence.features
    assert features is not None
    arrays = {name: _sent(array) for name, array in features.arrays.items()}
    return ReadReply(arrays, features.tokens, features.grid, part.is_cut)


def part_of(reply: ReadReply) -> ReadPart:
    """Return the features of a reply. Raises: ValueError."""
    arrays = {name: _received(array) for name, array in reply.arrays.items()}
    features = Features(arrays, reply.tokens, reply.grid)
    return ReadPart(InputSequence([], [], features=features), reply.is_cut)


def _sent(array: NDArray[Any]) -> Array:
    if array.dtype.str not in DTYPES:
        raise TypeError(f"cannot send {array.dtype}")
    return Array(array.dtype.str, array.shape, array.tobytes())


def _received(array: Array) -> NDArray[Any]:
    if array.dtype not in DTYPES:
        raise ValueError(f"unknown numbers: {array.dtype}")
    # Networks take arrays that may be written to.
    return np.frombuffer(bytearray(array.data), dtype=array.dtype).reshape(array.shape)
