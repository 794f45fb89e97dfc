"""gRPC client of one replica, and the only translation of gRPC's exceptions to BackendError.

Rule: in `backends/` only this module imports grpc. Callers receive bytes, a BackendError, or the status with
which the server ended an RPC. It is imported when a replica's address begins with grpc:// or grpcs://.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
import grpc.aio
import msgspec

from backends.contract import ReplicaSpec, TlsFiles
from backends.contract.errors import AttemptTimedOut, ConnectionLost, ReplicaFailed, ReplicaUnavailable
from backends.http.client import countdown, mask_secrets, secrets_of
from backends.http.faults import CONNECT_TIMEOUT_S
from backends.http.tls import trusted_authorities
from backends.tracing import carrier

# A server of TEI reads at most so many messages of a stream ahead of its replies.
STREAM_MESSAGES_MAX = 1024
# Of one reply: 20,000,000 numbers, as many as a reply over HTTP may have.
MESSAGE_BYTES_MAX = 80_000_000
METADATA_BYTES_MAX = 32 * 1024
# Less than the 5 s between two probes, so that a server is found again by the next one.
RECONNECT_MS_MAX = 1000
# Servers of grpc's own libraries close a connection that is pinged more often than every 10 s.
PING_INTERVAL_MS = 30_000
PING_TIMEOUT_MS = 10_000
# A small message that is compressed may be huge once it is unpacked.
IDENTITY_ONLY = 1
# No proxy of the environment is used, as over HTTP.
OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
    # Despite its name this is the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS_MAX // 2),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
    ("grpc.dns_min_time_between_resolutions_ms", RECONNECT_MS_MAX),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
)
# Words of grpc's own details of UNAVAILABLE, for a connection that broke with an RPC in flight.
BROKEN = (
    "Stream removed",
    "Cancelling all calls",
    "GOAWAY",
    "Socket closed",
    "Connection reset",
    "keepalive",
)
# Beginnings of grpc's own details of UNAVAILABLE, for an RPC that had no connection to be sent over.
NEVER_SENT = (
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)
# Words of grpc's own details of a failed connection, and the reason that is shown for them.
CONNECT_FAILURES = (
    ("CERTIFICATE_VERIFY_FAILED", "the replica's certificate is not trusted"),
    ("Hostname Verification", "the replica's certificate is not trusted"),
    ("andshake", "the replica takes no TLS connection"),
    ("resolving", "no connection to the replica: its host name is not known"),
    ("DNS", "no connection to the replica: its host name is not known"),
    ("Connection refused", "no connection to the replica: nothing listens at its port"),
    ("timed out", f"no connection to the replica within {CONNECT_TIMEOUT_S:.0f} s"),
    ("HTTP/2", "the server at the replica's port does not speak gRPC; write http:// or the gRPC port"),
)
_CODE = grpc.StatusCode
_STATE = grpc.ChannelConnectivity


class RpcStatus(msgspec.Struct, frozen=True):
    """Status other than OK with which a server ended an RPC.

    method: path of the RPC. code: name of the status.
    """

    method: str
    code: str
    details: str


class RpcFailed(Exception):
    """End of an RPC by its server; the adapter knows what the status means on its wire."""

    def __init__(self, status: RpcStatus) -> None:
        super().__init__(f"{status.method}: {status.code}")
        self.status = status


class Attempt(NamedTuple):
    """One RPC that may be sent. options: its metadata and timeout. is_connected: the channel is."""

    channel: grpc.aio.Channel
    options: dict[str, Any]
    is_connected: bool


class GrpcClient:
    """Client of one server; all of its RPCs share one connection."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._metadata = _metadata_of(spec)
        self._secrets = secrets_of(spec.headers)
        self._channel: grpc.aio.Channel | None = None

    async def unary(self, method: str, message: bytes, timeout_s: float, bytes_max: int) -> bytes:
        """Send one message and return its reply.

        bytes_max: of a valid reply.

        Raises: ReplicaUnavailable, ConnectionLost, AttemptTimedOut, ReplicaFailed, RpcFailed.
        """
        async with self._attempt(method, timeout_s) as attempt:
            send: Any = attempt.channel.unary_unary(method)
            reply: bytes = await send(message, **attempt.options)
        _check_size(len(reply), bytes_max)
        return reply

    async def stream(
        self, method: str, messages: Sequence[bytes], timeout_s: float, bytes_max: int
    ) -> list[bytes]:
        """Send messages and return the replies, in order. At most 1,024 wait for their reply at a time.

        bytes_max: of all valid replies. Raises: as `unary`; RpcFailed for the first message that failed.
        """
        async with self._attempt(method, timeout_s) as attempt:
            call: Any = attempt.channel.stream_stream(method)(**attempt.options)
            room = asyncio.Semaphore(STREAM_MESSAGES_MAX)
            sending = asyncio.create_task(_send(call, messages, room))
            try:
                return await _receive(call, len(messages), bytes_max, room)
            finally:
                sending.cancel()
                call.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    @asynccontextmanager
    async def _attempt(self, method: str, timeout_s: float) -> AsyncIterator[Attempt]:
        """Connect, and translate the errors of the RPC that the caller sends.

        Raises: BackendError, RpcFailed.
        """
        remaining_s, is_connected = countdown(timeout_s), False
        try:
            async with asyncio.timeout(timeout_s):
                channel = self._open()
                is_connected = await _connect(channel)
                trace = carrier.get()
                extra = () if trace is None else tuple(trace.headers.items())
                options = {"metadata": self._metadata + extra, "timeout": remaining_s()}
                yield Attempt(channel, options, is_connected)
        except TimeoutError as error:
            raise AttemptTimedOut(f"no answer within {timeout_s:.1f} s") from error
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, method, timeout_s, is_connected=is_connected) from error
        except asyncio.CancelledError:
            if self._channel is None and not _is_cancelled():
                # The client was closed with the RPC in flight.
                raise ConnectionLost("the connection was closed before the reply was complete") from None
            raise

    def _open(self) -> grpc.aio.Channel:
        """Return the channel, which belongs to the running event loop."""
        if self._channel is None:
            self._channel = _open_channel(self._spec)
        return self._channel

    def _translate(
        self, error: grpc.aio.AioRpcError, method: str, timeout_s: float, *, is_connected: bool
    ) -> Exception:
        code, details = error.code(), error.details() or ""
        match code:
            case _CODE.DEADLINE_EXCEEDED:
                return AttemptTimedOut(f"no answer within {timeout_s:.1f} s")
            # The channel may have seemed connected only because it had not yet noticed its server close.
            case _CODE.UNAVAILABLE if not is_connected or details.startswith(NEVER_SENT):
                return ReplicaUnavailable(_connect_failure(details))
            case _CODE.UNAVAILABLE if self._is_broken(details):
                return ConnectionLost("the connection broke before the reply was complete")
            case _CODE.RESOURCE_EXHAUSTED if "CLIENT: " in details:
                return ReplicaFailed(f"the reply is larger than {MESSAGE_BYTES_MAX} bytes")
        return RpcFailed(RpcStatus(method, code.name, mask_secrets(details.encode(), self._secrets).decode()))

    def _is_broken(self, details: str) -> bool:
        if any(word in details for word in BROKEN):
            return True
        return self._channel is None or self._channel.get_state() is not _STATE.READY

    async def aclose(self) -> None:
        """Close the connection; RPCs in flight fail."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


async def _connect(channel: grpc.aio.Channel) -> bool:
    """Wait until the channel is connected or has failed to, and return whether it is.

    An RPC on a channel that has failed ends at once with the reason. Raises: ReplicaUnavailable.
    """
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while state in (_STATE.IDLE, _STATE.CONNECTING):
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise ReplicaUnavailable(f"no connection to the replica within {CONNECT_TIMEOUT_S:.0f} s") from error
    return state is _STATE.READY


async def _send(call: Any, messages: Sequence[bytes], room: asyncio.Semaphore) -> None:
    """Send the messages as the replies make room. The failure of an RPC is reported to its reader."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await room.acquire()
            await call.write(message)
        await call.done_writing()


