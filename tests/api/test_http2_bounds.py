"""Frames of hostile and of slow clients on the gRPC listener: ends of calls and connections, bytes kept."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc import answers, frames
from gateway.api.grpc import connection as connections
from gateway.api.grpc.connection import Http2Connection
from gateway.api.grpc.frames import Frame, FrameReader, encode_frame
from gateway.api.grpc.hpack import BlockBounds, BlockDecoder, encode_block
from gateway.tenants.keyring import key_digest
from tests.api.test_grpc import (
    AUTHORIZED,
    GRPC,
    Client,
    Code,
    grpc_gateway,
    held_gateway,
    limited,
    status_of,
)
from tests.conftest import KEY
from tests.fakes.hooks import until
from tests.waiting import PATIENCE_S

EMBED, HEALTH = "/tei.v1.Embed/Embed", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
KEPT_BYTES_MAX = 64 * 1024
BOUNDS = BlockBounds(10_000, 10_000_000, 10_000_000)
KEYED = {"authorization": f"Bearer {KEY}"}
CALM = frames.ENHANCE_YOUR_CALM
# A reference to the last entry of the table, as one byte.
LAST_ENTRY = b"\xbe"


def head(path: str = EMBED, **metadata: str) -> bytes:
    """Return the header block of an RPC."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"}
    return encode_block([(name.encode(), value.encode()) for name, value in (fields | metadata).items()])


def call(stream: int, block: bytes, *messages: bytes, ends: bool = True) -> bytes:
    """Return the frames of an RPC."""
    data = b"".join([struct.pack(">BI", 0, len(message)) + message for message in messages])
    found = frames.headers_frames(stream, block, ends=ends and not messages)
    if messages:
        found += encode_frame(frames.DATA, frames.END_STREAM if ends else 0, stream, data)
    return found


def text(content: str = "a b") -> bytes:
    """Return a message with a text."""
    return pb.EmbedRequest(inputs=content).SerializeToString()


class Peer:
    """Client that writes frames.

    connection: the server's end. kept_max: the most bytes that it has kept. is_closed: by the server.
    """

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = streams
        self._frames = FrameReader()
        self._decoder = BlockDecoder()
        self.received: list[Frame] = []
        self.is_closed = False
        self.kept_max = 0
        self.connection: Http2Connection
        # The reader expects a client's preface.
        self._frames.feed(memoryview(frames.PREFACE))

    def send(self, content: bytes) -> None:
        """Send bytes."""
        self._writer.write(content)

    async def flood(self, pieces: Callable[[int], bytes], count: int) -> None:
        """Send pieces as long as the server takes them, and note what it keeps."""
        for number in range(count):
            if self.is_closed:
                return
            try:
                self.send(pieces(number))
                async with asyncio.timeout(0.2):
                    await self._writer.drain()
            except (TimeoutError, ConnectionError):
                pass
            for _ in range(4):
                await asyncio.sleep(0)
                self.kept_max = max(self.kept_max, self.connection.kept_bytes)

    async def read(self) -> None:
        """Note all frames of the server until it closes the connection."""
        try:
            while data := await self._reader.read(65536):
                self._frames.feed(memoryview(data))
                while (frame := self._frames.next()) is not None:
                    self.received.append(frame)
        except ConnectionError:
            pass
        self.is_closed = True

    def of(self, kind: int, stream: int | None = None) -> list[Frame]:
        """Return the frames of a kind that came."""
        return [frame for frame in self.received if frame.kind == kind and stream in (None, frame.stream)]

    def fields(self, stream: int) -> list[tuple[bytes, bytes]]:
        """Return the metadata of a stream. Blocks of the server do not depend on each other."""
        blocks = [frame.content for frame in self.of(frames.HEADERS, stream)]
        return [field for block in blocks for field in self._decoder.decode(block, BOUNDS)]

    def status(self, stream: int) -> int | None:
        """Return the status of an RPC, None before it has one."""
        found = dict(self.fields(stream)).get(b"grpc-status")
        return None if found is None else int(found)

    def resets(self) -> dict[int, int]:
        """Return the code of each stream that the server has reset."""
        return {frame.stream: frames.number_of(frame.content) for frame in self.of(frames.RST_STREAM)}

    def goodbye(self) -> tuple[int, str]:
        """Return the code and the reason of the end of the connection."""
        content = self.of(frames.GOAWAY)[-1].content
        return frames.number_of(content[4:]), content[8:].decode()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@asynccontextmanager
