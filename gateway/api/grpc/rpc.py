"""One RPC: its context, permits, bounded reads and writes, and its end. Knows no service."""

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.api.grpc.call_stream import CallStream
from gateway.api.grpc.frames import CANCEL
from gateway.api.grpc.statuses import status_of, trailing_metadata
from gateway.api.server.call_context import CallContext
from gateway.api.server.error_translation import as_gateway_error
from gateway.api.server.in_flight import RETRY_AFTER_DRAIN_S, SHARE_OF_FREE, InFlight
from gateway.errors import DeadlineExceeded, GatewayError, GatewayFull, Internal, MalformedBody, ShuttingDown
from gateway.events import CallFinished, Observe
from gateway.telemetry.timeline import Timeline
from gateway.tenants.keyring import Tenant

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTraces

# As HTTP's events, so that one dashboard shows both: the status that the same error has there.
METHOD = "GRPC"
CALLER_GONE = 499
# A client that sends or reads nothing for so long ends its RPC.
MESSAGE_WAIT_S = 60.0
# Time in which a client ends a stream that is refused already.
DISCARD_S = 1.0
REASON_CHARACTERS_MAX = 1024
# A message of more bytes is counted while it arrives.
SMALL_MESSAGE_BYTES = 64 * 1024

logger = logging.getLogger("gateway")


@dataclass(slots=True)
class OpenRpcs:
    """Number of RPCs without a key that wait for their clients."""

    waiting: int = 0


class RpcShares:
    """Open RPCs with a key. Rule: no tenant can keep another one out by its RPCs.

    One tenant takes at most three times as many as stay free, as bodies do of the memory.
    """

    def __init__(self, rpcs_max: int) -> None:
        self._rpcs_max = rpcs_max
        self._by_tenant: Counter[str] = Counter()
        self._open = 0

    def claim(self, tenant: str) -> None:
        """Count an RPC. Raises: GatewayFull."""
        free = self._rpcs_max - self._open - 1
        # A bound of one has no share to divide.
        if self._open and self._by_tenant[tenant] + 1 > SHARE_OF_FREE * free:
            raise GatewayFull(
                f"{self._by_tenant[tenant]} RPCs of this tenant are open, of {self._open} in all; try again"
            )
        self._open += 1
        self._by_tenant[tenant] += 1

    def release(self, tenant: str) -> None:
        """Count an RPC no more."""
        self._open -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class RpcParts:
    """Collaborators of every RPC, which HTTP requests of the same process share.

    api: the `InferenceApi`, whose module has a long chain of imports. body_bytes_max: `limits.body_bytes`.
    reply_headers: of a served call. describe_model: returns the facts of /info. traces: None if the
    configuration has no such section. open_rpcs: those without a key.
    """

    api: Any
    in_flight: InFlight
    observe: Observe
    body_bytes_max: int
    reply_headers: Callable[..., dict[str, str]]
    describe_model: Callable[[Any, Tenant, str | None], Any]
    traces: "CallTraces | None" = None
    open_rpcs: OpenRpcs = field(default_factory=OpenRpcs)


class RpcContext(CallContext):
    """State of one RPC, whose headers are its metadata. model: of the metadata, None without one."""

    def __init__(self, stream: CallStream) -> None:
        super().__init__(stream.request.metadata, stream.address)
        self.model = self.header(b"model") or None
        self._stream = stream

    def timeout_s(self) -> float | None:
        """Return the time until the RPC's deadline or of its `x-timeout-s`, the sooner one.

        Raises: InvalidInput.
        """
        asked, remaining = super().timeout_s(), self._stream.remaining_s()
        if remaining is None:
            return asked
        # A deadline that has passed cancels the RPC anyway.
        remaining_s = max(remaining, 0.001)
        return remaining_s if asked is None else min(asked, remaining_s)

    def of_message(self) -> "RpcContext":
        """Return the context of one message of several: this one, with times and counts of its own."""
        context = copy.copy(self)
        context.timeline = Timeline()
        context.inputs = context.tokens = 0
        return context