async def _receive(call: Any, expected: int, bytes_max: int, room: asyncio.Semaphore) -> list[bytes]:
    """Return the replies of a stream. Raises: ReplicaFailed, if there are not `expected` ones."""
    replies: list[bytes] = []
    size = 0
    async for reply in call:
        size += len(reply)
        _check_size(size, bytes_max)
        replies.append(reply)
        if len(replies) > expected:
            break
        room.release()
    if len(replies) != expected:
        raise ReplicaFailed(f"asked for {expected} inputs, got {len(replies)}")
    return replies


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise ReplicaFailed(f"the reply is larger than {bytes_max} bytes")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _metadata_of(spec: ReplicaSpec) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every RPC. A gateway reads the model from it, a server of TEI ignores it."""
    model = () if spec.model is None else (("model", spec.model),)
    return (*((name.lower(), value) for name, value in spec.headers.items()), *model)


def _open_channel(spec: ReplicaSpec) -> grpc.aio.Channel:
    parts = urlsplit(spec.address)
    host, target = parts.hostname or "", _target(parts.hostname or "", parts.port or 0, spec.ip)
    options = [*OPTIONS, ("grpc.default_authority", parts.netloc)]
    if parts.scheme == "grpc":
        return grpc.aio.insecure_channel(target, options)
    options.append(("grpc.ssl_target_name_override", host))
    return grpc.aio.secure_channel(target, _credentials(spec.tls), options)


def _target(host: str, port: int, ip: str | None) -> str:
    """Return grpc's name of a server. ip: the address to connect to if the host has several."""
    address = ip or host
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return f"dns:///{address}:{port}"
    return f"ipv4:{address}:{port}" if version == 4 else f"ipv6:[{address}]:{port}"


def _credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Return the certificates. Without `ca`, the authorities are those that HTTP trusts. Raises: OSError."""
    authorities = trusted_authorities() if tls.ca is None else Path(tls.ca).read_bytes()
    if tls.certificate is None or tls.private_key is None:
        return grpc.ssl_channel_credentials(authorities)
    key, certificate = Path(tls.private_key).read_bytes(), Path(tls.certificate).read_bytes()
    return grpc.ssl_channel_credentials(authorities, key, certificate)


def _connect_failure(details: str) -> str:
    reasons = (reason for word, reason in CONNECT_FAILURES if word in details)
    return next(reasons, "no connection to the replica")
