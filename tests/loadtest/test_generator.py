"""The generator counts exactly what happened, against servers that misbehave in known ways."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hdrh.histogram import HdrHistogram

from loadtest import corpora
from loadtest.client_connection import LOST, Reply, connect
from loadtest.corpora import CallFactory, CallShape
from loadtest.generator import CallSender, LoadTarget, closed_loop, is_correct, open_loop
from loadtest.recorder import SampleRecorder
from loadtest.stub import Stub, StubConnection
from loadtest.stub_protocol import StubSettings, parse_request, render
from loadtest.timer import Timer


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Stub, int]]:
    """Run a stub in this process and yield it with its port."""
    timer = Timer()
    running = Stub(StubSettings(dimensions=8), timer)
    server = await asyncio.get_running_loop().create_server(lambda: StubConnection(running), "127.0.0.1", 0)
    yield running, server.sockets[0].getsockname()[1]
    server.close()
    timer.close()


def sender_to(port: int, check_every: int = 1) -> CallSender:
    calls = CallFactory(corpora.texts("queries", 1))
    return CallSender(LoadTarget(port), calls, SampleRecorder({}), check_every)


async def test_closed_loop_counts_every_call(stub: tuple[Stub, int]) -> None:
    sample = await closed_loop(sender_to(stub[1]), callers=4, seconds=0.1, warmup_s=0.02)

    assert stub[0].stats.requests == sample.sent
    assert 0 < sample.calls <= sample.sent
    assert sample.failed == 0
    assert HdrHistogram.decode(sample.histogram).get_total_count() == sample.calls


async def test_open_loop_sends_each_call_of_its_schedule(stub: tuple[Stub, int]) -> None:
    arrivals_s = [n / 1000 for n in range(100)]

    sample = await open_loop(sender_to(stub[1]), arrivals_s, warmup_s=0.0)

    assert stub[0].stats.requests == sample.sent == 100
    assert sample.failed == 0


async def test_open_loop_counts_the_wait_of_a_late_call(stub: tuple[Stub, int]) -> None:
    # One at a time and 10 ms each: of eleven calls that arrive at once, the last waits for all the others.
    stub[0].settings = StubSettings(dimensions=8, base_ms=10, parallel=1)

    sample = await open_loop(sender_to(stub[1]), [0.01] * 11, warmup_s=0.0)

    assert sample.max_ms >= 110
    assert sample.calls == 11


async def test_failures_are_counted_by_status(stub: tuple[Stub, int]) -> None:
    stub[0].settings = StubSettings(dimensions=8, error_share=0.5)

    sample = await open_loop(sender_to(stub[1]), [i / 1000 for i in range(100)], warmup_s=0.0)

    assert sample.statuses["500"] > 0
    assert sample.failed == sum(count for status, count in sample.statuses.items() if status != "200")


def test_reply_with_the_vector_of_another_text_is_wrong() -> None:
    settings = StubSettings(dimensions=8)
    call = CallFactory(corpora.texts("queries", 1), CallShape(2)).next(b"%d\n")
    body = render(parse_request("/v1/embeddings", call.request.partition(b"\n")[2], settings), settings)

    assert is_correct(body, call.inputs)
    assert not is_correct(body, call.inputs[::-1])
    assert not is_correct(body, call.inputs[:1])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Reply(200, 5, b"hello")),
        (b"HTTP/1.1 204 X\r\ncontent-length: 0\r\n\r\n", Reply(204, 0, b"")),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
            Reply(200, 20, b"hello"),
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel", LOST),
    ],
    ids=["length", "nothing", "chunks", "cut off"],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000], ids=["byte by byte", "at once"])
async def test_replies_are_read_in_any_pieces(raw: bytes, expected: Reply, piece_bytes: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        for at in range(0, len(raw), piece_bytes):
            writer.write(raw[at : at + piece_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    received: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    connection = await connect(
        "127.0.0.1", server.sockets[0].getsockname()[1], lambda _, reply: received.set_result(reply)
    )

    connection.send(b"GET / HTTP/1.1\r\n\r\n", wants_body=True)

    assert await asyncio.wait_for(received, 5) == expected
    connection.close()
    server.close()
