"""One HTTP/2 connection of a gRPC client: its streams, their windows, its bounds, and its turns among others.

Rule: until a key of the client is verified, a connection keeps at most 64 KB, whatever arrives, and a call
costs at most a millisecond. See docs/decisions/091-http2-is-bounded-before-the-key.md.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from gateway.api.grpc import frames
from gateway.api.grpc.call_stream import STREAM_WINDOW_BYTES, CallStream, NotGrpc, Request, read_request
from gateway.api.grpc.frames import (
    FIELDS_MAX,
    METADATA_BYTES_MAX,
    METADATA_REASON,
    VERIFIED_UNSENT_BYTES,
    ConnectionFault,
    Frame,
    FrameReader,
    FrameWriter,
    OversizedBlock,
    StreamFault,
)
from gateway.api.grpc.hpack import BlockBounds, BlockDecoder, BlockTooLarge, CompressionFault, Field
from gateway.api.server.client_tls import certificate_of
from gateway.api.server.connection_limit import NEW_S
from gateway.api.server.http_protocol import LingeringClose
from gateway.errors import BodyTooLarge, GatewayError
from gateway.tenants.client_certificate import ClientCertificate

UNVERIFIED_BOUNDS = BlockBounds(FIELDS_MAX, METADATA_BYTES_MAX, 8 * 1024)
VERIFIED_BOUNDS = BlockBounds(FIELDS_MAX, METADATA_BYTES_MAX, METADATA_BYTES_MAX)
# Bytes of all streams that are not read yet. Before a key it is HTTP/2's own default, which has no less.
UNVERIFIED_WINDOW_BYTES = frames.WINDOW_BYTES
VERIFIED_WINDOW_BYTES = 1024 * 1024
# Bytes that are taken from the socket at once.
UNVERIFIED_READ_BYTES = 8 * 1024
VERIFIED_READ_BYTES = 64 * 1024
# Bytes that are read before the client gets their window back.
CREDIT_BYTES = 16 * 1024
# Of a connection without a key. Its calls end at once, apart from a few that wait for a message.
UNVERIFIED_STREAMS_MAX = 8
# Calls that a connection begins before others have their turn.
UNVERIFIED_CALLS = 2
VERIFIED_CALLS = 32

HANDSHAKE_S = 10.0
IDLE_S = 60.0
# After the client was asked to leave.
LEAVE_S = 1.0
UNSENT_S = 60.0
# Of a connection that is ended, until its last bytes are given up.
LINGER_S = 3.0
PING_INTERVAL_S = 10.0
PING_STRIKES_MAX = 2
# Frames that carry nothing may be so many more than the calls and messages that they belong to.
PATIENCE = 1_000
GAIN_OF_CALL = 4
GAIN_OF_VERIFIED_CALL = 20
GAIN_OF_MESSAGE = 4
COST_OF_RESET = 25
COST_OF_SETTINGS = 10


class GrpcLinger(LingeringClose):
    """Close of a connection whose client may not have read the reason."""

    timeout_s = 1.0
    bytes_max = 1024 * 1024


class Shared:
    """Parts that all connections of one server share.

    begin: starts an RPC. refuse: ends one with an error. admit: returns whether a connection may stay.
    streams_max: of one connection with a key. buffer: read into, one connection at a time; bytes are copied
    before the next one reads.
    """

    def __init__(
        self,
        begin: Callable[[CallStream], None],
        refuse: Callable[[CallStream, GatewayError], None],
        admit: "Callable[[Http2Connection], bool]",
        streams_max: int,
    ) -> None:
        self.begin = begin
        self.refuse = refuse
        self.admit = admit
        self.streams_max = streams_max
        self.turns = Turns()
        self.connections: dict[Http2Connection, None] = {}
        self.buffer = memoryview(bytearray(VERIFIED_READ_BYTES))


class Patience:
    """Room for frames that carry nothing: pings, windows, resets, settings, and frames of unknown kinds."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._ping_s = -PING_INTERVAL_S
        self._strikes = 0

    def lose(self, cost: int = 1) -> None:
        """Count a frame that carries nothing. Raises: ConnectionFault after too many of them."""
        self._left -= cost
        if self._left < 0:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many frames without a message")

    def gain(self, gain: int) -> None:
        """Count a call or a message."""
        self._left = min(self._left + gain, PATIENCE)

    def forgive_pings(self) -> None:
        """Start counting pings again: something was sent, which a client may measure."""
        self._strikes = 0

    def count_ping(self, now_s: float) -> None:
        """Count a ping. Raises: ConnectionFault after several that come too early."""
        if now_s < self._ping_s + PING_INTERVAL_S:
            self._strikes += 1
            if self._strikes > PING_STRIKES_MAX:
                # The reason by which clients of gRPC choose a longer interval.
                raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too_many_pings")
        self._ping_s = now_s


