"""Bounds on one caller of a real `gateway serve`, tested with a plain socket."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from gateway.api.server.http_protocol import BoundedProtocol
from tests.processes.conftest import KEY, Served

CONFIG = """
listen: 127.0.0.1:0
limits: {body_bytes: 4000, in_flight_bytes: 1000}
upstreams: {one: {backend: tei, replicas: ["http://127.0.0.1:1"]}}
models: {bge: {upstream: one}}
"""
BODY = json.dumps({"input": "a" * 800}).encode()


class Answer(NamedTuple):
    """Status of a reply, and the code in its OpenAI error, if it has one."""

    status: int
    code: str | None


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    path = tmp_path_factory.mktemp("bounds") / "router.yaml"
    path.write_text(CONFIG)
    gateway = Served(path).wait_until_up()
    parts = urlsplit(gateway.url)
    assert parts.hostname is not None
    assert parts.port is not None
    yield parts.hostname, parts.port
    gateway.stop()


@contextmanager
def begun(address: tuple[str, int], body: bytes, *headers: str) -> Iterator[socket.socket]:
    """Open a connection and send a head with a body, or with a part of it."""
    lines = ["POST /v1/embeddings HTTP/1.1", "host: x", f"authorization: Bearer {KEY}", *headers]
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        yield connection


def answer_on(connection: socket.socket) -> Answer:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65536)
    start, _, body = head.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in start.split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    error = json.loads(body)["error"]
    return Answer(int(start.split()[1]), error["code"] if isinstance(error, dict) else None)


@pytest.mark.slow
def test_bounds_the_bytes_of_all_bodies_in_flight_and_releases_them(address: tuple[str, int]) -> None:
    length = f"content-length: {len(BODY)}"
    with begun(address, BODY[:-1], length) as first:
        with begun(address, BODY, length) as second:
            assert Answer(503, "gateway_full") == answer_on(second)
        first.sendall(BODY[-1:])
        # Every bound is passed; only a replica is missing.
        assert Answer(503, "no_replica") == answer_on(first)
    with begun(address, BODY, length) as third:
        assert Answer(503, "no_replica") == answer_on(third)


@pytest.mark.slow
def test_refuses_a_declared_oversize_body_before_reading_it(address: tuple[str, int]) -> None:
    for length in (4001, 10**17):
        with begun(address, b"", f"content-length: {length}") as connection:
            assert Answer(413, "body_too_large") == answer_on(connection)


@pytest.mark.slow
def test_refuses_an_oversize_chunked_body_before_its_end(address: tuple[str, int]) -> None:
    chunk = b"%x\r\n%s\r\n" % (1500, b" " * 1500)
    with begun(address, chunk * 3, "transfer-encoding: chunked") as connection:
        assert Answer(413, "body_too_large") == answer_on(connection)


@pytest.mark.slow
def test_refuses_a_compressed_body_unread(address: tuple[str, int]) -> None:
    with begun(address, b"", "content-length: 5", "content-encoding: gzip") as connection:
        assert Answer(415, "unsupported_media") == answer_on(connection)


@pytest.mark.slow
def test_bounds_the_request_head(address: tuple[str, int]) -> None:
    with begun(address, b"", *[f"x-{number}: {'y' * 1000}" for number in range(80)]) as connection:
        assert 431 == answer_on(connection).status


@pytest.mark.slow
def test_bounds_json_nesting(address: tuple[str, int]) -> None:
    body = b"[" * 3900
    with begun(address, body, f"content-length: {len(body)}") as connection:
        assert Answer(400, None) == answer_on(connection)


def test_connection_timeouts_are_the_documented_ones() -> None:
    # tests/api/test_http_protocol.py tests their effect, with shorter timeouts.
    promised = (
        BoundedProtocol.head_timeout_s,
        BoundedProtocol.body_timeout_s,
        BoundedProtocol.write_timeout_s,
    )

    assert (10, 60, 30) == promised


@pytest.mark.slow
def test_half_heads_lock_nobody_out_where_few_files_may_be_open(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG)
    gateway = Served(path)
    # The worker, which is started later, inherits it.
    resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (200, 200))
    gateway.wait_until_up()
    parts = urlsplit(gateway.url)
    with ExitStack() as stack:
        for _ in range(400):
            with suppress(ConnectionError):
                half = stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=10))
                half.sendall(b"GET /livez HTTP/1.1\r\nhost")
        with gateway.client() as client:
            assert 200 == client.get("/livez").status_code
    gateway.stop()
    assert any("at most 100 connections" in line for line in gateway.log)
    assert any("more than 100" in line for line in gateway.log)
