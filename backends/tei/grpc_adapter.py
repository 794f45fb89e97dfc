"""Adapter of Text Embeddings Inference (TEI) over gRPC; its wire is in `grpc_wire.py`.

For servers of the package `tei.v1`: TEI's `-grpc` builds, the instances of a TEI Manager, other gateways.
"""

from collections.abc import Callable
from functools import partial

from backends.contract import Capabilities, ReplicaSpec, Reply, TokenizerSource, Work
from backends.contract.errors import ReplicaUnavailable
from backends.http.client import countdown
from backends.http.replies import order_labels
from backends.tei.adapter import TeiInfo, TeiServer
from backends.tei.grpc_channel import GrpcClient, RpcFailed, RpcStatus
from backends.tei.grpc_wire import (
    HEALTH,
    INFO,
    PREDICT,
    RPCS,
    SPARSE,
    capabilities_of,
    decode,
    encode,
    failure,
    health_request,
    is_not_serving,
    model_type_of,
    predictions_of,
    read_info,
    service_of,
    tei_info,
    translate_message_errors,
)
from backends.tei_protos import tei_pb2 as pb
from backends.tokens.counting import open_token_counter

# Text of the RPCs that show what Info does not report.
PROBE = "a"
DESCRIPTION_BYTES_MAX = 64 * 1024
# The weights of all terms of the largest vocabularies.
PROBE_BYTES_MAX = 8 * 1024 * 1024
# Health is optional: a proxy or an older server may not have it, or may ask for another key.
NO_HEALTH = frozenset({"UNIMPLEMENTED", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED"})


class TeiGrpcBackend(TeiServer):
    """Client of one TEI server over gRPC. tokenizer: of the checkpoint, whose files name its labels."""

    def __init__(self, client: GrpcClient, tokenizer: TokenizerSource | None = None) -> None:
        super().__init__(RPCS)
        self._client = client
        self._tokenizer = tokenizer
        # The reply to Info, and the description made of it and of the probes.
        self._described: tuple[bytes, TeiInfo] | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query Info, the health of the model's service, and once the facts that Info does not report.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        try:
            answer = await self._client.unary(INFO, b"", remaining_s(), DESCRIPTION_BYTES_MAX)
            described = read_info(answer)
            await self._check_health(service_of(described), remaining_s())
            if self._described is None or self._described[0] != answer:
                self._described = answer, await self._probe(described, remaining_s)
        except RpcFailed as error:
            raise failure(error.status) from error
        found = capabilities_of(self._described[1])
        self._join(self._described[1], found)
        return found

    async def _check_health(self, service: str, timeout_s: float) -> None:
        """Raise ReplicaUnavailable if the server reports that its model is not ready."""
        request = health_request(service)
        try:
            answer = await self._client.unary(HEALTH, request, timeout_s, DESCRIPTION_BYTES_MAX)
        except RpcFailed as error:
            if error.status.code not in NO_HEALTH:
                raise
            return
        if is_not_serving(answer):
            raise ReplicaUnavailable("the upstream reports that it is not ready")

    async def _probe(self, described: pb.InfoResponse, remaining_s: Callable[[], float]) -> TeiInfo:
        """Find out whether an embedding model is sparse, and the labels of another. Raises: RpcFailed."""
        if described.model_type == pb.MODEL_TYPE_EMBEDDING:
            is_sparse = await self._is_sparse(remaining_s())
            return tei_info(described, model_type_of(described, is_sparse=is_sparse, labels=()))
        labels = await self._labels(remaining_s)
        return tei_info(described, model_type_of(described, is_sparse=False, labels=labels))

    async def _is_sparse(self, timeout_s: float) -> bool:
        request = pb.EmbedSparseRequest(inputs=PROBE, truncate=True).SerializeToString()
        try:
            await self._client.unary(SPARSE, request, timeout_s, PROBE_BYTES_MAX)
        except RpcFailed as error:
            if _is_unsupported(error.status):
                return False
            raise
        return True

    async def _labels(self, remaining_s: Callable[[], float]) -> tuple[str, ...]:
        """Return the labels in the checkpoint's order, else sorted.

        A reply is sorted by score, and has no ids.
        """
        request = pb.PredictRequest(inputs=PROBE, truncate=True).SerializeToString()
        answer = await self._client.unary(PREDICT, request, remaining_s(), PROBE_BYTES_MAX)
        with translate_message_errors():
            predictions = predictions_of(pb.PredictResponse.FromString(answer))
        if self._tokenizer is None:
            return order_labels([predictions], ())
        counter = await open_token_counter(self._tokenizer, remaining_s())
        return order_labels([predictions], counter.labels)

    async def _exchange(self, work: Work, info: TeiInfo, timeout_s: float) -> Callable[[TeiInfo], Reply]:
        exchange = encode(work, info)
        method, messages, bytes_max = exchange.method, exchange.messages, exchange.bytes_max
        try:
            if len(messages) == 1:
                replies = [await self._client.unary(method, messages[0], timeout_s, bytes_max)]
            else:
                replies = await self._client.stream(method, messages, timeout_s, bytes_max)
        except RpcFailed as error:
            if _is_unsupported(error.status):
                # The model may have been exchanged for another of the same name.
                self._described = None
            raise failure(error.status) from error
        return partial(decode, work, exchange, replies)

    async def aclose(self) -> None:
        """Close the connection to the server."""
        await self._client.aclose()


def _is_unsupported(status: RpcStatus) -> bool:
    """Return True if a model does not have an operation."""
    return status.code == "FAILED_PRECONDITION"


def open_replica(spec: ReplicaSpec) -> TeiGrpcBackend:
    """Return a client of the server at the spec's address; it connects at its first RPC."""
    return TeiGrpcBackend(GrpcClient(spec), spec.tokenizer)
