"""The gRPC listener of one worker: its methods, bounds and certificates.

Every method is registered as a stream of bytes in both directions, which unary RPCs are on the wire too. The
key is therefore checked before a message is read, and replies are written without an object per number.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from gateway.api.grpc import multiplexer
from gateway.api.grpc.answers import answer_info, answer_rerank_stream, answer_unary
from gateway.api.grpc.arrow_batches import answer_embed_arrow, answer_sparse_arrow
from gateway.api.grpc.open_services import HEALTH, REFLECTION, answer_health, answer_reflection
from gateway.api.grpc.rpc import Rpc, RpcParts, Servicer, run_open_rpc, run_rpc
from gateway.api.grpc.streams import answer_stream
from gateway.api.grpc.tei import INFO, RERANK_STREAM, STREAMS, UNARY
from gateway.api.server.connection_limit import connections_within_files
from gateway.api.server.paths import OTHER
from gateway.config.schema import Limits, ListenerTls
from gateway.errors import MethodNotAllowed

# Keys, ids and traces take a fraction of it; HTTP's heads have the same bound.
METADATA_BYTES_MAX = 32 * 1024
# Connections without an RPC make room for others. A client connects again by itself.
IDLE_MS = 60_000
HANDSHAKE_MS = 10_000
# A quarter of the open files: HTTP's connections, and those to replicas, need the others.
FILES_PER_CONNECTION = 4
PING_INTERVAL_MS = 10_000
STOP_S = 1.0
# Only the identity: TEI reads no compressed messages either, and a small one may be huge once it is unpacked.
IDENTITY_ONLY = 1

Answer = Callable[[Rpc], Awaitable[None]]
Run = Callable[[RpcParts, str, Servicer, Answer], Awaitable[None]]


async def refuse_unknown(_: Rpc) -> None:
    """Refuse a method that no service has. Raises: MethodNotAllowed."""
    raise MethodNotAllowed("no service here has this method; reflection lists them")


class Methods(grpc.GenericRpcHandler):
    """All methods by path."""

    def __init__(self, parts: RpcParts) -> None:
        guarded = guarded_answers()
        opened: dict[str, Answer] = dict.fromkeys(REFLECTION, answer_reflection)
        opened[HEALTH] = answer_health
        self._handlers = {path: _handler(run_rpc, parts, path, answer) for path, answer in guarded.items()}
        self._handlers |= {
            path: _handler(run_open_rpc, parts, path, answer) for path, answer in opened.items()
        }
        self._unknown = _handler(run_open_rpc, parts, OTHER, refuse_unknown)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method. An unknown one is UNIMPLEMENTED."""
        return self._handlers.get(handler_call_details.method, self._unknown)


def guarded_answers() -> dict[str, Answer]:
    """Return the answer of each method that needs a key, by its path."""
    answers: dict[str, Answer] = {
        INFO: answer_info,
        RERANK_STREAM: answer_rerank_stream,
        multiplexer.INFO: partial(answer_info, enveloped=True),
        multiplexer.RERANK_STREAM: partial(answer_rerank_stream, enveloped="rerank"),
        multiplexer.EMBED_ARROW: answer_embed_arrow,
        multiplexer.EMBED_SPARSE_ARROW: answer_sparse_arrow,
    }
    for path, operation in (UNARY | multiplexer.UNARY).items():
        answers[path] = partial(answer_unary, operation=operation)
    for path, operation in (STREAMS | multiplexer.STREAMS).items():
        answers[path] = partial(answer_stream, operation=operation)
    return answers


def _handler(run: Run, parts: RpcParts, path: str, answer: Answer) -> Any:
    async def handle(_: Any, servicer: Servicer) -> None:
        await run(parts, path, servicer, answer)

    return grpc.stream_stream_rpc_method_handler(handle)


class GrpcServer:
    """Listener of one worker. Needs a running event loop. port: the one that it is bound to."""

    def __init__(self, parts: RpcParts, limits: Limits, tls: ListenerTls | None) -> None:
        self._server = grpc.aio.server(
            handlers=(Methods(parts),),
            options=_options(limits),
            maximum_concurrent_rpcs=limits.connections,
        )
        self._tls = tls
        self.port = 0

    async def start(self, address: str) -> None:
        """Accept calls at host:port. Raises: OSError."""
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} for gRPC: {error}") from error
        await self._server.start()

    async def stop(self) -> None:
        """Stop accepting calls, and cancel those that are still in flight after a moment."""
        await self._server.stop(STOP_S)


def _options(limits: Limits) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        # A client that opens more at once than it knows to be allowed loses them, so it is no tighter.
        ("grpc.max_concurrent_streams", limits.connections),
        (
            "grpc.max_allowed_incoming_connections",
            connections_within_files(limits.connections, FILES_PER_CONNECTION),
        ),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Two pings too early close the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
    )


def _credentials(tls: ListenerTls) -> Any:
    """Return the certificates. With `client_ca`, clients have to present one too. Raises: OSError."""
    pair = (Path(tls.private_key).read_bytes(), Path(tls.certificate).read_bytes())
    client_ca = None if tls.client_ca is None else Path(tls.client_ca).read_bytes()
    return grpc.ssl_server_credentials([pair], client_ca, client_ca is not None)