async def peer_of(
    client: Client, settings: dict[int, int] | None = None, opening: bytes | None = None
) -> AsyncIterator[Peer]:
    """Connect to the listener. opening: instead of the preface and settings."""
    before = set(client.server.connections)
    host, port = client.address.split(":")
    peer = Peer(await asyncio.open_connection(host, int(port)))
    await until(lambda: bool(set(client.server.connections) - before))
    (peer.connection,) = set(client.server.connections) - before
    peer.send(frames.PREFACE + frames.settings_frame(settings or {}) if opening is None else opening)
    reading = asyncio.create_task(peer.read())
    try:
        yield peer
    finally:
        peer.close()
        await reading


def blocks_of(content: bytes, stream: int = 1) -> bytes:
    """Return a header block in full frames."""
    return frames.headers_frames(stream, content, ends=True)


# A field of 14,744 letters, of five bits each.
CODED = b"\0\x01x\xff\x80\x47" + b"\x18\xc6\x31\x8c\x63" * 1_843
REFERENCES = head() + b"\x40\x01a\x46" + b"b" * 70


@pytest.mark.parametrize(
    "block",
    [
        REFERENCES + LAST_ENTRY * (8 * 16_384),
        REFERENCES + LAST_ENTRY * 1_000,
        head(**{f"k{number}": "v" * 4000 for number in range(54)}),
        head(**{f"k{number}": "v" for number in range(200)}),
        head() + CODED,
    ],
    ids=["references in nine frames", "references in one", "216 KB", "200 fields", "9 KB of Huffman's code"],
)
async def test_metadata_over_the_bounds_ends_its_call_and_the_connection(block: bytes) -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        await peer.flood(lambda at: blocks_of(block)[at * 8192 : (at + 1) * 8192], len(block) // 8192 + 2)
        await until(lambda: peer.is_closed)
        await until(lambda: bool(client.finished()))

    fields = dict(peer.fields(1))
    assert int(fields[b"grpc-status"]) == Code.RESOURCE_EXHAUSTED.value[0]
    assert fields[b"grpc-message"].startswith(b"the metadata is larger than 32768 bytes or 128 fields")
    assert CALM == peer.goodbye()[0]
    assert peer.kept_max <= KEPT_BYTES_MAX
    assert ["body_too_large"] == [event.outcome for event in client.finished()]


async def test_metadata_within_the_bounds_is_read() -> None:
    large = {f"k{number}": "v" * 2000 for number in range(14)}
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(call(1, head(**large)) + call(3, head(**large, **KEYED), text()))
        await until(lambda: peer.status(3) is not None)
        assert (16, 0) == (peer.status(1), peer.status(3))
        assert not peer.is_closed


async def test_a_key_does_not_lift_the_bounds_of_metadata() -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(call(1, head(**KEYED), text()))
        await until(lambda: peer.status(1) == 0)
        # More of Huffman's code than before a key, which is no more than 32 KiB.
        peer.send(call(3, head(**KEYED) + CODED, text()))
        await until(lambda: peer.status(3) == 0)
        peer.send(call(5, head(**KEYED, **{f"k{number}": "v" for number in range(200)}), text()))
        await until(lambda: peer.is_closed)
    assert Code.RESOURCE_EXHAUSTED.value[0] == peer.status(5)
    assert CALM == peer.goodbye()[0]


@pytest.mark.parametrize("size", [0, 1, 16_000])
async def test_an_endless_header_block_ends_the_connection(size: int) -> None:
    def piece(number: int) -> bytes:
        if number:
            return encode_frame(frames.CONTINUATION, 0, 1, b"x" * size) * 4
        return encode_frame(frames.HEADERS, 0, 1, head())

    async with grpc_gateway() as client, peer_of(client) as peer:
        await peer.flood(piece, 1000)
        await until(lambda: peer.is_closed)
    assert CALM == peer.goodbye()[0]
    assert peer.kept_max <= KEPT_BYTES_MAX


@pytest.mark.parametrize("path", [HEALTH, REFLECTION])
async def test_large_messages_without_a_key_are_refused_at_their_beginning(path: str) -> None:
    large = b"\x0a\x80\x80\xc0\x0f" + b"x" * (31 * 1024 * 1024)
    async with grpc_gateway() as client:
        calls = [client.channel.stream_stream(path)(iter([large]), timeout=PATIENCE_S) for _ in range(4)]
        codes = [await rpc.code() for rpc in calls]
        details = {await rpc.details() for rpc in calls}
        (connection,) = client.server.connections
        assert connection.kept_bytes <= KEPT_BYTES_MAX
        # Of each message, only what the windows allow has left the client.
        assert await status_of(client.call(EMBED, text())) == (Code.OK, "")
        assert 0 == client.gateway.application.in_flight.bytes
    assert [Code.RESOURCE_EXHAUSTED] * 4 == codes
    assert {"the message is larger than 1024 bytes"} == details


async def test_data_beyond_the_window_ends_its_stream() -> None:
    async with held_gateway() as (client, gate), peer_of(client) as peer:
        peer.send(call(1, head(**KEYED), text(), ends=False))
        await until(lambda: gate.waiting > 0)
        # Nothing reads a second message of a unary RPC.
        await peer.flood(lambda _: encode_frame(frames.DATA, 0, 1, b"x" * 16_000), 20)
        await until(lambda: 1 in peer.resets())
        await until(lambda: client.gateway.application.in_flight.calls == 0)
        gate.opened.set()
        peer.send(call(3, head(**KEYED), text()))
        await until(lambda: peer.status(3) == 0)
    assert frames.FLOW_CONTROL_ERROR == peer.resets()[1]
    assert 32_000 < peer.kept_max <= KEPT_BYTES_MAX


async def test_data_of_refused_calls_is_dropped_and_its_window_given_back() -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        for number in range(1, 41, 2):
            peer.send(call(number, head(), b"x" * 12_000))
            await until(lambda number=number: peer.status(number) is not None)
            peer.kept_max = max(peer.kept_max, peer.connection.kept_bytes)
        assert not peer.is_closed
    assert {16} == {peer.status(number) for number in range(1, 41, 2)}
    credited = sum(frames.number_of(frame.content) for frame in peer.of(frames.WINDOW_UPDATE, 0))
    assert credited > 200_000
    assert peer.kept_max < KEPT_BYTES_MAX


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (encode_frame(frames.PING, 0, 0, b"12345678"), "too_many_pings"),
        (frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1}), "too many frames without a message"),
        (encode_frame(frames.PRIORITY, 0, 1, b"12345"), "too many frames without a message"),
        (encode_frame(0x77, 0, 0, b"12345"), "too many frames without a message"),
        (frames.window_frame(0, 1), "too many frames without a message"),
    ],
    ids=["pings", "settings", "priorities", "unknown", "windows"],
)
async def test_frames_that_carry_nothing_end_the_connection(piece: bytes, reason: str) -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        await peer.flood(lambda _: piece * 50, 100)
        await until(lambda: peer.is_closed)
    assert (CALM, reason) == peer.goodbye()
    assert peer.kept_max <= KEPT_BYTES_MAX


