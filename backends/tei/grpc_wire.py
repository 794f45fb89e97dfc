"""Wire of TEI's gRPC services: pure encode and decode functions.

Source: huggingface/text-embeddings-inference 1.9.3 (router/src/grpc/server.rs, proto/tei.proto), and what a
server answered. Differences from HTTP: a message has one text; absent booleans are false; Info has neither
labels nor pooling.
Rules: `truncation_direction` is RIGHT or LEFT, because another number ends a TEI process. Rerank is unary,
because TEI's RerankStream never replies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    ModelWork,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Token,
    Tokenize,
    TokenizeReply,
    Truncate,
    Vectors,
    Work,
)
from backends.contract.errors import (
    BackendError,
    CredentialRefused,
    InvalidWork,
    PermitsTaken,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
)
from backends.http.adapters import Route, Routes, route_of, single_output
from backends.http.answers import UNREADABLE
from backends.http.client import COUNTED_BYTES, REPLY_LISTS_MAX, ROW_LISTS_MAX, ROW_VALUES_MAX
from backends.http.replies import check_tokens, check_vectors, label_scores, order_scores, term_weights
from backends.http.statuses import REFUSED_CREDENTIAL
from backends.tei.adapter import (
    TeiInfo,
    apply_dimensions,
    capabilities,
    labels_of,
    pair_scores,
    refusal,
    truncated,
)
from backends.tei.grpc_channel import MESSAGE_BYTES_MAX, RpcStatus
from backends.tei.protobuf_vectors import read_matrix, read_vector
from backends.tei_protos import tei_pb2 as pb

# TEI reads messages of at most 4 MiB. The margin is for the other fields.
REQUEST_BYTES = 4_000_000
NUMBER_BYTES = 4
INFO = "/tei.v1.Info/Info"
HEALTH = "/grpc.health.v1.Health/Check"
SPARSE = "/tei.v1.Embed/EmbedSparse"
PREDICT = "/tei.v1.Predict/Predict"

Options: TypeAlias = dict[str, Any]
# Method, and a message for each text; a rerank is one message.
Messages: TypeAlias = tuple[str, Sequence[Message]]


class Exchange(msgspec.Struct, frozen=True):
    """RPC for one piece of work: a unary one for one message, else a stream.

    messages: encoded. bytes_max, fields_max: of all replies.
    """

    method: str
    messages: list[bytes]
    bytes_max: int
    fields_max: int


# --- requests


def encode(work: Work, info: TeiInfo) -> Exchange:
    """Return the RPC of one piece of work; an Encode requests one kind of output.

    Raises: InvalidWork, if a number does not fit into its field.
    """
    try:
        rpc = route_of(work, RPCS)
        ready: Any = work if work.is_free else work.clip_texts(info.max_input_length)
        method, messages = rpc.encode(ready)
    except ValueError as error:
        raise InvalidWork("a number does not fit into 32 bits") from error
    rows = work.reply_rows
    return Exchange(
        method if len(messages) == 1 else f"{method}Stream",
        [message.SerializeToString() for message in messages],
        MESSAGE_BYTES_MAX if rows is None else NUMBER_BYTES * ROW_VALUES_MAX * (rows + 1),
        REPLY_LISTS_MAX if rows is None else ROW_LISTS_MAX * (rows + 1),
    )


def _embed_messages(work: Embed) -> Messages:
    options = _model_options(work) | {"dimensions": work.dimensions, "normalize": work.normalize}
    return "/tei.v1.Embed/Embed", [pb.EmbedRequest(inputs=text, **options) for text in work.inputs]


def _encode_messages(work: Encode) -> Messages:
    options = _model_options(work)
    if single_output(work) is Output.SPARSE:
        return SPARSE, [pb.EmbedSparseRequest(inputs=text, **options) for text in work.inputs]
    return "/tei.v1.Embed/EmbedAll", [pb.EmbedAllRequest(inputs=text, **options) for text in work.inputs]


def _rerank_messages(work: Rerank) -> Messages:
    options = _truncation(work.truncate) | {"raw_scores": work.raw_scores}
    return "/tei.v1.Rerank/Rerank", [pb.RerankRequest(query=work.query, texts=work.documents, **options)]


def _tokenize_messages(work: Tokenize) -> Messages:
    options: Options = {
        "add_special_tokens": work.add_special_tokens,
        "prompt_name": work.prompt_name or None,
    }
    return "/tei.v1.Tokenize/Tokenize", [pb.EncodeRequest(inputs=text, **options) for text in work.inputs]


def _detokenize_messages(work: Detokenize) -> Messages:
    skip = work.skip_special_tokens
    messages = [pb.DecodeRequest(ids=ids, skip_special_tokens=skip) for ids in work.inputs]
    return "/tei.v1.Tokenize/Decode", messages


def _model_options(work: Embed | Encode) -> Options:
    return _truncation(work.truncate) | {"prompt_name": work.prompt_name or None}


def _predict_messages(work: Score | Classify) -> Messages:
    options = _truncation(work.truncate) | {"raw_scores": work.raw_scores}
    texts = [item for item in work.inputs if isinstance(item, str)]
    if len(texts) == len(work.inputs):
        return PREDICT, [pb.PredictRequest(inputs=text, **options) for text in texts]
    pairs = [(item,) if isinstance(item, str) else item for item in work.inputs]
    return f"{PREDICT}Pair", [pb.PredictPairRequest(inputs=pair, **options) for pair in pairs]


def _truncation(truncate: Truncate) -> Options:
    is_left = truncate is Truncate.LEFT
    direction = pb.TRUNCATION_DIRECTION_LEFT if is_left else pb.TRUNCATION_DIRECTION_RIGHT
    return {"truncate": truncate is not Truncate.ERROR, "truncation_direction": direction}


# --- replies


@contextmanager
def translate_message_errors() -> Iterator[None]:
    """Convert errors in decoding a message to ReplicaFailed."""
    try:
        yield
    except (DecodeError, ValueError) as error:
        raise ReplicaFailed(UNREADABLE).with_facts(detail=str(error)) from error


def decode(work: Work, exchange: Exchange, replies: Sequence[bytes], info: TeiInfo) -> Reply:
    """Decode the replies to the messages of one piece of work.

    Raises: ReplicaFailed if they do not belong to this work.
    """
    with translate_message_errors():
        is_packed = isinstance(work, Encode) and single_output(work) is Output.TOKENS
        if not is_packed and not isinstance(work, Embed):
            _check_fields(replies, exchange.fields_max)
        return route_of(work, RPCS).decode(work, replies, info)


def _check_fields(replies: Sequence[bytes], fields_max: int) -> None:
    """Check that messages can be decoded in little time and memory.

    Each message inside of a message begins with a line feed, its key. Others in it do not matter.

    Raises: ReplicaFailed.
    """
    large = [reply for reply in replies if len(reply) > COUNTED_BYTES]
    if sum(reply.count(b"\n") for reply in large) > fields_max:
        raise ReplicaFailed(f"the reply contains more than {fields_max} values")


def _decode_embed(work: Embed, replies: Sequence[bytes], info: TeiInfo) -> EmbedReply:
    rows, messages = zip(*(read_vector(reply, pb.EmbedResponse) for reply in replies), strict=True)
    if len({len(row) for row in rows}) > 1:
        raise ReplicaFailed("the upstream's vectors differ in width")
    vectors = np.stack(rows).astype(np.float32, copy=False)
    check_vectors(vectors, len(work.inputs))
    counts = _counts(messages)
    return EmbedReply(apply_dimensions(vectors, work), *_counted(work, counts, info), counts or None)


def _decode_encode(work: Encode, replies: Sequence[bytes], info: TeiInfo) -> EncodeReply:
    if single_output(work) is Output.TOKENS:
        return _decode_token_vectors(work, replies, info)
    messages = [pb.EmbedSparseResponse.FromString(reply) for reply in replies]
    terms = [term_weights((entry.index, entry.value) for entry in m.sparse_embeddings) for m in messages]
    return msgspec.structs.replace(_encode_reply(work, messages, info), sparse=tuple(terms))


def _decode_token_vectors(work: Encode, replies: Sequence[bytes], info: TeiInfo) -> EncodeReply:
    matrices: list[Vectors] = []
    messages: list[pb.EmbedAllResponse] = []
    for reply in replies:
        rows, rest = read_matrix(reply, pb.TokenEmbedding, info.max_input_length)
        if not rows:
            raise ReplicaFailed("the upstream gave no token vectors for an input")
        matrices.append(np.stack(rows).astype(np.float32, copy=False))
        messages.append(pb.EmbedAllResponse.FromString(rest))
        check_vectors(matrices[-1], len(rows))
        if messages[-1].token_embeddings:
            raise ReplicaFailed("the upstream's token vectors are in an unusual order")
    if len({matrix.shape[1] for matrix in matrices}) > 1:
        raise ReplicaFailed("the upstream's token vectors differ in width")
    return msgspec.structs.replace(_encode_reply(work, messages, info), token_vectors=tuple(matrices))


def _encode_reply(work: Encode, messages: Sequence[Any], info: TeiInfo) -> EncodeReply:
    """Return the reply without its outputs."""
    counts = _counts(messages)
    tokens, cut = _counted(work, counts, info)
    return EncodeReply(tokens, truncated=cut, input_tokens=counts or None)


def _decode_rerank(work: Rerank, replies: Sequence[bytes], info: TeiInfo) -> RerankReply:
    message = pb.RerankResponse.FromString(replies[0])
    expected = len(work.documents)
    scores = order_scores([(rank.index, rank.score) for rank in message.ranks], expected)
    tokens = message.metadata.compute_tokens
    tokens = tokens if tokens >= expected else 0
    check_tokens(tokens, expected, info.max_input_length)
    return RerankReply(scores, tokens, truncated(work, tokens, info))


def _decode_score(work: Score, replies: Sequence[bytes], info: TeiInfo) -> RerankReply:
    messages = [pb.PredictResponse.FromString(reply) for reply in replies]
    scores = pair_scores(list(map(predictions_of, messages)), len(work.pairs))
    return RerankReply(scores, *_counted(work, _counts(messages), info))


def _decode_classify(work: Classify, replies: Sequence[bytes], info: TeiInfo) -> ClassifyReply:
    messages = [pb.PredictResponse.FromString(reply) for reply in replies]
    labels = labels_of(info.model_type)
    scores = label_scores(list(map(predictions_of, messages)), labels, len(work.inputs))
    return ClassifyReply(labels, scores, *_counted(work, _counts(messages), info))


def _decode_tokenize(_work: Tokenize, replies: Sequence[bytes], _info: TeiInfo) -> TokenizeReply:
    return TokenizeReply(tuple(map(_tokens, replies)))


def _decode_detokenize(_work: Detokenize, replies: Sequence[bytes], _info: TeiInfo) -> DetokenizeReply:
    return DetokenizeReply(tuple([pb.DecodeResponse.FromString(reply).text for reply in replies]))


def predictions_of(message: pb.PredictResponse) -> list[tuple[str, float]]:
    """Return the labels of one input with their scores, the highest first."""
    return [(entry.label, entry.score) for entry in message.predictions]


def _tokens(reply: bytes) -> tuple[Token, ...]:
    return tuple(
        Token(
            token.id,
            token.text,
            token.special,
            token.start if token.HasField("start") else None,
            token.stop if token.HasField("stop") else None,
        )
        for token in pb.EncodeResponse.FromString(reply).tokens
    )


def _counts(messages: Sequence[Any]) -> tuple[int, ...]:
    """Return the tokens of each message, or () if one of them reports none."""
    counts = tuple(message.metadata.compute_tokens for message in messages)
    return counts if all(counts) else ()


def _counted(work: ModelWork, counts: Sequence[int], info: TeiInfo) -> tuple[int, tuple[int, ...] | None]:
    """Return the tokens of all messages, 0 if they are not known, and the truncated inputs.

    The second is () if certainly no input was cut, otherwise None; an input of full length may have been.
    Raises: ReplicaFailed.
    """
    for count in counts:
        check_tokens(count, 1, info.max_input_length)
    is_sent_whole = work.clip_texts(info.max_input_length) == work
    if counts and is_sent_whole and max(counts) < info.max_input_length:
        return sum(counts), ()
    return sum(counts), truncated(work, sum(counts), info)


RPCS: Routes = {
    Embed: Route(_embed_messages, _decode_embed),
    Encode: Route(_encode_messages, _decode_encode),
    Rerank: Route(_rerank_messages, _decode_rerank),
    Score: Route(_predict_messages, _decode_score),
    Classify: Route(_predict_messages, _decode_classify),
    Tokenize: Route(_tokenize_messages, _decode_tokenize),
    Detokenize: Route(_detokenize_messages, _decode_detokenize),
}


# --- descriptions


def read_info(answer: bytes) -> pb.InfoResponse:
    """Decode the reply to Info. Raises: ReplicaFailed."""
    try:
        described = pb.InfoResponse.FromString(answer)
    except DecodeError as error:
        raise ReplicaFailed(f"the reply to {INFO} is not TEI's") from error
    if not described.model_id or described.model_type not in pb.ModelType.values():
        raise ReplicaFailed(f"the reply to {INFO} is not TEI's")
    return described


def service_of(described: pb.InfoResponse) -> str:
    """Return the service whose health is that of the model."""
    return "tei.v1.Embed" if described.model_type == pb.MODEL_TYPE_EMBEDDING else "tei.v1.Predict"


def health_request(service: str) -> bytes:
    """Return a HealthCheckRequest of grpc.health.v1: the name is field 1."""
    return bytes((0x0A, len(service))) + service.encode()


def is_not_serving(answer: bytes) -> bool:
    """Return True if a HealthCheckResponse has the status NOT_SERVING."""
    return answer == b"\x08\x02"


def model_type_of(described: pb.InfoResponse, *, is_sparse: bool, labels: Sequence[str]) -> dict[str, Any]:
    """Return the model type as /info over HTTP states it. labels: in the order of their scores."""
    id2label = {"id2label": dict(enumerate(labels))}
    match described.model_type:
        case pb.MODEL_TYPE_CLASSIFIER:
            return {"classifier": id2label}
        case pb.MODEL_TYPE_RERANKER:
            return {"reranker": id2label}
    return {"embedding": {"pooling": "splade"} if is_sparse else {}}


def tei_info(described: pb.InfoResponse, model_type: dict[str, Any]) -> TeiInfo:
    """Return the description in the form of HTTP's. Over gRPC a server cuts only inputs that ask for it."""
    return TeiInfo(
        described.model_id,
        model_type,
        described.max_input_length,
        described.max_client_batch_size,
        described.max_concurrent_requests,
        auto_truncate=False,
        model_dtype=described.model_dtype or None,
        model_sha=described.model_sha or None,
        version=described.version or None,
    )