class Message:
    """Bytes of one message in memory, which count as HTTP's bodies do.

    content: once it has arrived whole. Until then the message may be evicted.
    """

    def __init__(self, tenant: str, stream: CallStream) -> None:
        self.tenant = tenant
        self.content = b""
        self.held_bytes = 0
        self._stream = stream

    def evict(self) -> None:
        """Refuse the RPC, whose message is arriving: another tenant needs the memory."""
        self._stream.fail_reading(
            GatewayFull("other tenants need the memory that this message takes; try again")
        )


class Rpc:
    """One RPC.

    context: its state. status: of its event. failed_message: number of the message of a stream that failed,
    counted from 0. target: of its messages, encoded, where these have one. path: of the method, the event's
    route. stream: its messages. tenant, held_bytes: of a reply that the client has not read, see
    `ReplyReader`.
    """

    def __init__(self, parts: RpcParts, stream: CallStream, path: str) -> None:
        self.parts = parts
        self.stream = stream
        self.path = path
        self.context = RpcContext(stream)
        self.status = 200
        self.failed_message: int | None = None
        self.target: bytes | None = None
        self.tenant = ""
        self.held_bytes = 0
        self._messages: set[Message] = set()
        self._has_begun = False
        self._has_ended = False
        self._failure: GatewayError | None = None
        self._written_s = 0.0

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the initial metadata, unless that is done."""
        if self._has_begun:
            return
        self._has_begun = True
        self.stream.begin({"x-request-id": self.context.request_id} | dict(headers))

    async def read(self, wait_s: float = MESSAGE_WAIT_S, bytes_max: int | None = None) -> Message | None:
        """Return the next message, None at the end of them. It is held until it is released.

        bytes_max: None for `limits.body_bytes`. Raises: BodyTooLarge, CompressedMessage, DeadlineExceeded,
        GatewayFull, MalformedBody.
        """
        message = Message(self.tenant, self.stream)
        in_flight = self.parts.in_flight

        def grow(size: int) -> None:
            if size > SMALL_MESSAGE_BYTES:
                in_flight.receiving.add(message)
                in_flight.hold(message, size - message.held_bytes)

        self._messages.add(message)
        try:
            async with asyncio.timeout(wait_s):
                content = await self.stream.read(
                    self.parts.body_bytes_max if bytes_max is None else bytes_max, grow
                )
            if content is None:
                self._messages.discard(message)
                return None
            message.content = content
            in_flight.hold(message, len(content) - message.held_bytes)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message came for {wait_s:g} s; close a stream that has no more"
            ) from None
        finally:
            in_flight.receiving.discard(message)
        return message

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

    def release(self, message: Message) -> None:
        """Count a message no more."""
        self._messages.discard(message)
        self.parts.in_flight.release(message)

    @contextlib.contextmanager
    def holding(self, message: Message) -> Iterator[bytes]:
        """Count a message as held until the end of the block."""
        try:
            yield message.content
        finally:
            self.release(message)

    def fail(self, error: Exception) -> None:
        """End the RPC with the status of an error, and log a bug."""
        failure = as_gateway_error(error)
        context = self.context
        context.outcome, self.status = failure.kind, failure.facts.status
        context.reason = failure.reason
        if isinstance(failure, Internal):
            logger.error("call %s failed", context.request_id, exc_info=error)
        self._failure = failure

    def cancel(self) -> None:
        """Note that the client has left, or that the deadline has passed."""
        self.context.outcome, self.status = "cancelled", CALLER_GONE

    def end(self) -> None:
        """Send the status, and report the end of the RPC, once."""
        if self._has_ended:
            return
        self._has_ended = True
        for message in list(self._messages):
            self.release(message)
        if (failure := self._failure) is not None:
            at = self.failed_message
            reason = failure.message if at is None else f"message {at}: {failure.message}"
            self.stream.end(
                status_of(failure).value[0],
                reason[:REASON_CHARACTERS_MAX],
                trailing_metadata(failure, self.context.request_id),
            )
        else:
            self.stream.end(0)
        event, trace = _finished(self), self.context.timeline.trace
        if trace is not None:
            trace.finish(event)
        self.parts.observe(event)


Answer = Callable[[Rpc], Awaitable[None]]


def start_rpc(parts: RpcParts, shares: RpcShares, path: str, stream: CallStream, answer: Answer) -> None:
    """Begin an RPC that takes a permit; without a valid key it is refused at once. path: of the method."""
    rpc = Rpc(parts, stream, path)
    context = rpc.context
    if parts.traces is not None:
        context.timeline.trace = parts.traces.begin(
            f"{METHOD} {path}",
            context.timeline.started_s,
            context.header(b"traceparent"),
            context.header(b"tracestate"),
        )
    try:
        parts.in_flight.enter()
    except ShuttingDown as error:
        rpc.fail(error)
        rpc.end()
        return
    try:
        rpc.tenant = parts.api.authenticator.authenticate(context).name
        stream.trust(rpc.tenant)
        stream.start_timer()
        shares.claim(rpc.tenant)
    except Exception as error:  # noqa: BLE001 - every error becomes a status
        parts.in_flight.leave()
        rpc.fail(error)
        rpc.end()
        return
    stream.task = task = asyncio.create_task(_run_with_permit(rpc, answer))
    parts.in_flight.cancels.add(task.cancel)
    task.add_done_callback(partial(_leave, rpc, shares))


def start_open_rpc(parts: RpcParts, path: str, stream: CallStream, answer: Answer) -> None:
    """Begin an RPC that needs neither a key nor a permit."""
    rpc = Rpc(parts, stream, path)
    stream.is_open = True
    parts.open_rpcs.waiting += 1
    stream.task = asyncio.create_task(_run(rpc, answer))
    stream.task.add_done_callback(partial(_leave_open, rpc))


def end_rpc(parts: RpcParts, path: str, stream: CallStream, answer: Callable[[Rpc], None]) -> None:
    """Answer an RPC before anything of it is read, or refuse it. answer: may raise."""
    rpc = Rpc(parts, stream, path)
    try:
        answer(rpc)
    except Exception as error:  # noqa: BLE001 - every error becomes a status
        rpc.fail(error)
    rpc.end()


async def _run(rpc: Rpc, answer: Answer) -> None:
    try:
        await answer(rpc)
    except Exception as error:  # noqa: BLE001 - every error becomes a status
        rpc.fail(error)
    rpc.end()


async def _run_with_permit(rpc: Rpc, answer: Answer) -> None:
    in_flight = rpc.parts.in_flight
    try:
        await _run(rpc, answer)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        if not in_flight.abandoned:
            raise
        task.uncancel()
        rpc.fail(_stopped())
        rpc.end()


def _leave(rpc: Rpc, shares: RpcShares, task: "asyncio.Task[None]") -> None:
    """Return the permit of an RPC that was answered, or cancelled even before it began."""
    _end(rpc, task)
    shares.release(rpc.tenant)
    rpc.parts.in_flight.cancels.discard(task.cancel)
    rpc.parts.in_flight.leave()


def _leave_open(rpc: Rpc, task: "asyncio.Task[None]") -> None:
    rpc.parts.open_rpcs.waiting -= 1
    _end(rpc, task)


def _end(rpc: Rpc, task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        rpc.cancel()
        if not rpc.stream.has_ended:
            rpc.fail(_stopped())
    elif (error := task.exception()) is not None:
        # Not expected: it is raised after the answer, so that no caller learns of it.
        logger.error("call %s failed", rpc.context.request_id, exc_info=error)
    rpc.end()


def _stopped() -> ShuttingDown:
    return ShuttingDown("this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S)


def _finished(rpc: Rpc) -> CallFinished:
    context = rpc.context
    timeline, tenant = context.timeline, context.tenant
    return CallFinished(
        request_id=context.request_id,
        method=METHOD,
        route=rpc.path,
        status=rpc.status,
        outcome=context.outcome,
        reason=context.reason,
        duration_s=time.perf_counter() - timeline.started_s,
        tenant=None if tenant is None else tenant.name,
        model=timeline.model,
        inputs=context.inputs,
        tokens=context.tokens,
        operation=timeline.operation,
        stages=timeline.laps,
        is_bulk=timeline.is_bulk,
        replicas=timeline.attempts.replicas,
        attempts=timeline.attempts.attempts,
        upstream_status=timeline.attempts.upstream_status,
        upstream_words=timeline.attempts.upstream_words,
        trace_id=None if timeline.trace is None else timeline.trace.trace_id,
        key_id=None if tenant is None else tenant.key_id or None,
        address=rpc.parts.api.authenticator.address_of(context),
    )
