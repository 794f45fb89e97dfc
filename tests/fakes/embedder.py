"""Embeddings API as an ASGI app with scripted faults, for callers of a gateway. It knows nothing of one.

Vectors are those of `tests.fakes.tei.vector_of`, so that a test can identify the text of each.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tests.fakes.tei import vector_of

ARROW = "application/vnd.apache.arrow.stream"
Reply = tuple[int, dict[str, str], bytes]


class FakeEmbedder:
    """Server of one model.

    arrow: it writes Arrow where that is accepted. base64: it takes that encoding. faults: replies to the next
    calls, taken from the front. hook: called with the texts of each call; what it returns is the reply.
    """

    def __init__(self, *, arrow: bool = True, base64: bool = True) -> None:
        self.arrow = arrow
        self.base64 = base64
        self.faults: list[Reply] = []
        self.hook: Callable[[Sequence[str]], Reply | None] = lambda _: None
        self.fingerprint: str | None = "0123456789abcdef"
        self.headers: dict[str, str] = {}
        self.dimensions = 8
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.received: list[dict[str, str]] = []
        self.refused_word = ""
        self.models_reply: Reply | None = None

    @property
    def texts(self) -> list[str]:
        """All texts that were received, in order."""
        return [text for body in self.bodies for text in body.get("input", body.get("inputs"))]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        status, reply_headers, content = await asyncio.to_thread(self._reply, scope["path"], headers, body)
        pairs = [(name.encode(), value.encode()) for name, value in reply_headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": content})

    def _reply(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path == "/v1/models":
            return self.models_reply or _json(
                {"data": [{"id": "other"}, {"id": "fake", "default_for": ["embed"]}]}
            )
        fields = json.loads(body)
        self.bodies.append(fields)
        self.paths.append(path)
        self.received.append(headers)
        if self.faults:
            return self.faults.pop(0)
        texts = fields.get("input", fields.get("inputs"))
        if (reply := self.hook(texts)) is not None:
            return reply
        if self.refused_word and any(self.refused_word in text for text in texts):
            return error(422, "a word is refused")
        if "encoding_format" in fields and not self.base64:
            return error(400, "unknown field encoding_format")
        return self._vectors(fields, headers, texts)

    def _vectors(self, fields: dict[str, Any], headers: dict[str, str], texts: Sequence[str]) -> Reply:
        vectors = np.stack([vector_of(text)[: fields.get("dimensions", self.dimensions)] for text in texts])
        extra = dict(self.headers)
        if self.fingerprint is not None:
            extra["x-embedding-fingerprint"] = self.fingerprint
        tokens = sum(len(text.split()) for text in texts)
        if self.arrow and ARROW in headers["accept"]:
            return 200, extra | {"content-type": ARROW}, arrow_of(vectors, tokens)
        packs = fields.get("encoding_format") == "base64"
        rows = [base64.b64encode(row.tobytes()).decode() if packs else row.tolist() for row in vectors]
        data = [{"index": index, "embedding": row} for index, row in enumerate(rows)]
        status, own, body = _json({"data": data[::-1], "model": "fake", "usage": {"total_tokens": tokens}})
        return status, own | extra, body


def arrow_of(vectors: Any, tokens: int) -> bytes:
    """Return vectors as the gateway writes them."""
    kind = pa.list_(pa.field("item", pa.float32(), nullable=False), vectors.shape[1])
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind)
    facts = {"model": "fake", "tokens": str(tokens)}
    schema = pa.schema([pa.field("embeddings", kind, nullable=False)], metadata=facts)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    return bytes(sink.getvalue())


def _json(content: Any) -> Reply:
    return 200, {"content-type": "application/json"}, json.dumps(content).encode()


def error(status: int, message: str, **headers: str) -> Reply:
    """Return an error in OpenAI's envelope. headers: with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": {"message": message}}).encode()