@pytest.mark.parametrize("path", [HEALTH, EMBED])
async def test_calls_that_are_reset_at_once_end_the_connection(path: str) -> None:
    metadata = KEYED if path == EMBED else {}

    def piece(at: int) -> bytes:
        number = 2 * at + 1
        return call(number, head(path, **metadata), ends=False) + frames.reset_frame(number, frames.CANCEL)

    async with grpc_gateway() as client, peer_of(client) as peer:
        await peer.flood(piece, 3000)
        await until(lambda: peer.is_closed)
        in_flight = client.gateway.application.in_flight
        await until(lambda: in_flight.calls == 0)
        finished = client.finished()
    assert (CALM, "too many frames without a message") == peer.goodbye()
    assert len(peer.of(frames.HEADERS)) < 3000
    assert {"cancelled"} == {event.outcome for event in finished}


async def test_replies_that_the_client_does_not_take_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "OPEN_WAIT_S", 0.3)
    question = b"\x3a\x00"
    async with grpc_gateway() as client, peer_of(client, {frames.INITIAL_WINDOW_SIZE: 0}) as peer:
        numbers = range(1, 41, 2)
        peer.send(b"".join([call(number, head(REFLECTION), question, ends=False) for number in numbers]))
        await until(lambda: peer.connection.open_calls == answers.OPEN_RPCS_OF_ONE_MAX)
        await until(lambda: all(peer.status(number) is not None for number in numbers))
        statuses = [peer.status(number) for number in numbers]
    assert statuses.count(4) == answers.OPEN_RPCS_OF_ONE_MAX
    assert set(statuses) == {4, 8}
    assert not peer.of(frames.DATA)


