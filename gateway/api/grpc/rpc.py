"""One RPC: its context, permits, bounded reads and writes, and its end. Knows no service."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from gateway.api.grpc.call_stream import CallStream
from gateway.api.grpc.frames import CANCEL
from gateway.api.grpc.statuses import status_of, trailing_metadata
from gateway.api.server.call_io import CALLER_GONE
from gateway.api.server.connection_limit import TenantShares
from gateway.api.server.error_bodies import TEI
from gateway.api.server.in_flight import RETRY_AFTER_DRAIN_S, HeldBody, InFlight
from gateway.api.server.middleware import ServerParts
from gateway.api.server.paths import Target
from gateway.api.server.request_context import RequestContext
from gateway.errors import DeadlineExceeded, GatewayError, GatewayFull, MalformedBody, ShuttingDown

# As HTTP's events, so that one dashboard shows both: the status that the same error has there.
METHOD = "GRPC"
# A client that sends or reads nothing for so long ends its RPC.
MESSAGE_WAIT_S = 60.0
# Time in which a client ends a stream that is refused already.
DISCARD_S = 1.0
REASON_CHARACTERS_MAX = 1024
# A message of more bytes is counted while it arrives.
SMALL_MESSAGE_BYTES = 64 * 1024

logger = logging.getLogger("gateway")


class RpcContext(RequestContext):
    """State of one RPC, whose headers are its metadata. model: of the metadata, or of a message's target."""

    def __init__(self, parts: ServerParts, stream: CallStream, path: str) -> None:
        metadata = stream.request.metadata
        address = parts.api.authenticator.address_of(stream.link.address, metadata)
        target = Target(path, TEI, path)
        super().__init__(
            target,
            metadata,
            address,
            HeldBody(parts.in_flight),
            parts.observe,
            method=METHOD,
            peer=stream.link.address,
        )
        self.model = self.header(b"model") or None
        self.certificate = stream.link.certificate
        self._remaining_s = stream.remaining_s

    def timeout_s(self) -> float | None:
        """Return the time until the RPC's deadline or of its `x-timeout-s`, the sooner one.

        Raises: InvalidInput.
        """
        asked, remaining = super().timeout_s(), self._remaining_s()
        if remaining is None:
            return asked
        # A deadline that has passed cancels the RPC anyway.
        remaining_s = max(remaining, 0.001)
        return remaining_s if asked is None else min(asked, remaining_s)


class Message(HeldBody):
    """Bytes of one message in memory, which count as HTTP's bodies do.

    content: once it has arrived whole. Until then the message may be evicted.
    """

    def __init__(self, in_flight: InFlight, tenant: str, stream: CallStream) -> None:
        super().__init__(in_flight, tenant)
        self.content = b""
        self._stream = stream

    async def read(self, bytes_max: int) -> bool:
        """Read the message; return whether there was one. Raises: the errors of `CallStream.read`."""
        try:
            content = await self._stream.read(bytes_max, self._grow)
            if content is None:
                return False
            self.content = content
            self.hold(len(content) - self.held_bytes)
            return True
        finally:
            self._in_flight.receiving.discard(self)

    def _grow(self, size: int) -> None:
        """Count a large message while it arrives."""
        if size > SMALL_MESSAGE_BYTES:
            self._in_flight.receiving.add(self)
            self.hold(size - self.held_bytes)

    def evict(self) -> None:
        """Refuse the RPC, whose message is arriving: another tenant needs the memory."""
        self._stream.fail_reading(
            GatewayFull("other tenants need the memory that this message takes; try again")
        )


