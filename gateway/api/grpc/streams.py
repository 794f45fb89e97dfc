"""Streams of messages, each with a reply: many are in flight, and the replies keep the messages' order."""

import asyncio
from collections import deque
from contextlib import suppress

from gateway.api.grpc.answers import encode, parse_request, serve
from gateway.api.grpc.rpc import Message, Rpc
from gateway.api.grpc.tei import Operation
from gateway.tenants.keyring import Tenant

# Of a client that may wait for a reply before it sends its next message.
DISCARD_S = 0.1


async def answer_stream(rpc: Rpc, operation: Operation) -> None:
    """Answer each message; each is charged as one request. The first that fails ends the stream."""
    context, api = rpc.context, rpc.parts.api
    try:
        tenant = api.admit(context, operation.least)
        await rpc.begin({})
    except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
        raise await api.charge_failure(context, error, operation.least) from None
    try:
        await MessageStream(rpc, operation, parallel_of(tenant, operation)).run()
    except Exception:
        await rpc.discard_rest(DISCARD_S)
        raise


def parallel_of(tenant: Tenant, operation: Operation) -> int:
    """Return the most messages of a stream in flight, which `requests_in_flight` of the key may lower."""
    amounts = [limit.amount for limit in tenant.limits if limit.period == "in_flight"]
    return max(1, min(operation.parallel, *amounts)) if amounts else operation.parallel


class MessageStream:
    """Messages of one stream in flight. parallel: most of them. Their bytes are bounded as one body is.

    Rule: the reader waits for room, so that the flow control of the connection slows down a client that sends
    faster than the model computes.
    """

    def __init__(self, rpc: Rpc, operation: Operation, parallel: int) -> None:
        self._rpc = rpc
        self._operation = operation
        self._parallel = parallel
        self._bytes = 0
        self._written = 0
        self._tasks: deque[asyncio.Task[bytes]] = deque()
        # Set when a task was added or removed, or the reader has ended.
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Read and answer until the client has sent its last message. Raises: the first failure."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            while self._tasks or not reading.done():
                if self._tasks:
                    await self._rpc.write(await self._next())
                    self._tasks.popleft()
                    self._written += 1
                    self._changed.set()
                else:
                    await self._wait()
            await reading
        finally:
            await _cancel(reading, *self._tasks)

    async def _next(self) -> bytes:
        """Return the reply to the oldest message in flight. Raises: its failure; the RPC notes its number."""
        try:
            return await self._tasks[0]
        except Exception:
            self._rpc.note_failed_message(self._written)
            raise

    async def _read(self) -> None:
        while (message := await self._rpc.read()) is not None:
            self._bytes += len(message.content)
            self._tasks.append(asyncio.create_task(self._answer(message)))
            self._changed.set()
            while len(self._tasks) >= self._parallel or self._bytes > self._rpc.parts.body_bytes_max:
                await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _answer(self, message: Message) -> bytes:
        """Return the reply to one message. Raises: GatewayError."""
        context, operation, api = self._rpc.context.part(), self._operation, self._rpc.parts.api
        size = len(message.content)
        try:
            with self._rpc.holding(message) as content:
                request = parse_request(self._rpc, operation, content)
            call, served = await serve(self._rpc, operation, request, context)
            self._rpc.context.add(context)
            return encode(operation, request, call, served, context)
        except Exception as error:  # noqa: BLE001 - charged as in HTTP, whatever it is
            raise await api.charge_failure(context, error, operation.least) from None
        finally:
            self._bytes -= size
            self._changed.set()


async def _cancel(*tasks: "asyncio.Task[object]") -> None:
    """Cancel tasks and wait for their end. Errors of messages after the first failure are dropped."""
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
