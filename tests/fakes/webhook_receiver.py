"""Receiver of webhooks for tests: an HTTP server that checks signatures as Standard Webhooks describes."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple


class Received(NamedTuple):
    """One call. is_signed: its signature is right for the secret of the receiver."""

    id: str
    timestamp: int
    is_signed: bool
    body: dict[str, Any]


class Receiver:
    """Calls in their order. url: where to send them. answers: statuses of the next replies, then 204."""

    def __init__(self, url: str, secret: str, answers: Sequence[int]) -> None:
        self.url = url
        self.calls: list[Received] = []
        self.answers = list(answers)
        self._secret = secret

    def take(self, headers: dict[str, str], raw: bytes) -> int:
        """Keep a call and return the status of its reply."""
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + raw
        digest = hmac.new(self._secret.encode(), signed, hashlib.sha256).digest()
        is_signed = headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
        timestamp = int(headers["webhook-timestamp"])
        self.calls.append(Received(headers["webhook-id"], timestamp, is_signed, json.loads(raw)))
        return self.answers.pop(0) if self.answers else 204

    def kinds(self) -> list[str]:
        """Return the type of each call."""
        return [call.body["type"] for call in self.calls]


@contextmanager
def receiving(secret: str, *answers: int) -> Iterator[Receiver]:
    """Run a receiver on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.take({name.lower(): value for name, value in self.headers.items()}, raw)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook?team=search", secret, answers)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield receiver
        server.shutdown()
        thread.join(5)