def capabilities_of(info: TeiInfo) -> Capabilities:
    """Convert a description to capabilities."""
    return msgspec.structs.replace(capabilities(info, RPCS), request_bytes=REQUEST_BYTES)


# --- errors


def failure(status: RpcStatus) -> BackendError:
    """Convert a status other than OK to an error."""
    return _failure(status).with_facts(detail=status.details, upstream_status=status.code)


def _failure(status: RpcStatus) -> BackendError:
    details = status.details
    match status.code:
        case "INVALID_ARGUMENT":
            return refusal(details, empty=details.endswith("cannot be empty"))
        case "RESOURCE_EXHAUSTED" if "overloaded" in details:
            # TEI takes a permit per input.
            return PermitsTaken("the upstream is overloaded")
        case "RESOURCE_EXHAUSTED" | "OUT_OF_RANGE" if "larger than" in details or "too large" in details:
            return RequestTooLarge("the upstream refused the size of a message")
        case "RESOURCE_EXHAUSTED":
            return ReplicaOverloaded("the upstream is overloaded")
        case "UNAVAILABLE":
            return ReplicaUnavailable("the upstream reports that it is not ready")
        case "UNAUTHENTICATED" | "PERMISSION_DENIED":
            return CredentialRefused(REFUSED_CREDENTIAL)
        case "UNIMPLEMENTED" | "NOT_FOUND":
            return ReplicaFailed(
                f"the upstream answered {status.method} with {status.code}: check `replicas` and `model`"
            )
    return ReplicaFailed(f"the upstream answered {status.method} with {status.code}")
