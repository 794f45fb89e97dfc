"""The gRPC listener of one worker: its methods, bounds and certificates.

Every method is a stream of bytes in both directions, which unary RPCs are on the wire too. The key is
therefore checked before a message is read, and replies are written without an object per number.
"""

import asyncio
import socket
import ssl
from contextlib import suppress
from functools import partial

from gateway.api.grpc.answers import (
    HEALTH,
    OPEN_RPCS_MAX,
    OPEN_RPCS_OF_ONE_MAX,
    REFLECTION,
    answer_embed_arrow,
    answer_health,
    answer_health_unread,
    answer_info,
    answer_reflection,
    answer_rerank_stream,
    answer_sparse_arrow,
    answer_stream,
    answer_unary,
    too_many_open,
)
from gateway.api.grpc.call_stream import CallStream
from gateway.api.grpc.connection import HANDSHAKE_S, Http2Connection, Shared
from gateway.api.grpc.rpc import Answer, Rpc
from gateway.api.grpc.tei import (
    EMBED_ARROW,
    EMBED_SPARSE_ARROW,
    INFO,
    MULTIPLEXED_INFO,
    MULTIPLEXED_RERANK_STREAM,
    RERANK_STREAM,
    STREAMS,
    UNARY,
)
from gateway.api.server.client_tls import verify_mode
from gateway.api.server.connection_limit import ConnectionLimit, TenantShares, connections_within_files
from gateway.api.server.middleware import ServerParts
from gateway.api.server.paths import OTHER
from gateway.config.schema import Limits, ListenerTls
from gateway.errors import GatewayError, MethodNotAllowed

# A quarter of the open files: HTTP's connections, and those to replicas, need the others.
FILES_PER_CONNECTION = 4
BACKLOG = 2048
CHECK_S = 0.5
STOP_S = 1.0


def guarded_answers() -> dict[str, Answer]:
    """Return the answer of each method that needs a key, by its path."""
    answers: dict[str, Answer] = {
        INFO: answer_info,
        RERANK_STREAM: answer_rerank_stream,
        MULTIPLEXED_INFO: partial(answer_info, enveloped=True),
        MULTIPLEXED_RERANK_STREAM: partial(answer_rerank_stream, enveloped="rerank"),
        EMBED_ARROW: answer_embed_arrow,
        EMBED_SPARSE_ARROW: answer_sparse_arrow,
    }
    answers |= {path: partial(answer_unary, method=method) for path, method in UNARY.items()}
    return answers | {path: partial(answer_stream, method=method) for path, method in STREAMS.items()}


class Methods:
    """All methods by path, and the RPCs that they answer. rpcs_max: most RPCs with a key at once."""

    def __init__(self, parts: ServerParts, rpcs_max: int) -> None:
        self._parts = parts
        self._shares = TenantShares(rpcs_max)
        self._guarded = guarded_answers()
        # RPCs without a key that wait for their clients.
        self._open = 0

    def begin(self, stream: CallStream) -> None:
        """Begin an RPC. An unknown one is UNIMPLEMENTED."""
        path = stream.request.path
        if (answer := self._guarded.get(path)) is not None:
            Rpc(self._parts, stream, path).start(self._shares, answer)
        elif path == HEALTH or path in REFLECTION:
            self._begin_open(Rpc(self._parts, stream, path), is_health=path == HEALTH)
        else:
            self.refuse(stream, MethodNotAllowed("no service here has this method; reflection lists them"))

    def _begin_open(self, rpc: Rpc, *, is_health: bool) -> None:
        """Begin an RPC without a key. While many wait, only health is answered, at once."""
        if self._open < OPEN_RPCS_MAX and rpc.stream.link.open_calls < OPEN_RPCS_OF_ONE_MAX:
            self._open += 1
            rpc.start_open(answer_health if is_health else answer_reflection, self._leave_open)
        elif is_health:
            rpc.end(answer_health_unread(rpc))
        else:
            rpc.end(too_many_open())

    def _leave_open(self) -> None:
        self._open -= 1

    def refuse(self, stream: CallStream, error: GatewayError) -> None:
        """End an RPC whose method is not known."""
        Rpc(self._parts, stream, OTHER).end(error)


class GrpcServer:
    """Listener of one worker. Needs a running event loop. port: the one that it is bound to."""

    def __init__(self, parts: ServerParts, limits: Limits, tls: ListenerTls | None) -> None:
        methods = Methods(parts, limits.connections)
        self._limit = ConnectionLimit(connections_within_files(limits.connections, FILES_PER_CONNECTION))
        self._shared = Shared(methods.begin, methods.refuse, self._admit, limits.connections)
        self._in_flight = parts.in_flight
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def connections(self) -> list[Http2Connection]:
        """Open connections, the oldest first."""
        return list(self._shared.connections)

    async def start(self, address: str) -> None:
        """Accept calls at host:port. Raises: OSError."""
        try:
            listener = _bind(address)
            context = None if self._tls is None else _tls_context(self._tls)
        except OSError as error:
            raise OSError(f"cannot listen on {address} for gRPC: {error}") from error
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Http2Connection(self._shared),
            sock=listener,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
        )
        self._checking = asyncio.create_task(self._check())

    async def stop(self) -> None:
        """Stop accepting calls, and cancel those that are still in flight after a moment."""
        if self._server is None or self._checking is None:
            return
        self._server.close()
        for connection in self.connections:
            connection.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while any(connection.is_busy for connection in self.connections):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        self._checking.cancel()
        for connection in self.connections:
            connection.close()
        # The last frames leave first.
        await asyncio.sleep(0.01)
        for connection in self.connections:
            connection.make_room()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._shared.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0)

    def _admit(self, newcomer: Http2Connection) -> bool:
        return self._limit.admit(newcomer, self._shared.connections) == "open"

    async def _check(self) -> None:
        """Close connections that wait for their clients too long, and say that the gateway stops."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = loop.time()
            if self._in_flight.takes_no_connections and self._server is not None:
                self._server.close()
            for connection in self.connections:
                if self._in_flight.closes_connections:
                    connection.leave()
                connection.check(now_s)


def _bind(address: str) -> socket.socket:
    """Return a socket at host:port, which the parent has reserved. Raises: OSError."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, bound = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Each worker has its own socket on the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(bound)
    except OSError:
        listener.close()
        raise
    return listener


def _tls_context(tls: ListenerTls) -> ssl.SSLContext:
    """Return the certificates. With `client_ca`, those of clients are verified too. Raises: OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.certificate, tls.private_key)
    context.set_alpn_protocols(["h2"])
    if tls.client_ca is not None:
        context.verify_mode = verify_mode(tls)
        context.load_verify_locations(tls.client_ca)
    return context
