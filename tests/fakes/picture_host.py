"""Host of pictures that callers send the addresses of: one reply for each connection, over HTTP or TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
BODY = b"\x89PNG and so on"


def reply(body: bytes = BODY, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


class PictureHost:
    """Server of one reply per connection; `seen` are the heads of its requests."""

    def __init__(self, answer: bytes | Answer) -> None:
        self.answer = answer
        self.seen: list[bytes] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.seen.append(head)
            if isinstance(self.answer, bytes):
                writer.write(self.answer)
                await writer.drain()
            else:
                await self.answer(head, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    answer: bytes | Answer, context: ssl.SSLContext | None = None
) -> AsyncIterator[PictureHost]:
    server = PictureHost(answer)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
