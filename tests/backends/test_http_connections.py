"""Kept-alive connections that break or carry unsolicited data, and the requests on them."""

import asyncio
import math
from contextlib import suppress
from pathlib import Path

import pytest

from backends.contract import ConnectionFault
from backends.contract.errors import AttemptTimedOut, BackendError, ConnectionLost
from backends.http import connection_pool
from backends.http.connection_pool import REUSE_PAUSE_MAX_S, REUSE_PAUSE_MIN_S, ReusePause
from tests.fakes.http_servers import (
    HEAD,
    OK,
    ScriptedServer,
    ServerBehaviour,
    close,
    reset,
    send_and_close,
    stay_silent,
)

STALE = ConnectionFault("stale")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
APACHE_408 = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 3\r\nconnection: close\r\n"
    b"content-type: text/html\r\n\r\n<p>"
)
HAPROXY_408 = (
    b"HTTP/1.0 408 Request Time-out\r\ncache-control: no-cache\r\nconnection: close\r\n"
    b"content-type: text/html\r\n\r\n<html><body><h1>408 Request Time-out</h1>"
)
SHORT_408 = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"


async def reset_before_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection while the client still sends the body."""
    await reader.readexactly(100_000)
    await reset(reader, writer)


@pytest.mark.parametrize(
    "end", [close, reset, reset_before_the_body, send_and_close(HAPROXY_408), APACHE_408]
)
async def test_request_on_a_stale_connection_is_sent_again(end: ServerBehaviour | bytes) -> None:
    async with ScriptedServer((OK, end), OK) as server:
        await server.client.get("/", 5.0)
        response = await server.client.post("/", b"x" * 5_000_000, 5.0)

    assert (200, b"ok") == (response.status, response.body)
    assert (2, 3) == (len(server.writers), server.requests)
    assert [STALE] == server.faults


async def test_request_is_sent_again_only_once_and_on_a_fresh_connection() -> None:
    async with ScriptedServer((OK, close), (OK, close), close, OK) as server:
        await asyncio.gather(server.client.get("/", 5.0), server.client.get("/", 5.0))
        with pytest.raises(ConnectionLost):
            await server.client.get("/", 5.0)
        after = await server.client.get("/", 5.0)

    # Two idle connections, then a fresh one that breaks. The last request finds the other idle one stale.
    assert b"ok" == after.body
    assert (4, 6) == (len(server.writers), server.requests)


async def test_request_on_a_fresh_connection_is_not_sent_again() -> None:
    async with ScriptedServer(close, OK) as server:
        with pytest.raises(ConnectionLost):
            await server.client.get("/", 5.0)

    assert (1, []) == (server.requests, server.faults)


@pytest.mark.parametrize("begun", [b"H", HEAD, OK[:-1], CONTINUE])
async def test_request_with_any_byte_of_an_answer_is_not_sent_again(begun: bytes) -> None:
    async with ScriptedServer((OK, send_and_close(begun)), OK) as server:
        await server.client.get("/", 5.0)
        with pytest.raises(ConnectionLost):
            await server.client.get("/", 5.0)

    assert (1, 2) == (len(server.writers), server.requests)


async def test_timeout_on_a_fresh_connection_is_the_servers_answer() -> None:
    async with ScriptedServer(APACHE_408) as server:
        assert 408 == (await server.client.get("/", 5.0)).status


async def test_both_tries_share_one_timeout() -> None:
    async with ScriptedServer((OK, close), stay_silent) as server:
        await server.client.get("/", 5.0)
        with pytest.raises(AttemptTimedOut):
            await server.client.get("/", 0.1)

    assert 3 == server.requests


async def test_server_that_is_gone_has_lost_the_request() -> None:
    """Check that the error is ConnectionLost: the server may have ended because of this request."""
    async with ScriptedServer((OK, close)) as server:
        await server.client.get("/", 5.0)
        server.server.close()
        with pytest.raises(ConnectionLost):
            await server.client.get("/", 5.0)


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_request_that_the_gateway_ends_is_not_sent_again(end: str) -> None:
    async with ScriptedServer((OK, stay_silent), OK) as server:
        await server.client.get("/", 5.0)
        server.requested.clear()
        waiting = asyncio.create_task(server.client.get("/", 5.0))
        await server.requested.wait()
        if end == "closed":
            await server.client.aclose()
        else:
            waiting.cancel()
        with pytest.raises(ConnectionLost if end == "closed" else asyncio.CancelledError):
            await waiting

    assert (2, []) == (server.requests, server.faults)


async def test_request_to_an_engine_is_not_sent_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("s") / "e"
    async with ScriptedServer((OK, close), OK, socket_path=str(path)) as server:
        await server.client.get("/", 5.0)
        with pytest.raises(ConnectionLost):
            await server.client.get("/", 5.0)

    assert (2, []) == (server.requests, server.faults)


async def test_server_with_a_short_keep_alive_time_costs_no_request() -> None:
    """Close every connection after its second answer, with or without the next request on its way."""
    async with ScriptedServer((OK, OK, close)) as server:
        bodies = [(await server.client.get("/", 5.0)).body for _ in range(100)]

    assert {b"ok"} == set(bodies)


async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer before the body is read, and keep the connection."""
    writer.write(OK)
    await writer.drain()
    await reader.read()


