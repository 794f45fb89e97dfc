"""TEI server over gRPC in this process, with the model, the permits and the hooks of a `FakeTei`.

Source: text-embeddings-inference 1.9.3, as cited in `backends/tei/grpc_wire.py`, and what such a server
answered (`tests/golden/tei/grpc.jsonl`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from backends.tei_protos import tei_pb2 as pb
from tests.fakes.tei import COMPUTES, FakeTei, TeiError, _inputs_in, is_probe

STATUSES = {
    "Validation": grpc.StatusCode.INVALID_ARGUMENT,
    "Empty": grpc.StatusCode.INVALID_ARGUMENT,
    "Backend": grpc.StatusCode.FAILED_PRECONDITION,
    "Tokenizer": grpc.StatusCode.FAILED_PRECONDITION,
    "Overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Unhealthy": grpc.StatusCode.UNAVAILABLE,
}
# Of a hook's answers, which are HTTP's.
HTTP_STATUSES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
TYPES = {
    "embedding": pb.MODEL_TYPE_EMBEDDING,
    "classifier": pb.MODEL_TYPE_CLASSIFIER,
    "reranker": pb.MODEL_TYPE_RERANKER,
}
# Method → type of its request, and the path that answers over HTTP.
METHODS: dict[str, tuple[Any, str]] = {
    "Embed/Embed": (pb.EmbedRequest, "/embed"),
    "Embed/EmbedSparse": (pb.EmbedSparseRequest, "/embed_sparse"),
    "Embed/EmbedAll": (pb.EmbedAllRequest, "/embed_all"),
    "Predict/Predict": (pb.PredictRequest, "/predict"),
    "Predict/PredictPair": (pb.PredictPairRequest, "/predict"),
    "Rerank/Rerank": (pb.RerankRequest, "/rerank"),
    "Tokenize/Tokenize": (pb.EncodeRequest, "/tokenize"),
    "Tokenize/Decode": (pb.DecodeRequest, "/decode"),
}


class FakeTeiGrpc(grpc.GenericRpcHandler):
    """Handlers of one server. model: computes, and records requests.

    methods: every method called. metadata: of the last call. serving: its health. aborted: it was sent a
    truncation_direction that it does not know, which ends a real one. read_ahead: most messages of a stream
    that were read before they were answered. deadlines: the seconds that calls gave it. cancelled: calls that
    their client ended. replies_max: replies after which a stream ends.
    """

    def __init__(self, model: FakeTei) -> None:
        self.model = model
        self.methods: list[str] = []
        self.metadata: dict[str, str] = {}
        self.deadlines: list[float | None] = []
        self.serving = True
        self.aborted = False
        self.read_ahead = 0
        self.cancelled = 0
        self.replies_max: int | None = None

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method."""
        method = handler_call_details.method.removeprefix("/tei.v1.")

        async def handle(_: Any, call: Any) -> None:
            await self._handle(method, call)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, method: str, call: Any) -> None:
        self.methods.append(method)
        self.metadata = dict(call.invocation_metadata())
        self.deadlines.append(call.time_remaining())
        try:
            await self._answer(method, call)
        except TeiError as error:
            code = STATUSES.get(error.error_type or "", grpc.StatusCode.INTERNAL)
            await call.abort(code, error.error)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, method: str, call: Any) -> None:
        key = self.model.api_key
        if method == "/grpc.health.v1.Health/Check":
            await call.read()
            await call.write(b"\x08\x01" if self.serving else b"\x08\x02")
        elif key is not None and self.metadata.get("authorization") != f"Bearer {key}":
            await call.abort(grpc.StatusCode.UNAUTHENTICATED, "No valid auth token")
        elif method == "Info/Info":
            await call.read()
            await call.write(self._info().SerializeToString())
        elif method == "Rerank/RerankStream":
            await asyncio.Event().wait()
        elif method in METHODS:
            await call.write(await self._reply(method, await call.read(), call))
        elif method.removesuffix("Stream") in METHODS:
            await self._stream(method.removesuffix("Stream"), call)
        else:
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    async def _stream(self, method: str, call: Any) -> None:
        waiting: asyncio.Queue[Any] = asyncio.Queue()
        unanswered = 0

        async def read() -> None:
            nonlocal unanswered
            while (message := await call.read()) is not grpc.aio.EOF:
                unanswered += 1
                self.read_ahead = max(self.read_ahead, unanswered)
                await waiting.put(message)
            await waiting.put(None)

        reading = asyncio.create_task(read())
        try:
            sent = 0
            while (message := await waiting.get()) is not None and sent != self.replies_max:
                sent += 1
                while self.model.in_flight >= self.model.info["max_concurrent_requests"]:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                reply = await self._reply(method, message, call)
                unanswered -= 1
                await call.write(reply)
        finally:
            reading.cancel()

    async def _reply(self, method: str, message: bytes, call: Any) -> bytes:
        kind, path = METHODS[method]
        request = kind.FromString(message)
        direction = getattr(request, "truncation_direction", 0)
        if direction not in (0, 1):
            self.aborted = True
            await call.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        body = _body(method, request)
        if is_probe(body):
            self.model.reference_requests += "query" not in body
        else:
            self.model.requests.append((path, body))
        permits = _inputs_in(body) if path in COMPUTES else 0
        self.model._take_permits(permits)
        try:
            return await self._computed(method, path, body, call)
        finally:
            self.model.in_flight -= permits

    async def _computed(self, method: str, path: str, body: dict[str, Any], call: Any) -> bytes:
        hook = self.model.hook
        if hook is not None and (answer := await hook(path, body)) is not None:
            status, content = answer
            if status != 200:
                await call.abort(HTTP_STATUSES[status], content.decode())
            return content
        extra: dict[str, str] = {}
        reply = json.loads(self.model._reply(path, body, extra))
        tokens = int(extra.get("x-compute-tokens", "0"))
        return _message(method, reply, pb.Metadata(compute_tokens=tokens, total_time_ns=1))

    def _info(self) -> pb.InfoResponse:
        info = self.model.info
        (kind,) = info["model_type"]
        numbers = ("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_client_batch_size")
        return pb.InfoResponse(
            version=info["version"],
            sha=info["sha"],
            model_id=info["model_id"],
            model_sha=info["model_sha"],
            model_dtype=info["model_dtype"],
            model_type=TYPES[kind],
            tokenization_workers=1,
            **{name: info[name] for name in numbers},
        )