class Rpc:
    """One RPC.

    context: its state. stream: its messages. target: of its messages, encoded, where these have one. tenant,
    held_bytes: of a reply that the client has not read, see `ReplyReader`.
    """

    def __init__(self, parts: ServerParts, stream: CallStream, path: str) -> None:
        self.parts = parts
        self.stream = stream
        self.context = RpcContext(parts, stream, path)
        self.target: bytes | None = None
        self.tenant = ""
        self.held_bytes = 0
        # Of its event.
        self._status = 200
        # Number of the message of a stream that failed, counted from 0.
        self._failed_message: int | None = None
        self._messages: set[Message] = set()
        self._has_begun = False
        self._has_ended = False
        self._failure: GatewayError | None = None
        self._written_s = 0.0

    def start(self, shares: TenantShares, answer: "Answer") -> None:
        """Begin an RPC that takes a permit; without a valid key it is refused at once."""
        parts, stream = self.parts, self.stream
        if parts.traces is not None:
            self.context.begin_trace(parts.traces)
        try:
            parts.in_flight.enter()
        except ShuttingDown as error:
            self.end(error)
            return
        try:
            self._admit(shares)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            parts.in_flight.leave()
            self.end(error)
            return
        task = stream.run(self._run_with_permit(answer))
        parts.in_flight.cancels.add(task.cancel)
        task.add_done_callback(partial(self._leave, shares))

    def _admit(self, shares: TenantShares) -> None:
        """Check the key, and start the time of the RPC. Raises: GatewayError."""
        tenant = self.tenant = self.parts.api.authenticator.authenticate(self.context).name
        self.stream.link.trust(tenant)
        self.stream.start_timer()
        if not shares.claim(tenant):
            count, taken = shares.of(tenant), shares.taken
            raise GatewayFull(f"{count} RPCs of this tenant are open, of {taken} in all; try again")

    def start_open(self, answer: "Answer", on_end: Callable[[], None]) -> None:
        """Begin an RPC that needs neither a key nor a permit."""

        def leave(task: "asyncio.Task[None]") -> None:
            on_end()
            self._end(task)

        self.stream.run(self._run(answer), is_open=True).add_done_callback(leave)

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the initial metadata, unless that is done."""
        if not self._has_begun:
            self._has_begun = True
            self.stream.begin({"x-request-id": self.context.request_id} | dict(headers))

    def aim(self, target: bytes, model: str) -> None:
        """Send the messages to the model of a target, encoded, which all of them have."""
        self.target = target
        self.context.choose_model(model)

    async def read(self, wait_s: float = MESSAGE_WAIT_S, bytes_max: int | None = None) -> Message | None:
        """Return the next message, None at the end of them. It is held until it is released.

        bytes_max: None for `limits.body_bytes`. Raises: BodyTooLarge, CompressedMessage, DeadlineExceeded,
        GatewayFull, MalformedBody.
        """
        message = Message(self.parts.in_flight, self.tenant, self.stream)
        self._messages.add(message)
        try:
            async with asyncio.timeout(wait_s):
                if await message.read(self.parts.body_bytes_max if bytes_max is None else bytes_max):
                    return message
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message came for {wait_s:g} s; close a stream that has no more"
            ) from None
        self._messages.discard(message)
        return None

    async def read_only(self, wait_s: float = MESSAGE_WAIT_S, bytes_max: int | None = None) -> Message:
        """Return the message of a unary RPC. Raises: the errors of `read`."""
        message = await self.read(wait_s, bytes_max)
        if message is None:
            raise MalformedBody("the RPC has no message; a unary RPC has one")
        return message

    async def discard_rest(self, within_s: float = DISCARD_S) -> None:
        """Read and drop what the client still sends, before a failure that grpc's Python client may lose."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.stream.discard_rest()

    async def write(self, message: bytes, wait_s: float = MESSAGE_WAIT_S) -> None:
        """Send a message. Raises: DeadlineExceeded, if the client does not read."""
        if self.stream.takes(message):
            self.stream.write_at_once(message)
            return
        in_flight = self.parts.in_flight
        self.held_bytes, self._written_s = len(message), time.monotonic()
        in_flight.readers.add(self)
        in_flight.hold_reply(len(message))
        try:
            async with asyncio.timeout(wait_s):
                await self.stream.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"the client has read nothing for {wait_s:g} s") from None
        finally:
            in_flight.readers.discard(self)
            in_flight.release_reply(len(message))
            self.held_bytes = 0

    def bytes_per_s(self) -> float:
        """Return how fast the client reads the reply."""
        return self.stream.written_bytes / max(time.monotonic() - self._written_s, 0.001)

    def disconnect(self) -> None:
        """End the RPC: its client reads too slowly."""
        self.stream.reset(CANCEL)

    @contextlib.contextmanager
    def holding(self, message: Message) -> Iterator[bytes]:
        """Count a message as held until the end of the block."""
        try:
            yield message.content
        finally:
            self._messages.discard(message)
            message.release()

    def note_failed_message(self, number: int) -> None:
        """Name the message of a stream in the error that ends it. number: counted from 0."""
        self._failed_message = number

    def end(self, error: Exception | None = None) -> None:
        """Send the status, of an error if there is one, and report the end of the RPC, once."""
        if self._has_ended:
            return
        if error is not None:
            self._fail(error)
        self._has_ended = True
        for message in self._messages:
            message.release()
        if (failure := self._failure) is not None:
            at = self._failed_message
            reason = failure.message if at is None else f"message {at}: {failure.message}"
            self.stream.end(
                status_of(failure).value[0],
                reason[:REASON_CHARACTERS_MAX],
                trailing_metadata(failure, self.context.request_id),
            )
        else:
            self.stream.end(0)
        self.context.finish(self._status)

    def _fail(self, error: Exception) -> None:
        self._failure = self.context.fail(error)
        self._status = self._failure.facts.status

    async def _run(self, answer: "Answer") -> None:
        try:
            await answer(self)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            self.end(error)
        self.end()

    async def _run_with_permit(self, answer: "Answer") -> None:
        try:
            await self._run(answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if not self.parts.in_flight.abandoned:
                raise
            task.uncancel()
            self.end(_stopped())

    def _leave(self, shares: TenantShares, task: "asyncio.Task[None]") -> None:
        """Return the permit of an RPC that was answered, or cancelled even before it began."""
        self._end(task)
        shares.release(self.tenant)
        self.parts.in_flight.cancels.discard(task.cancel)
        self.parts.in_flight.leave()

    def _end(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            # The client has left, or the deadline has passed.
            self.context.cancel()
            self._status = CALLER_GONE
            if not self.stream.has_ended:
                self._fail(_stopped())
        elif (error := task.exception()) is not None:
            # Not expected: it is raised after the answer, so that no caller learns of it.
            logger.error("call %s failed", self.context.request_id, exc_info=error)
        self.end()


Answer = Callable[[Rpc], Awaitable[None]]


def _stopped() -> ShuttingDown:
    return ShuttingDown("this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S)