async def test_connection_whose_request_is_not_fully_sent_is_not_reused() -> None:
    async with ScriptedServer(answer_early, OK) as server:
        early = await server.client.post("/", b"x" * 30_000_000, 5.0)
        after = await server.client.get("/", 5.0)

    assert (b"ok", b"ok") == (early.body, after.body)
    assert 2 == len(server.writers)


# A notice that a connection ends is no reason to pause.
NOTICE, UNSOLICITED = ConnectionFault("idle_error"), ConnectionFault("unsolicited", REUSE_PAUSE_MIN_S)


@pytest.mark.parametrize(
    ("data", "ends", "fault"),
    [
        (APACHE_408, True, NOTICE),
        (HAPROXY_408, True, NOTICE),
        (SHORT_408, True, NOTICE),
        (OK, False, UNSOLICITED),
        (OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), False, UNSOLICITED),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", False, UNSOLICITED),
        (SHORT_408 + OK, False, UNSOLICITED),
        (b"HTTP/1.1 40", False, UNSOLICITED),
        (b"\x00\xff", False, UNSOLICITED),
    ],
    ids=[
        "apache",
        "haproxy",
        "short",
        "reply",
        "last_reply",
        "error",
        "two_replies",
        "half_a_line",
        "garbage",
    ],
)
async def test_unsolicited_data_pauses_the_reuse_of_all_connections(
    data: bytes, ends: bool, fault: ConnectionFault
) -> None:
    async with ScriptedServer(OK) as server:
        await asyncio.gather(*(server.client.get("/", 5.0) for _ in range(2)))
        await server.write(0, data, ends=ends)
        for _ in range(3):
            assert b"ok" == (await server.client.get("/", 5.0)).body

    assert [fault] == server.faults
    assert (2 if ends else 5) == len(server.writers)


async def test_excess_data_after_a_reply_pauses_the_reuse() -> None:
    async with ScriptedServer(OK + OK, OK) as server:
        bodies = []
        for _ in range(3):
            with suppress(BackendError):
                bodies.append((await server.client.get("/", 5.0)).body)

    assert ConnectionFault("unsolicited", REUSE_PAUSE_MIN_S) in server.faults
    assert {b"ok"} == set(bodies)


async def test_connections_are_reused_again_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "REUSE_PAUSE_MIN_S", 0.0)
    async with ScriptedServer(OK) as server:
        await server.client.get("/", 5.0)
        await server.write(0, OK)
        for _ in range(3):
            await server.client.get("/", 5.0)

    assert 2 == len(server.writers)


def test_pause_doubles_up_to_its_maximum_and_starts_again_after_a_quiet_time() -> None:
    pause, now_s, lengths = ReusePause(), 0.0, []
    for _ in range(8):
        lengths.append(pause.start(now_s))
        assert 0.0 == pause.start(now_s + lengths[-1] / 2)
        now_s = pause.ends_s + 1

    doubled = [REUSE_PAUSE_MIN_S * 2**power for power in range(8)]
    assert [min(length, REUSE_PAUSE_MAX_S) for length in doubled] == lengths
    assert REUSE_PAUSE_MIN_S == pause.start(pause.ends_s + REUSE_PAUSE_MAX_S)
    assert -math.inf == ReusePause().ends_s