class Http2Connection(asyncio.BufferedProtocol):
    """Server's end of one connection.

    verified: a key of the client is known. address, certificate: of the client. owner, for_probes: as in
    `connection_limit.Connection`.
    """

    for_probes = False

    def __init__(self, shared: Shared) -> None:
        self.verified = False
        self.address = "unknown"
        self.certificate: ClientCertificate | None = None
        self.owner = ""
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._linger: GrpcLinger | None = None
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._decoder = BlockDecoder()
        self._patience = Patience()
        # A header block that waits for its turn.
        self._held: Frame | None = None
        self._is_paused = False
        self._streams: dict[int, CallStream] = {}
        self._last_stream = 0
        # Bytes of DATA that the client may send, and bytes that are read, of which it does not know yet.
        self._window = UNVERIFIED_WINDOW_BYTES
        self._credit = 0
        self._is_leaving = False
        self._opened_s = self._idle_s = self._block_s = self._closed_s = self._loop.time()
        self._handlers: dict[int, Callable[[Frame], None]] = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PING: self._on_ping,
            frames.WINDOW_UPDATE: self._on_window,
        }

    @property
    def is_busy(self) -> bool:
        """True while RPCs are open."""
        return bool(self._streams)

    @property
    def open_calls(self) -> int:
        """Number of RPCs whose methods need no key."""
        return sum(stream.is_open for stream in self._streams.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the client, and for it, that this connection keeps in memory."""
        held = 0 if self._held is None else len(self._held.content)
        unread = sum(stream.unread_bytes for stream in self._streams.values())
        return self._reader.kept_bytes + held + unread + self._writer.kept_bytes

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, if there is room for it."""
        # uvloop's own class for TLS is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.address = str(peer[0]).removeprefix("::ffff:")
        self.certificate = certificate_of(transport)
        self.owner = f"address {self.address}"
        self._shared.connections[self] = None
        if not self._shared.admit(self):
            self.make_room()
            return
        self._writer.attach(self._transport)
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self._shared.streams_max,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            frames.MAX_HEADER_LIST_SIZE: METADATA_BYTES_MAX,
        }
        self._writer.send(frames.settings_frame(settings))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the room for what arrives next."""
        del sizehint
        return self._shared.buffer if self.verified else self._shared.buffer[:UNVERIFIED_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that have arrived."""
        if self._linger is not None:
            self._linger.drop(nbytes)
            return
        self._reader.feed(self._shared.buffer[:nbytes])
        if self._held is None:
            self._handle()

    def eof_received(self) -> bool:
        """Close the connection: clients of gRPC do not end only one direction."""
        return False

    def pause_writing(self) -> None:
        """Write no messages: the client reads too slowly."""
        self._writer.pause()
        self._pause_if_needed()

    def resume_writing(self) -> None:
        """Write messages again."""
        self._writer.resume()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is still answered."""
        del exc
        self._shared.connections.pop(self, None)
        self._transport = None
        self._writer.detach()
        if self._linger is not None:
            self._linger.cancel()
        for stream in list(self._streams.values()):
            stream.reset(frames.NO_ERROR)
        self._drop_unhandled()

    # Called by the server.

    def waiting_rank(self) -> tuple[int, float] | None:
        """Return the place in the order of making room, lowest first; None while a call is served."""
        if not self.verified:
            return (0, self._opened_s)
        return None if self._streams else (1, self._idle_s)

    def is_new(self) -> bool:
        """Return whether it has had no time yet to send a request."""
        return self._loop.time() < self._opened_s + NEW_S

    def make_room(self) -> None:
        """Close the connection at once."""
        self._shared.connections.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Ask the client to open its next RPCs elsewhere; those that are open go on."""
        if not self._is_leaving and self._linger is None:
            self._is_leaving = True
            self._writer.send(frames.goaway_frame(frames.NUMBER_MAX, frames.NO_ERROR))

    def close(self) -> None:
        """End the connection, and what is open on it."""
        self._end(ConnectionFault(frames.NO_ERROR, ""))

    def check(self, now_s: float) -> None:
        """Close a connection whose client lets it wait for too long."""
        if self._transport is None:
            return
        is_stuck = self._writer.is_blocked and now_s > self._writer.blocked_s + UNSENT_S
        is_silent = not self._reader.has_settings and now_s > self._opened_s + HANDSHAKE_S
        is_left = self._linger is not None and now_s > self._closed_s + LINGER_S
        if is_stuck or is_silent or is_left:
            self._transport.abort()
        elif self._reader.is_in_block and now_s > self._block_s + HANDSHAKE_S:
            self._end(ConnectionFault(frames.ENHANCE_YOUR_CALM, "the metadata takes too long"))
        elif not self._streams and now_s > self._idle_s + (LEAVE_S if self._is_leaving else IDLE_S):
            self.close()

    def resume(self) -> None:
        """Go on with what has arrived, in a later turn of the event loop."""
        if self._transport is not None and self._linger is None:
            self._handle()
            self._resume_reading()

    # Reading.

    def _handle(self) -> None:
        """Handle the frames that have arrived, as far as this turn allows."""
        was_in_block = self._reader.is_in_block
        try:
            self._handle_frames()
        except OversizedBlock as fault:
            self._refuse_block(fault.stream)
            self._end(fault)
        except ConnectionFault as fault:
            self._end(fault)
        except CompressionFault as fault:
            self._end(ConnectionFault(frames.COMPRESSION_ERROR, str(fault)))
        if self._reader.is_in_block and not was_in_block:
            self._block_s = self._loop.time()
        self._pause_if_needed()

    def _handle_frames(self) -> None:
        calls = 0
        while self._linger is None:
            frame, self._held = self._held or self._reader.next(), None
            if frame is None:
                return
            if frame.kind == frames.HEADERS:
                calls += 1
                if not self._may_begin(calls):
                    self._held = frame
                    self._shared.turns.wait(self, verified=self.verified)
                    return
            handler = self._handlers.get(frame.kind)
            if handler is None:
                self._patience.lose()
            else:
                handler(frame)

    def _may_begin(self, calls: int) -> bool:
        if self.verified:
            return calls <= VERIFIED_CALLS
        return calls <= UNVERIFIED_CALLS and self._shared.turns.take()

    def _on_data(self, frame: Frame) -> None:
        size = len(frame.content)
        self._check_known(frame.stream)
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "more data than the window allows")
        data = frames.unpadded(frame.content, frame.flags & frames.PADDED)
        self.credit(size - len(data))
        stream = self._streams.get(frame.stream)
        if stream is None or stream.client_has_ended or not data:
            self._patience.lose()
        if stream is None or stream.client_has_ended:
            self.credit(len(data))
            return
        stream.count_received(size)
        if stream.window < STREAM_WINDOW_BYTES - frames.WINDOW_BYTES:
            self.credit(len(data))
            stream.reset(frames.FLOW_CONTROL_ERROR)
            return
        stream.receive(data)
        if frame.flags & frames.END_STREAM:
            stream.receive_end()

    def _on_headers(self, frame: Frame) -> None:
        """Begin an RPC, or end a stream with trailers."""
        number, ends = frame.stream, bool(frame.flags & frames.END_STREAM)
        try:
            fields = self._decoder.decode(
                frame.content, VERIFIED_BOUNDS if self.verified else UNVERIFIED_BOUNDS
            )
        except BlockTooLarge:
            raise OversizedBlock(number, METADATA_REASON) from None
        if number <= self._last_stream:
            self._patience.lose()
            if ends and (stream := self._streams.get(number)) is not None:
                stream.receive_end()
            return
        if not number % 2:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "clients open streams of odd numbers")
        self._last_stream = number
        if len(self._streams) >= (self._shared.streams_max if self.verified else UNVERIFIED_STREAMS_MAX):
            # A client sends such a call again by itself.
            self._refuse_stream(number, frames.REFUSED_STREAM)
            return
        self._begin(number, fields, ends=ends)

    def _begin(self, number: int, fields: Sequence[Field], *, ends: bool) -> None:
        try:
            request = read_request(fields)
        except StreamFault as fault:
            self._refuse_stream(number, fault.code)
            return
        except NotGrpc:
            self._open(number, Request("", ()), ends=ends).refuse_request()
            return
        self._patience.gain(GAIN_OF_CALL)
        self._shared.begin(self._open(number, request, ends=ends))

    def _open(self, number: int, request: Request, *, ends: bool) -> CallStream:
        stream = CallStream(self, number, request, self._writer.first_window, client_has_ended=ends)
        self._streams[number] = stream
        return stream

    def _refuse_stream(self, number: int, code: int) -> None:
        self._patience.lose()
        self._writer.send(frames.reset_frame(number, code))

    def _refuse_block(self, number: int) -> None:
        """Answer a call whose metadata is over a bound.

        The rest of the block is not decoded, and the next ones could refer to it: the connection ends.
        """
        if number % 2 and number > self._last_stream:
            self._last_stream = number
            self._shared.refuse(
                self._open(number, Request("", ()), ends=False), BodyTooLarge(METADATA_REASON)
            )

    def _on_settings(self, frame: Frame) -> None:
        if frame.flags & frames.ACK:
            self._patience.lose()
            return
        self._patience.lose(COST_OF_SETTINGS)
        for name, value in frames.read_settings(frame.content):
            if name == frames.INITIAL_WINDOW_SIZE:
                self._writer.change_windows(value, self._streams)
        self._writer.send(frames.encode_frame(frames.SETTINGS, frames.ACK, 0))

    def _on_window(self, frame: Frame) -> None:
        self._patience.lose()
        self._check_known(frame.stream)
        size = frames.number_of(frame.content)
        if not frame.stream:
            self._writer.widen(size)
        elif (stream := self._streams.get(frame.stream)) and not self._writer.widen_stream(stream, size):
            stream.reset(frames.FLOW_CONTROL_ERROR)

    def _on_ping(self, frame: Frame) -> None:
        self._patience.lose()
        if not frame.flags & frames.ACK:
            self._patience.count_ping(self._loop.time())
            self._writer.send(frames.encode_frame(frames.PING, frames.ACK, 0, frame.content))

    def _on_reset(self, frame: Frame) -> None:
        self._check_known(frame.stream)
        stream = self._streams.get(frame.stream)
        self._patience.lose(COST_OF_RESET if stream else 1)
        if stream is not None:
            stream.end_sending()
            stream.reset(frames.NO_ERROR)

    def _check_known(self, number: int) -> None:
        if number > self._last_stream:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame for a stream that is not open")

    # Called by streams.

    def trust(self, tenant: str) -> None:
        """Raise the bounds: a key of the client is verified."""
        self.owner = tenant
        self._patience.gain(GAIN_OF_VERIFIED_CALL)
        if not self.verified:
            self.verified = True
            self._writer.trust()
            self.credit(VERIFIED_WINDOW_BYTES - UNVERIFIED_WINDOW_BYTES)

    def send_headers(self, stream: CallStream, block: bytes, *, ends: bool) -> None:
        """Send a header block. ends: it is the last of its stream."""
        self._patience.forgive_pings()
        self._writer.send(frames.headers_frames(stream.number, block, ends=ends))

    def send_data(self, stream: CallStream, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        """Send bytes of messages, for which there is room."""
        self._patience.forgive_pings()
        self._patience.gain(GAIN_OF_MESSAGE)
        self._writer.send_data(stream, pieces, size)

    def room_for(self, stream: CallStream) -> int:
        """Return the bytes of messages that may be sent in one frame now."""
        return self._writer.room_for(stream)

    async def wait_for_room(self, stream: CallStream) -> None:
        """Wait until there may be room for bytes of messages."""
        await self._writer.wait_for_room(stream)

    def allow(self, stream: CallStream, size: int) -> None:
        """Let the client send so many more bytes on a stream."""
        if not stream.client_has_ended:
            stream.count_received(-size)
            self._writer.send(frames.window_frame(stream.number, size))

    def credit(self, size: int) -> None:
        """Let the client send so many more bytes on the connection."""
        self._credit += size
        if self._credit >= CREDIT_BYTES:
            self._window += self._credit
            self._writer.send(frames.window_frame(0, self._credit))
            self._credit = 0

    def close_stream(self, stream: CallStream, code: int) -> None:
        """Forget a stream. code: sent to the client, unless both sides have ended it."""
        if self._streams.pop(stream.number, None) is None:
            return
        if not self._streams:
            self._idle_s = self._loop.time()
        if code != frames.NO_ERROR or not stream.client_has_ended:
            self._writer.send(frames.reset_frame(stream.number, code))

    # Bounds.

    def _pause_if_needed(self) -> None:
        """Read nothing while frames wait for a turn, or the client reads too little itself."""
        # A client with a key may send a large message before it reads a reply.
        most = 4 * VERIFIED_UNSENT_BYTES if self.verified else 0
        is_full = self._writer.is_blocked and self._writer.kept_bytes > most
        if (self._held or is_full) and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_paused and not self._held and not self._writer.is_blocked:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def _end(self, fault: ConnectionFault) -> None:
        """End the connection and what is open on it, with a reason that the client may read."""
        transport = self._transport
        if transport is None or self._linger is not None:
            return
        for stream in list(self._streams.values()):
            stream.reset(fault.code or frames.CANCEL)
        self._writer.send(frames.goaway_frame(self._last_stream, fault.code, fault.reason))
        self._writer.flush()
        self._drop_unhandled()
        self._closed_s = self._loop.time()
        self._linger = GrpcLinger(transport, self._loop)
        self._resume_reading()
        try:
            self._linger.start()
        except OSError:
            # The client has closed already.
            transport.abort()

    def _drop_unhandled(self) -> None:
        self._held = None
        self._reader = FrameReader()


# Calls of connections without a verified key that are begun in one turn of the event loop. Each takes up to a
# millisecond, and the calls of other connections wait for as long.
CALLS_IN_TURN = 8


class Waiter(Protocol):
    """Connection with calls that wait for a turn."""

    def resume(self) -> None:
        """Begin calls, as far as there are turns."""


class Turns:
    """Turns of one server. Needs a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = CALLS_IN_TURN
        self._verified: deque[Waiter] = deque()
        self._unverified: deque[Waiter] = deque()
        self._is_scheduled = False

    def take(self) -> bool:
        """Return whether a call without a verified key may begin in this turn."""
        self._schedule()
        if not self._left:
            return False
        self._left -= 1
        return True

    def wait(self, waiter: Waiter, *, verified: bool) -> None:
        """Resume a connection in a later turn, after those that wait already."""
        (self._verified if verified else self._unverified).append(waiter)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled, self._left = False, CALLS_IN_TURN
        for _ in range(len(self._verified)):
            self._verified.popleft().resume()
        for _ in range(len(self._unverified)):
            if not self._left:
                break
            self._unverified.popleft().resume()
        if self._verified or self._unverified:
            self._schedule()
