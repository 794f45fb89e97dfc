"""HTTP client of the operators' commands on servers that answer badly or not at all."""

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.cli.gateway_client import GatewayClient, GatewayUnavailable, RequestRefused
from tests.waiting import PATIENCE_S

CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{}"
MOVED = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n"
BUSY = b'HTTP/1.1 503 Busy\r\ncontent-length: 33\r\n\r\n{"error": {"message": "no room"}}'
Call = Callable[[GatewayClient], Any]
CALLS: dict[str, Call] = {
    "get": lambda client: client.get("/x", dict),
    "download": lambda client: client.download("/x", io.BytesIO(), lambda *_: None, 100),
}


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """Serve one reply, or none, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if reply is None:
                    ended.wait(PATIENCE_S)
                else:
                    connection.sendall(reply)

        ended = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("reply", "kind", "problem"),
    [
        (None, GatewayUnavailable, "does not answer: timed out"),
        (CUT, GatewayUnavailable, "ended its reply early"),
        (BUSY, GatewayUnavailable, "returned 503: no room"),
        (MOVED, RequestRefused, "returned 302: an unreadable reply"),
    ],
    ids=["silent", "cut", "busy", "moved"],
)
def test_replies_that_are_no_good(
    call: Call, reply: bytes | None, kind: type[Exception], problem: str
) -> None:
    with answering(reply) as url, pytest.raises(kind) as raised:
        call(GatewayClient(url, None, timeout_s=0.2 if reply is None else 10))
    assert str(raised.value) == f"the gateway at {url} {problem}"


def test_a_closed_port_is_named_in_words() -> None:
    with pytest.raises(GatewayUnavailable, match=r"does not answer: Connection refused$"):
        GatewayClient("http://127.0.0.1:9", None).send("GET", "/x")