async def test_a_client_that_reads_nothing_is_not_read_either() -> None:
    block, received = head(), 0
    async with grpc_gateway() as client:
        before = set(client.server.connections)
        host, port = client.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        await until(lambda: bool(set(client.server.connections) - before))
        (connection,) = set(client.server.connections) - before
        writer.write(frames.PREFACE + frames.settings_frame({}))
        kept = 0
        for number in range(1, 200_001, 2):
            writer.write(call(number, block))
            if number % 1001 == 0:
                try:
                    async with asyncio.timeout(0.3):
                        await writer.drain()
                except TimeoutError:
                    break
                received = len(client.finished())
                kept = max(kept, connection.kept_bytes)
        else:
            pytest.fail("all calls were read")
        assert received < 100_000
        assert kept <= KEPT_BYTES_MAX
        writer.transport.abort()


async def test_slow_and_silent_clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    async with (
        grpc_gateway() as client,
        peer_of(client, opening=b"PRI") as silent,
        peer_of(client) as slow,
        peer_of(client) as well,
    ):
        slow.send(encode_frame(frames.HEADERS, 0, 1, head()))
        await until(lambda: silent.is_closed and slow.is_closed)
        well.send(call(1, head(**KEYED), text()))
        await until(lambda: well.status(1) == 0)
    assert (CALM, "the metadata takes too long") == slow.goodbye()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(call(1, head(**KEYED), text()))
        await until(lambda: peer.is_closed)
    assert 0 == peer.status(1)
    assert frames.NO_ERROR == peer.goodbye()[0]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", frames.PROTOCOL_ERROR),
        (frames.PREFACE + encode_frame(frames.PING, 0, 0, b"12345678"), frames.PROTOCOL_ERROR),
        (encode_frame(frames.DATA, 0, 0, b""), frames.PROTOCOL_ERROR),
        (encode_frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL_ERROR),
        (encode_frame(frames.HEADERS, frames.END_HEADERS, 2, head()), frames.PROTOCOL_ERROR),
        (encode_frame(frames.PUSH_PROMISE, 0, 1, b"1234"), frames.PROTOCOL_ERROR),
        (encode_frame(frames.CONTINUATION, 0, 1, b""), frames.PROTOCOL_ERROR),
        (encode_frame(frames.HEADERS, 0, 1, head()) + frames.window_frame(0, 1), frames.PROTOCOL_ERROR),
        (frames.reset_frame(1, 0), frames.PROTOCOL_ERROR),
        (frames.window_frame(0, 0), frames.FLOW_CONTROL_ERROR),
        (frames.window_frame(0, 2**31 - 1), frames.FLOW_CONTROL_ERROR),
        (frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31}), frames.FLOW_CONTROL_ERROR),
        (encode_frame(frames.SETTINGS, 0, 0, b"12345"), frames.FRAME_SIZE_ERROR),
        (encode_frame(frames.PING, 0, 0, b"1"), frames.FRAME_SIZE_ERROR),
        (encode_frame(frames.DATA, 0, 1, b"x" * 16_385), frames.FRAME_SIZE_ERROR),
        (encode_frame(frames.HEADERS, 0xC, 1, b"\xff"), frames.PROTOCOL_ERROR),
        (encode_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x80"), frames.COMPRESSION_ERROR),
        (encode_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x7f\xff\xff\xff\xff\xff"), 9),
        (encode_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\0\x05a"), frames.COMPRESSION_ERROR),
        (encode_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20" * 1000), frames.COMPRESSION_ERROR),
    ],
)
async def test_frames_that_no_client_sends_end_the_connection(content: bytes, code: int) -> None:
    is_opening = content[:3] in (b"GET", b"PRI")
    async with grpc_gateway() as client:
        async with peer_of(client, opening=content if is_opening else None) as peer:
            if not is_opening:
                peer.send(content)
            await until(lambda: peer.is_closed)
        assert code == peer.goodbye()[0]
        assert Code.OK == await client.call(EMBED, text()).code()


@pytest.mark.parametrize(
    "block",
    [
        head(Upper="a"),
        head(a="b\nc"),
        head(connection="close"),
        encode_block(((b":method", b"POST"),)),
        head() + encode_block(((b":path", b"/again"),)),
    ],
)
async def test_malformed_requests_end_their_stream_only(block: bytes) -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(call(1, block) + call(3, head(**KEYED), text()))
        await until(lambda: peer.status(3) == 0)
        assert {1: frames.PROTOCOL_ERROR} == peer.resets()


@pytest.mark.parametrize("kind", [b"text/json", b"application/grpc-web+proto", b""])
async def test_requests_of_other_kinds_get_415(kind: bytes) -> None:
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"content-type", kind))
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(call(1, encode_block(fields)))
        await until(lambda: bool(peer.fields(1)))
    assert [(b":status", b"415")] == peer.fields(1)


