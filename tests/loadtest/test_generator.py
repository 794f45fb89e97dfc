"""The generator counts what happened, no more and no less, against servers that misbehave in known ways."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hdrh.histogram import HdrHistogram

from loadtest import corpora
from loadtest.compare import Round, summary
from loadtest.connection import LOST, Answer, connect
from loadtest.corpora import Calls
from loadtest.generator import Load, Recorder, Sample, Target, closed_loop, is_right, open_loop
from loadtest.stub import Connection, Stub
from loadtest.stub_wire import Settings, render, understand
from loadtest.timer import Timer


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Stub, int]]:
    """A stub in this process, and its port."""
    timer = Timer()
    made = Stub(Settings(dimensions=8), timer)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(made), "127.0.0.1", 0)
    yield made, server.sockets[0].getsockname()[1]
    server.close()
    timer.close()


def load_on(port: int, check_every: int = 1) -> Load:
    return Load(Target(port), Calls(corpora.texts("queries", 1)), Recorder({}), check_every)


async def test_a_closed_loop_counts_every_call(stub: tuple[Stub, int]) -> None:
    sample = await closed_loop(load_on(stub[1]), callers=4, seconds=0.1, warmup_s=0.02)

    assert stub[0].stats.requests == sample.sent
    assert 0 < sample.calls <= sample.sent
    assert sample.failed == 0
    assert HdrHistogram.decode(sample.histogram).get_total_count() == sample.calls


async def test_an_open_loop_sends_each_call_of_its_schedule(stub: tuple[Stub, int]) -> None:
    moments_s = [n / 1000 for n in range(100)]

    sample = await open_loop(load_on(stub[1]), moments_s, warmup_s=0.0)

    assert stub[0].stats.requests == sample.sent == 100
    assert sample.failed == 0


async def test_an_open_loop_keeps_the_clock_of_a_call_that_waits(stub: tuple[Stub, int]) -> None:
    # One at a time and 10 ms each: of eleven that come at once, the last waits for all others.
    stub[0].settings = Settings(dimensions=8, base_ms=10, parallel=1)

    sample = await open_loop(load_on(stub[1]), [0.01] * 11, warmup_s=0.0)

    assert sample.most_ms >= 110
    assert sample.calls == 11


async def test_failures_and_wrong_vectors_are_told(stub: tuple[Stub, int]) -> None:
    stub[0].settings = Settings(dimensions=8, error_share=0.5)

    sample = await open_loop(load_on(stub[1]), [i / 1000 for i in range(100)], warmup_s=0.0)

    assert sample.statuses["500"] > 0
    assert sample.failed == sum(count for status, count in sample.statuses.items() if status != "200")


def test_a_reply_with_another_texts_vector_is_wrong() -> None:
    settings = Settings(dimensions=8)
    call = Calls(corpora.texts("queries", 1), inputs=2).next(b"%d\n")
    body = render(understand("/v1/embeddings", call.request.partition(b"\n")[2], settings), settings)

    assert is_right(body, call.inputs)
    assert not is_right(body, call.inputs[::-1])
    assert not is_right(body, call.inputs[:1])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Answer(200, 5, b"hello")),
        (b"HTTP/1.1 204 X\r\ncontent-length: 0\r\n\r\n", Answer(204, 0, b"")),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
            Answer(200, 20, b"hello"),
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel", LOST),
    ],
    ids=["length", "nothing", "chunks", "cut off"],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000], ids=["byte by byte", "at once"])
async def test_answers_are_read_in_whatever_pieces_they_come(
    raw: bytes, expected: Answer, piece_bytes: int
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        for at in range(0, len(raw), piece_bytes):
            writer.write(raw[at : at + piece_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    got: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    connection = await connect(
        "127.0.0.1", server.sockets[0].getsockname()[1], lambda _, answer: got.set_result(answer)
    )

    connection.send(b"GET / HTTP/1.1\r\n\r\n", keep=True)

    assert await asyncio.wait_for(got, 5) == expected
    connection.close()
    server.close()


def test_the_summary_takes_medians_and_subtracts_the_direct_calls_of_the_same_repeat() -> None:
    rounds = [
        Round(name, repeat, "callers", load, sample(per_s, p50_ms, {name: 0.5}))
        for name, repeat, load, per_s, p50_ms in [
            ("direct", 0, 32, 900.0, 1.0),
            ("direct", 1, 32, 1100.0, 1.0),
            ("direct", 0, 1, 100.0, 0.1),
            ("direct", 1, 1, 100.0, 0.3),
            ("gateway", 0, 32, 400.0, 9.0),
            ("gateway", 1, 32, 600.0, 9.0),
            ("gateway", 0, 1, 100.0, 0.6),
            ("gateway", 1, 1, 100.0, 0.7),
        ]
    ]

    direct, gateway = summary(rounds)

    assert (gateway.per_s.least, gateway.per_s.median, gateway.per_s.most) == (400, 500, 600)
    assert gateway.added_p50_ms is not None
    assert gateway.added_p50_ms.median == pytest.approx(0.45)
    assert direct.added_p50_ms is None
    assert gateway.cpu_us is not None
    assert gateway.cpu_us.most == pytest.approx(1250)
    assert gateway.p99_ms is None


def sample(per_s: float, p50_ms: float, cpu: dict[str, float]) -> Sample:
    return Sample(
        calls=100,
        sent=100,
        seconds=1,
        per_s=per_s,
        p50_ms=p50_ms,
        p95_ms=1,
        p99_ms=1,
        p999_ms=1,
        most_ms=1,
        statuses={"200": 100},
        wrong=0,
        unanswered=0,
        late_ms=0,
        cpu={"elsewhere": 0.0, **cpu},
        rss_mb={},
        histogram="",
    )
