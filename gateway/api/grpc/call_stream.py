"""One RPC on its connection: its request, messages in both directions, and its end. Knows no service.

Source: gRPC over HTTP/2, https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.api.grpc.frames import NO_ERROR, PROTOCOL_ERROR, FlowControlled, StreamFault
from gateway.api.grpc.hpack import Field, encode_block
from gateway.api.grpc.statuses import CompressedMessage, status_of
from gateway.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    GatewayError,
    InvalidInput,
    MalformedBody,
)
from gateway.tenants.client_certificate import ClientCertificate

# Bytes that a client may send on a stream before it is read.
STREAM_WINDOW_BYTES = 16 * 1024
# The same while a larger message arrives.
LARGE_WINDOW_BYTES = 1024 * 1024
# Unread bytes of a stream without a key: its messages are names of services and files.
OPEN_MESSAGE_BYTES_MAX = 1024
OPEN_BUFFER_BYTES_MAX = 2 * OPEN_MESSAGE_BYTES_MAX
PREFIX_BYTES = 5

CONTENT_TYPE = b"application/grpc"
# Begins with `:status 200`, an entry of the static table.
REPLY_BLOCK = b"\x88" + encode_block(
    ((b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", b"identity"))
)
NO_GRPC_BLOCK = encode_block(((b":status", b"415"),))

# With the name of an encoding, or parameters. `application/grpc-web` is another protocol.
GRPC_TYPE = re.compile(rb"application/grpc(?:[+;].*)?")
FIELD_NAME = re.compile(rb":?[a-z0-9!#$%&'*+.^_`|~-]+")
FIELD_VALUE = re.compile(rb"[^\0\r\n]*")
# Of HTTP/1, which a proxy in front may have understood otherwise.
CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
UNSAFE = re.compile(rb"[^ -$&-~]")


class NotGrpc(Exception):
    """Request of HTTP/2 that is no RPC."""


@dataclass(frozen=True, slots=True)
class Request:
    """Head of an RPC. timeout: value of `grpc-timeout`, empty without one."""

    path: str
    metadata: Sequence[Field]
    timeout: str = ""

    def timeout_s(self) -> float | None:
        """Return the time until the deadline of the RPC, None without one. Raises: InvalidInput."""
        if not self.timeout:
            return None
        found = TIMEOUT.fullmatch(self.timeout)
        if found is None:
            raise InvalidInput("`grpc-timeout` is up to eight digits and a unit: H, M, S, m, u or n")
        return int(found[1]) * SECONDS[found[2]]


def read_request(fields: Sequence[Field]) -> Request:
    """Return the head of an RPC. Raises: NotGrpc, StreamFault."""
    pseudo: dict[bytes, bytes] = {}
    metadata: list[Field] = []
    for name, value in fields:
        if not FIELD_NAME.fullmatch(name) or not FIELD_VALUE.fullmatch(value) or name in CONNECTION_FIELDS:
            raise StreamFault(PROTOCOL_ERROR)
        if name[0] == ord(":"):
            if metadata or name in pseudo:
                raise StreamFault(PROTOCOL_ERROR)
            pseudo[name] = value
        else:
            metadata.append((name, value))
    if not {b":method", b":path", b":scheme"} <= pseudo.keys():
        raise StreamFault(PROTOCOL_ERROR)
    named = dict(metadata)
    if pseudo[b":method"] != b"POST" or not GRPC_TYPE.fullmatch(named.get(b"content-type", b"")):
        raise NotGrpc
    return Request(
        pseudo[b":path"].decode("latin-1"), metadata, named.get(b"grpc-timeout", b"").decode("latin-1")
    )


class Link(Protocol):
    """Connection as far as a stream uses it. address, certificate: of the client."""

    address: str
    certificate: ClientCertificate | None

    @property
    def open_calls(self) -> int:
        """Number of RPCs whose methods need no key."""

    def trust(self, tenant: str) -> None:
        """Raise the bounds: a key of the client is verified."""

    def send_headers(self, stream: "CallStream", block: bytes, *, ends: bool) -> None:
        """Send a header block. ends: it is the last of its stream."""

    def send_data(self, stream: "CallStream", pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        """Send bytes of messages, for which there is room."""

    def room_for(self, stream: "CallStream") -> int:
        """Return the bytes of messages that may be sent now."""

    async def wait_for_room(self, stream: "CallStream") -> None:
        """Wait until there may be room for bytes of messages."""

    def allow(self, stream: "CallStream", size: int) -> None:
        """Let the client send so many more bytes on a stream."""

    def credit(self, size: int) -> None:
        """Let the client send so many more bytes on the connection."""

    def close_stream(self, stream: "CallStream", code: int) -> None:
        """Forget a stream. code: sent to the client, unless both sides have ended it."""


class CallStream(FlowControlled):
    """One RPC on its connection.

    link: its connection. written_bytes: of the message that is being sent. is_open: its method needs no key.
    task: that answers it.
    """

    def __init__(
        self, link: Link, number: int, request: Request, send_window: int, *, client_has_ended: bool
    ) -> None:
        super().__init__(number, STREAM_WINDOW_BYTES, send_window, client_has_ended=client_has_ended)
        self.request = request
        self.is_open = False
        self.task: asyncio.Task[None] | None = None
        self.has_ended = False
        self.written_bytes = 0
        self.link = link
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        # Bytes at its beginning that the connection's window has back.
        self._credited = 0
        self._overflows = False
        self._reader: asyncio.Future[None] | None = None
        self._failure: GatewayError | None = None
        self._has_begun = False
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes of the client that nothing has read."""
        return len(self._unread)

    def start_timer(self) -> None:
        """End the RPC at its deadline. Raises: InvalidInput."""
        timeout_s = self.request.timeout_s()
        if timeout_s is not None:
            self._deadline_s = self._loop.time() + timeout_s
            self._timer = self._loop.call_at(self._deadline_s, self._expire)

    def remaining_s(self) -> float | None:
        """Return the time until the deadline, None without one."""
        return None if self._deadline_s is None else self._deadline_s - self._loop.time()

    def receive(self, content: bytes | bytearray) -> None:
        """Take bytes of messages from the client."""
        if self.has_ended or self._overflows:
            self.link.credit(len(content))
            return
        if self.is_open and len(self._unread) + len(content) > OPEN_BUFFER_BYTES_MAX:
            self._overflows = True
            taken = max(OPEN_BUFFER_BYTES_MAX - len(self._unread), 0)
            self.link.credit(len(content) - taken)
            content = content[:taken]
        self._unread += content
        self._wake()

    def receive_end(self) -> None:
        """Note that the client sends no more."""
        self.end_sending()
        self._wake()

    def fail_reading(self, failure: GatewayError) -> None:
        """Raise an error where the next message is read."""
        self._failure = failure
        self._wake()

    def run(self, answering: Coroutine[Any, Any, None], *, is_open: bool = False) -> "asyncio.Task[None]":
        """Answer the RPC in a task, which ends with the stream. is_open: its method needs no key."""
        self.is_open = is_open
        self.task = asyncio.create_task(answering)
        return self.task

    async def read(self, bytes_max: int, grow: Callable[[int], None]) -> bytes | None:
        """Return the next message, None at the end of them.

        grow: called with the bytes of a large message that have arrived, until it is complete.
        Raises: BodyTooLarge, MalformedBody, CompressedMessage, and the errors of `grow` and `fail_reading`.
        """
        prefix = await self._take(PREFIX_BYTES, grow)
        if prefix is None:
            return None
        if prefix[0]:
            raise CompressedMessage("compressed messages are not read; send them without compression")
        size = int.from_bytes(prefix[1:], "big")
        if size > bytes_max:
            raise BodyTooLarge(f"the message is larger than {bytes_max} bytes")
        message = await self._take(size, grow) if size else b""
        if message is None:
            raise MalformedBody("the stream ends within a message")
        return message

    async def _take(self, size: int, grow: Callable[[int], None]) -> bytes | None:
        """Return so many bytes, None if the client sends no more and has sent none of them."""
        while len(self._unread) < size:
            if self._failure is not None:
                raise self._failure
            if self.client_has_ended or self._overflows:
                if not self._unread:
                    return None
                raise MalformedBody("the stream ends within a message")
            if size > PREFIX_BYTES:
                grow(len(self._unread))
            self._credit(len(self._unread))
            self._allow(size - len(self._unread))
            await self._more()
        if self._failure is not None:
            raise self._failure
        self._credit(size)
        self._credited -= size
        taken = bytes(memoryview(self._unread)[:size])
        del self._unread[:size]
        return taken

    async def _more(self) -> None:
        """Wait until the client has sent something."""
        self._reader = self._loop.create_future()
        await self._reader

    def _credit(self, size: int) -> None:
        """Let the client send more on the connection. size: of the unread bytes, those that are wanted."""
        if size > self._credited:
            self.link.credit(size - self._credited)
            self._credited = size

    def _allow(self, wanted: int) -> None:
        """Let the client send what is missing of a message, or the next messages."""
        target = max(STREAM_WINDOW_BYTES, min(wanted, LARGE_WINDOW_BYTES))
        if self.window <= target // 2:
            self.link.allow(self, target - self.window)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def discard_rest(self) -> None:
        """Read and drop what the client still sends."""
        while not self.client_has_ended:
            self._drop_unread()
            self._allow(0)
            await self._more()

    def _drop_unread(self) -> None:
        self._credit(len(self._unread))
        self._credited = 0
        self._unread.clear()

    def begin(self, metadata: Mapping[str, str]) -> None:
        """Send the initial metadata."""
        self._has_begun = True
        self.link.send_headers(self, REPLY_BLOCK + _encode(metadata.items()), ends=False)

    def takes(self, message: bytes) -> bool:
        """Return whether a message can be sent without waiting for the client."""
        return self.link.room_for(self) >= len(message) + PREFIX_BYTES

    def write_at_once(self, message: bytes) -> None:
        """Send a message for which there is room."""
        self.link.send_data(self, (_prefix(message), message), PREFIX_BYTES + len(message))

    async def write(self, message: bytes) -> None:
        """Send a message, in pieces if the client does not take it at once."""
        rest = memoryview(message)
        prefix = _prefix(message)
        self.written_bytes = 0
        while prefix or rest:
            room = self.link.room_for(self)
            if room <= 0:
                await self.link.wait_for_room(self)
                continue
            head, prefix = prefix[:room], prefix[room:]
            piece = rest[: room - len(head)]
            rest = rest[len(piece) :]
            self.link.send_data(self, (head, piece), len(head) + len(piece))
            self.written_bytes += len(piece)

    def end(self, status: int, details: str = "", metadata: Iterable[tuple[str, str]] = ()) -> None:
        """Send the status and the trailing metadata, unless that is done."""
        if self.has_ended:
            return
        fields = [("grpc-status", str(status))]
        if details:
            fields.append(("grpc-message", UNSAFE.sub(_percent, details.encode()).decode()))
        block = _encode([*fields, *metadata])
        self.link.send_headers(self, block if self._has_begun else REPLY_BLOCK + block, ends=True)
        self._close(NO_ERROR)

    def refuse_request(self) -> None:
        """Answer a request that is no RPC as HTTP does."""
        self.link.send_headers(self, NO_GRPC_BLOCK, ends=True)
        self._close(NO_ERROR)

    def reset(self, code: int) -> None:
        """End the RPC without a status, and cancel what answers it."""
        self._close(code)
        if self.task is not None:
            self.task.cancel()

    def _close(self, code: int) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._drop_unread()
        self.link.close_stream(self, code)

    def _expire(self) -> None:
        failure = DeadlineExceeded("the deadline of the call has passed")
        self.end(status_of(failure).value[0], failure.message)
        if self.task is not None:
            self.task.cancel()


def _prefix(message: bytes) -> bytes:
    """Return what precedes a message: it is not compressed, and its size."""
    return b"\0" + len(message).to_bytes(4, "big")


def _encode(metadata: Iterable[tuple[str, str]]) -> bytes:
    return encode_block(
        [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in metadata]
    )


def _percent(found: re.Match[bytes]) -> bytes:
    return b"%%%02X" % found[0][0]