async def test_replies_obey_the_clients_windows() -> None:
    settings = {frames.INITIAL_WINDOW_SIZE: 10}
    async with grpc_gateway() as client, peer_of(client, settings) as peer:
        peer.send(call(1, head(**KEYED), text()))

        def received() -> int:
            return sum(len(frame.content) for frame in peer.of(frames.DATA, 1))

        await until(lambda: received() == 10)
        peer.send(frames.window_frame(1, 5))
        await until(lambda: received() == 15)
        assert peer.status(1) is None
        assert client.gateway.application.in_flight.bytes > 0
        peer.send(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 100_000}))
        await until(lambda: peer.status(1) == 0)
        assert 0 == client.gateway.application.in_flight.bytes
    whole = b"".join([frame.content for frame in peer.of(frames.DATA, 1)])
    assert len(whole) == 5 + int.from_bytes(whole[1:5], "big")
    assert 8 == len(pb.EmbedResponse.FromString(whole[5:]).embeddings)


async def test_a_passed_deadline_is_answered() -> None:
    async with held_gateway() as (client, gate), peer_of(client) as peer:
        peer.send(call(1, head(**KEYED, **{"grpc-timeout": "100m"}), text()))
        peer.send(call(3, head(**KEYED, **{"grpc-timeout": "soon"}), text()))
        await until(lambda: peer.status(1) is not None and peer.status(3) is not None)
        gate.opened.set()
        await until(lambda: client.gateway.application.in_flight.calls == 0)
    assert (4, 3) == (peer.status(1), peer.status(3))


async def test_compressed_messages_are_unimplemented() -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        peer.send(frames.headers_frames(1, head(**KEYED, **{"grpc-encoding": "gzip"}), ends=False))
        peer.send(encode_frame(frames.DATA, frames.END_STREAM, 1, struct.pack(">BI", 1, 3) + b"abc"))
        await until(lambda: peer.status(1) is not None)
    assert Code.UNIMPLEMENTED.value[0] == peer.status(1)
    assert (b"grpc-accept-encoding", b"identity") in peer.fields(1)


TWO_TENANTS = f"tenants: {{a: {{keys: ['{key_digest('sk-a')}']}}, b: {{keys: ['{key_digest('sk-b')}']}}}}\n"


async def test_rpcs_of_one_tenant_leave_room_for_others() -> None:
    config = GRPC + "limits: {connections: 8}\n" + TWO_TENANTS
    first, second = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    async with held_gateway(config) as (client, gate), peer_of(client) as peer, peer_of(client) as other:
        peer.send(b"".join([call(number, head(**first), text()) for number in range(1, 17, 2)]))
        await until(lambda: peer.status(15) is not None and gate.waiting > 0)
        # Six of eight are three times as many as the two that stay free.
        assert [None] * 6 + [8] * 2 == [peer.status(number) for number in range(1, 17, 2)]
        other.send(call(1, head(**second), text()) + call(3, head(**second), text()))
        await until(lambda: other.status(3) is not None)
        assert (None, 8) == (other.status(1), other.status(3))
        gate.opened.set()
        await until(lambda: [peer.status(number) for number in (1, 3, 5, 7, 9, 11)] == [0] * 6)
        await until(lambda: other.status(1) == 0)
        peer.send(call(17, head(**first), text()))
        await until(lambda: peer.status(17) == 0)


async def test_streams_of_one_connection_are_bounded() -> None:
    config = GRPC + "limits: {connections: 3}\n"
    async with held_gateway(config) as (client, gate), peer_of(client) as peer:
        peer.send(b"".join([call(number, head(**KEYED), text()) for number in (1, 3)]))
        peer.send(call(5, head(REFLECTION), ends=False) + call(7, head(**KEYED), text()))
        await until(lambda: 7 in peer.resets() and gate.waiting > 0)
        # A client sends such a call again by itself.
        assert {7: frames.REFUSED_STREAM} == peer.resets()
        gate.opened.set()
        await until(lambda: [peer.status(number) for number in (1, 3)] == [0] * 2)


