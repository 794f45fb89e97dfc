"""One RPC: its context, permits, bounded reads and writes, and its end. Knows no service."""

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import grpc

from gateway.api.grpc.statuses import status_of, trailing_metadata
from gateway.api.server.call_context import CallContext
from gateway.api.server.error_translation import as_gateway_error
from gateway.api.server.in_flight import RETRY_AFTER_DRAIN_S, InFlight
from gateway.errors import DeadlineExceeded, Internal, MalformedBody, ShuttingDown
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

# grpc.aio's own types have no stubs.
Servicer: TypeAlias = Any
logger = logging.getLogger("gateway")


class OpenRpcs:
    """Number of RPCs without a key that wait for a message, or hold one."""

    def __init__(self) -> None:
        self.waiting = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Count one."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


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

    def __init__(self, servicer: Servicer) -> None:
        metadata = servicer.invocation_metadata() or ()
        super().__init__([_header(name, value) for name, value in metadata], address_of(servicer.peer()))
        self.model = self.header(b"model") or None
        self._servicer = servicer

    def timeout_s(self) -> float | None:
        """Return the time until the RPC's deadline or of its `x-timeout-s`, the sooner one.

        Raises: InvalidInput.
        """
        asked, remaining = super().timeout_s(), self._servicer.time_remaining()
        if remaining is None:
            return asked
        # A deadline that has passed cancels the RPC anyway.
        remaining_s = max(float(remaining), 0.001)
        return remaining_s if asked is None else min(asked, remaining_s)

    def of_message(self) -> "RpcContext":
        """Return the context of one message of several: this one, with times and counts of its own."""
        context = copy.copy(self)
        context.timeline = Timeline()
        context.inputs = context.tokens = 0
        return context


class Message:
    """Bytes of one message in memory, which count as HTTP's bodies do. Never evicted: it arrived whole."""

    def __init__(self, tenant: str, content: bytes) -> None:
        self.tenant = tenant
        self.content = content
        self.held_bytes = 0

    def evict(self) -> None:
        """Do nothing: only bodies that are still arriving are evicted."""


class Rpc:
    """One RPC.

    context: its state. status: of its event. failed_message: number of the message of a stream that failed,
    counted from 0. target: of its messages, encoded, where these have one.
    """

    def __init__(self, parts: RpcParts, servicer: Servicer) -> None:
        self.parts = parts
        self.context = RpcContext(servicer)
        self.status = 200
        self.failed_message: int | None = None
        self.target: bytes | None = None
        self._has_begun = False
        self._servicer = servicer

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the initial metadata, unless that is done."""
        if self._has_begun:
            return
        self._has_begun = True
        metadata = {"x-request-id": self.context.request_id} | dict(headers)
        await self._servicer.send_initial_metadata(tuple(metadata.items()))

    async def read(self, wait_s: float = MESSAGE_WAIT_S) -> bytes | None:
        """Return the next message, None at the end of them. Raises: DeadlineExceeded."""
        try:
            async with asyncio.timeout(wait_s):
                message = await self._servicer.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message came for {wait_s:g} s; close a stream that has no more"
            ) from None
        return None if message is grpc.aio.EOF else message

    async def read_only(self, wait_s: float = MESSAGE_WAIT_S) -> bytes:
        """Return the message of a unary RPC. Raises: DeadlineExceeded, MalformedBody."""
        message = await self.read(wait_s)
        if message is None:
            raise MalformedBody("the RPC has no message; a unary RPC has one")
        return message

    async def discard_rest(self) -> None:
        """Read and drop what the client still sends, for a second at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while await self._servicer.read() is not grpc.aio.EOF:
                    pass

    async def write(self, message: bytes) -> None:
        """Send a message. Raises: DeadlineExceeded, if the client does not read."""
        try:
            async with asyncio.timeout(MESSAGE_WAIT_S):
                await self._servicer.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"the client has read nothing for {MESSAGE_WAIT_S:g} s") from None

    @contextlib.contextmanager
    def hold(self, content: bytes) -> Iterator[Message]:
        """Count a message as held. Raises: GatewayFull."""
        tenant = self.context.tenant
        message = Message(tenant.name if tenant else "", content)
        self.parts.in_flight.hold(message, len(content))
        try:
            yield message
        finally:
            self.parts.in_flight.release(message)

    def fail(self, error: Exception) -> None:
        """End the RPC with the status of an error, and log a bug."""
        failure = as_gateway_error(error)
        context, at = self.context, self.failed_message
        context.outcome, self.status = failure.kind, failure.facts.status
        context.reason = failure.reason
        if isinstance(failure, Internal):
            logger.error("call %s failed", context.request_id, exc_info=error)
        self._servicer.set_code(status_of(failure))
        reason = failure.message if at is None else f"message {at}: {failure.message}"
        self._servicer.set_details(reason[:REASON_CHARACTERS_MAX])
        self._servicer.set_trailing_metadata(trailing_metadata(failure, context.request_id))


async def run_rpc(
    parts: RpcParts, path: str, servicer: Servicer, answer: Callable[[Rpc], Awaitable[None]]
) -> None:
    """Run one RPC that takes a permit, and report its end. path: of the method, the event's route."""
    rpc = Rpc(parts, servicer)
    context = rpc.context
    if parts.traces is not None:
        context.timeline.trace = parts.traces.begin(
            f"{METHOD} {path}",
            context.timeline.started_s,
            context.header(b"traceparent"),
            context.header(b"tracestate"),
        )
    try:
        await _run_with_permit(rpc, answer)
    finally:
        event = _finished(rpc, path)
        if context.timeline.trace is not None:
            context.timeline.trace.finish(event)
        parts.observe(event)


async def run_open_rpc(
    parts: RpcParts, path: str, servicer: Servicer, answer: Callable[[Rpc], Awaitable[None]]
) -> None:
    """Run one RPC that needs neither a key nor a permit, and report its end."""
    rpc = Rpc(parts, servicer)
    try:
        await answer(rpc)
    except Exception as error:  # noqa: BLE001 - every error becomes a status
        rpc.fail(error)
    except asyncio.CancelledError:
        rpc.context.outcome, rpc.status = "cancelled", CALLER_GONE
        raise
    finally:
        parts.observe(_finished(rpc, path))


async def _run_with_permit(rpc: Rpc, answer: Callable[[Rpc], Awaitable[None]]) -> None:
    in_flight = rpc.parts.in_flight
    try:
        in_flight.enter()
    except ShuttingDown as error:
        rpc.fail(error)
        return
    task = asyncio.current_task()
    assert task is not None
    in_flight.cancels.add(task.cancel)
    try:
        await answer(rpc)
    except Exception as error:  # noqa: BLE001 - every error becomes a status
        rpc.fail(error)
    except asyncio.CancelledError:
        if not in_flight.abandoned:
            rpc.context.outcome, rpc.status = "cancelled", CALLER_GONE
            raise
        task.uncancel()
        rpc.fail(
            ShuttingDown("this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S)
        )
    finally:
        in_flight.cancels.discard(task.cancel)
        in_flight.leave()


def _finished(rpc: Rpc, path: str) -> CallFinished:
    context = rpc.context
    timeline, tenant = context.timeline, context.tenant
    return CallFinished(
        request_id=context.request_id,
        method=METHOD,
        route=path,
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


def address_of(peer: str) -> str:
    """Return the address of grpc's name of a peer, such as `ipv4:127.0.0.1:5` or `ipv6:%5B::1%5D:5`."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "unknown"
    return unquote(rest).rpartition(":")[0].strip("[]")


def _header(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    return name.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace")