def _body(method: str, request: Any) -> dict[str, Any]:
    """Return the body of the same request over HTTP."""
    body: dict[str, Any] = {}
    for field in request.DESCRIPTOR.fields:
        if field.has_presence and not request.HasField(field.name):
            continue
        value = getattr(request, field.name)
        body[field.name] = list(value) if field.is_repeated else value
    if "truncation_direction" in body:
        body["truncation_direction"] = ("Right", "Left")[body["truncation_direction"]]
    if method == "Predict/PredictPair":
        body["inputs"] = [list(body["inputs"])]
        if not 1 <= len(body["inputs"][0]) <= 2:
            raise TeiError(422, "`inputs` must have a single or two elements", "Validation")
    elif method == "Predict/Predict":
        body["inputs"] = [[body["inputs"]]]
    elif "inputs" in body:
        body["inputs"] = [body["inputs"]]
    return body


def _message(method: str, reply: Any, metadata: pb.Metadata) -> bytes:
    """Return the reply of HTTP as the method's message."""
    builders: dict[str, Callable[[], Any]] = {
        "Embed/Embed": lambda: pb.EmbedResponse(embeddings=reply[0], metadata=metadata),
        "Embed/EmbedSparse": lambda: pb.EmbedSparseResponse(
            sparse_embeddings=[pb.SparseValue(**entry) for entry in reply[0]], metadata=metadata
        ),
        "Embed/EmbedAll": lambda: pb.EmbedAllResponse(
            token_embeddings=[pb.TokenEmbedding(embeddings=row) for row in reply[0]], metadata=metadata
        ),
        "Predict/Predict": lambda: _predictions(reply, metadata),
        "Predict/PredictPair": lambda: _predictions(reply, metadata),
        "Rerank/Rerank": lambda: pb.RerankResponse(
            ranks=[pb.Rank(**rank) for rank in reply], metadata=metadata
        ),
        "Tokenize/Tokenize": lambda: pb.EncodeResponse(
            tokens=[pb.SimpleToken(**token) for token in reply[0]]
        ),
        "Tokenize/Decode": lambda: pb.DecodeResponse(text=reply[0]),
    }
    content: bytes = builders[method]().SerializeToString()
    return content


def _predictions(reply: Any, metadata: pb.Metadata) -> pb.PredictResponse:
    return pb.PredictResponse(predictions=[pb.Prediction(**entry) for entry in reply[0]], metadata=metadata)


@asynccontextmanager
async def grpc_tei(
    handlers: FakeTeiGrpc, port: int = 0, certificates: tuple[Path, Path, Path] | None = None
) -> AsyncIterator[str]:
    """Serve on a port of 127.0.0.1 and yield the address, grpc://host:port.

    certificates: key and certificate of the server, and the authority of its clients.
    """
    server = grpc.aio.server(handlers=(handlers,))
    if certificates is None:
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        key, certificate, ca = (path.read_bytes() for path in certificates)
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        bound = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    try:
        yield f"grpc{'' if certificates is None else 's'}://127.0.0.1:{bound}"
    finally:
        await server.stop(0)