async def test_a_message_counts_while_it_arrives() -> None:
    config = limited("requests_per_hour: 100") + "limits: {body_bytes: 1000000, in_flight_bytes: 2000000}\n"
    async with grpc_gateway(config) as client, peer_of(client) as peer:
        in_flight = client.gateway.application.in_flight
        peer.send(frames.headers_frames(1, head(**KEYED), ends=False))
        peer.send(encode_frame(frames.DATA, 0, 1, struct.pack(">BI", 0, 900_000)))
        await until(lambda: bool(peer.of(frames.WINDOW_UPDATE, 1)))
        for _ in range(20):
            peer.send(encode_frame(frames.DATA, 0, 1, b"x" * 16_000))
        await until(lambda: in_flight.bytes > 300_000)
        assert len(in_flight.receiving) == 1
        peer.send(frames.reset_frame(1, frames.CANCEL))
        await until(lambda: in_flight.bytes == 0 and not in_flight.receiving)
        peer.send(call(3, head(**KEYED), text()))
        await until(lambda: peer.status(3) == 0)


async def test_an_evicted_message_ends_its_call() -> None:
    async with grpc_gateway() as client, peer_of(client) as peer:
        in_flight = client.gateway.application.in_flight
        peer.send(frames.headers_frames(1, head(**KEYED), ends=False))
        peer.send(encode_frame(frames.DATA, 0, 1, struct.pack(">BI", 0, 900_000)))
        await until(lambda: bool(peer.of(frames.WINDOW_UPDATE, 1)))
        for _ in range(10):
            peer.send(encode_frame(frames.DATA, 0, 1, b"x" * 16_000))
        await until(lambda: in_flight.bytes > 100_000)
        (body,) = in_flight.receiving
        in_flight.receiving.remove(body)
        body.release()
        body.evict()
        await until(lambda: peer.status(1) is not None)
        assert 0 == in_flight.bytes
    assert Code.RESOURCE_EXHAUSTED.value[0] == peer.status(1)


async def test_a_stopping_gateway_says_goodbye_and_finishes() -> None:
    async with held_gateway() as (client, gate), peer_of(client) as peer:
        peer.send(call(1, head(**KEYED), text()))
        await until(lambda: gate.waiting > 0)
        await client.gateway.application.in_flight.drain(0)
        await until(lambda: bool(peer.of(frames.GOAWAY)))
        assert frames.NUMBER_MAX == frames.number_of(peer.of(frames.GOAWAY)[0].content)
        peer.send(call(3, head(**KEYED), text()))
        await until(lambda: peer.status(3) == Code.UNAVAILABLE.value[0])
        gate.opened.set()
        await until(lambda: peer.status(1) == 0)
        await until(lambda: peer.is_closed)
    assert frames.NO_ERROR == peer.goodbye()[0]


async def test_a_client_that_leaves_ends_its_calls() -> None:
    async with held_gateway() as (client, gate):
        async with peer_of(client) as peer:
            peer.send(call(1, head(**KEYED), text()) + call(3, head(REFLECTION), ends=False))
            await until(lambda: gate.waiting > 0)
        await until(lambda: client.gateway.application.in_flight.calls == 0)
        await until(lambda: len(client.finished()) == 2)
        gate.opened.set()
        assert [] == [found for found in client.server.connections if found.is_busy]
    assert {"cancelled"} == {event.outcome for event in client.finished()}


async def test_large_messages_pass_in_both_directions() -> None:
    config = GRPC + "limits: {body_bytes: 4000000}\n"
    texts = ["word " * 20_000] * 8
    request = pb.RerankRequest(query="q", texts=texts, return_text=True, truncate=True)
    options = (("grpc.max_receive_message_length", -1),)
    async with grpc_gateway(config) as client:
        async with grpc.aio.insecure_channel(client.address, options=options) as channel:
            rank = channel.unary_unary("/tei.v1.Rerank/Rerank")
            replies = await asyncio.gather(
                *[
                    rank(request.SerializeToString(), metadata=AUTHORIZED, timeout=PATIENCE_S)
                    for _ in range(4)
                ]
            )
        assert 0 == client.gateway.application.in_flight.bytes
    for reply in replies:
        assert texts == [found.text for found in pb.RerankResponse.FromString(reply).ranks]
