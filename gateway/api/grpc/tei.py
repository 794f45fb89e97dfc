"""TEI's messages: decoders to the neutral call, through TEI's JSON bodies, and encoders of the replies.

A message has one text; truncate is false unless it is sent, and normalize is true.
Source: huggingface/text-embeddings-inference 1.9.3, proto/tei.proto and router/src/grpc/server.rs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from google.protobuf.message import Message

from backends.contract import Reply
from backends.contract.texts import DETOKENIZE_IDS_MAX
from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc.messages import field, vector_field
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import LEAST
from gateway.api.server.request import LEAST_WITHOUT_TOKENS as FREE
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.tei import (
    Direction,
    EmbedRequest,
    PredictRequest,
    TeiEncodeRequest,
    TeiRerankRequest,
    decode_embed,
    decode_predict,
    decode_rerank,
    decode_sparse,
    decode_token_vectors,
    predictions_of,
    rank_order,
)
from gateway.api.wire.tokens import DecodeRequest, TokenizeRequest, decode_detokenize, decode_tokenize
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.quotas.limits import Cost
from gateway.telemetry.timeline import Timeline

# Longest vector, as in the JSON dialect.
DIMENSIONS_MAX = 65536
UINT32_MAX = 2**32 - 1

Decode: TypeAlias = Callable[[Any, str | None, RequestContext, InferenceApi], Awaitable[Call]]
# Called with the request and the reply; returns the reply without its metadata.
Encode: TypeAlias = Callable[[Any, Reply], bytes]


@dataclass(frozen=True, slots=True)
class Method:
    """One of TEI's methods, unary or in a stream.

    body_of: returns the JSON body that a request stands for. Raises: InvalidInput. decode: returns its call.
    is_timed: the reply carries TEI's metadata. parallel: most messages of one stream in flight, which bounds
    the memory of their replies. least: the least that a message costs. enveloped: name of the request in a
    message that also has a target; None if the message is the request.
    """

    request: type[Message]
    body_of: Callable[[Any], Any]
    decode: Decode
    encode: Encode
    is_timed: bool = True
    parallel: int = 1024
    least: Cost = LEAST
    fields_max: int | None = None
    enveloped: str | None = None


def _embed_body(request: Any) -> EmbedRequest:
    return EmbedRequest(
        request.inputs,
        request.truncate,
        _direction(request),
        _prompt_name(request),
        normalize=request.normalize if request.HasField("normalize") else True,
        dimensions=_dimensions(request),
    )


def _encode_body(request: Any) -> TeiEncodeRequest:
    return TeiEncodeRequest(request.inputs, request.truncate, _direction(request), _prompt_name(request))


def _predict_body(request: Any) -> PredictRequest:
    return PredictRequest(request.inputs, request.truncate, _direction(request), request.raw_scores)


def _pair_body(request: Any) -> PredictRequest:
    """Return the body of one or two texts. Raises: InvalidInput."""
    if not 1 <= len(request.inputs) <= 2:
        raise InvalidInput(
            f"`inputs` must have a single or two elements. Given: {len(request.inputs)}", param="inputs"
        )
    return PredictRequest(list(request.inputs), request.truncate, _direction(request), request.raw_scores)


def _rerank_body(request: Any) -> TeiRerankRequest:
    return TeiRerankRequest(
        request.query, list(request.texts), request.truncate, _direction(request), request.raw_scores
    )


def _tokenize_body(request: Any) -> TokenizeRequest:
    return TokenizeRequest(
        request.inputs, add_special_tokens=request.add_special_tokens, prompt_name=_prompt_name(request)
    )


def _ids_body(request: Any) -> DecodeRequest:
    return DecodeRequest(list(request.ids), request.skip_special_tokens)


def _direction(request: Any) -> Direction:
    """Return the end to cut. Enums of proto3 take any number. Raises: InvalidInput."""
    if request.truncation_direction == pb.TRUNCATION_DIRECTION_RIGHT:
        return "right"
    if request.truncation_direction == pb.TRUNCATION_DIRECTION_LEFT:
        return "left"
    raise InvalidInput(
        f"`truncation_direction` is 0 for right or 1 for left, not {request.truncation_direction}",
        param="truncation_direction",
    )


def _prompt_name(request: Any) -> str | None:
    """Return the name of a prompt. Raises: InvalidInput."""
    if not request.HasField("prompt_name"):
        return None
    if not request.prompt_name:
        raise InvalidInput("`prompt_name` is empty", param="prompt_name")
    name: str = request.prompt_name
    return name


def _dimensions(request: Any) -> int | None:
    if not request.HasField("dimensions"):
        return None
    dimensions: int = request.dimensions
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise InvalidInput(f"`dimensions` is from 1 to {DIMENSIONS_MAX}", param="dimensions")
    return dimensions


def _embedded(_: Any, reply: Any) -> bytes:
    return vector_field(1, reply.vectors[0])


def _weighted(_: Any, reply: Any) -> bytes:
    (terms,) = reply.sparse
    pairs = zip(terms.indices.tolist(), terms.values.tolist(), strict=True)
    values = [pb.SparseValue(index=index, value=value) for index, value in pairs]
    return pb.EmbedSparseResponse(sparse_embeddings=values).SerializeToString()


def _embedded_tokens(_: Any, reply: Any) -> bytes:
    (vectors,) = reply.token_vectors
    return b"".join([field(1, vector_field(1, vector)) for vector in vectors])


def _predicted(_: Any, reply: Reply) -> bytes:
    (labels,) = predictions_of(reply)
    predictions = [pb.Prediction(score=float(item["score"]), label=item["label"]) for item in labels]
    return pb.PredictResponse(predictions=predictions).SerializeToString()


def _ranked(request: Any, reply: Any) -> bytes:
    ranks = [
        pb.Rank(
            index=index,
            text=request.texts[index] if request.return_text else None,
            score=float(reply.scores[index]),
        )
        for index in rank_order(reply)
    ]
    return pb.RerankResponse(ranks=ranks).SerializeToString()


def _tokenized(_: Any, reply: Any) -> bytes:
    (tokens,) = reply.inputs
    items = [
        pb.SimpleToken(
            id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop
        )
        for token in tokens
    ]
    return pb.EncodeResponse(tokens=items).SerializeToString()


def _detokenized(_: Any, reply: Any) -> bytes:
    (text,) = reply.texts
    return pb.DecodeResponse(text=text).SerializeToString()


EMBED = Method(pb.EmbedRequest, _embed_body, decode_embed, _embedded)
EMBED_SPARSE = Method(pb.EmbedSparseRequest, _encode_body, decode_sparse, _weighted, parallel=256)
EMBED_ALL = Method(pb.EmbedAllRequest, _encode_body, decode_token_vectors, _embedded_tokens, parallel=32)
PREDICT = Method(pb.PredictRequest, _predict_body, decode_predict, _predicted)
PREDICT_PAIR = Method(pb.PredictPairRequest, _pair_body, decode_predict, _predicted)
RERANK = Method(pb.RerankRequest, _rerank_body, decode_rerank, _ranked)
TOKENIZE = Method(
    pb.EncodeRequest, _tokenize_body, decode_tokenize, _tokenized, is_timed=False, parallel=64, least=FREE
)
DECODE = Method(
    pb.DecodeRequest,
    _ids_body,
    decode_detokenize,
    _detokenized,
    is_timed=False,
    least=FREE,
    fields_max=DETOKENIZE_IDS_MAX,
)
TEI_UNARY = {
    "/tei.v1.Embed/Embed": EMBED,
    "/tei.v1.Embed/EmbedSparse": EMBED_SPARSE,
    "/tei.v1.Embed/EmbedAll": EMBED_ALL,
    "/tei.v1.Predict/Predict": PREDICT,
    "/tei.v1.Predict/PredictPair": PREDICT_PAIR,
    "/tei.v1.Rerank/Rerank": RERANK,
    "/tei.v1.Tokenize/Tokenize": TOKENIZE,
    "/tei.v1.Tokenize/Decode": DECODE,
}
TEI_STREAMS = {f"{path}Stream": method for path, method in TEI_UNARY.items() if method is not RERANK}
INFO = "/tei.v1.Info/Info"
RERANK_STREAM = "/tei.v1.Rerank/RerankStream"

# TEI Manager's multiplexer has the same methods, with a target in each message.
# Source: nazq/tei-manager 0.12.0, proto/multiplexer.proto and src/grpc/server.rs.
MULTIPLEXER = mux.DESCRIPTOR.services_by_name["TeiMultiplexer"].full_name
MULTIPLEXED_INFO = f"/{MULTIPLEXER}/Info"
MULTIPLEXED_RERANK_STREAM = f"/{MULTIPLEXER}/RerankStream"
EMBED_ARROW = f"/{MULTIPLEXER}/EmbedArrow"
EMBED_SPARSE_ARROW = f"/{MULTIPLEXER}/EmbedSparseArrow"
# How TEI Manager names the request that a message lacks.
NAMES = {"EmbedSparse": "embed sparse", "EmbedAll": "embed all", "PredictPair": "predict pair"}


def _multiplexed(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return the same methods with a target in each message, by their paths there."""
    found = {}
    for path, method in methods.items():
        rpc = path.rpartition("/")[2]
        name = rpc.removesuffix("Stream")
        found[f"/{MULTIPLEXER}/{rpc}"] = replace(method, enveloped=NAMES.get(name, name.lower()))
    return found


UNARY = TEI_UNARY | _multiplexed(TEI_UNARY)
STREAMS = TEI_STREAMS | _multiplexed(TEI_STREAMS)


def encode_metadata(timeline: Timeline, reply: Reply, call: Call) -> bytes:
    """Return the field `metadata` of a reply: sizes of the call, and nanoseconds of its stages."""
    laps = timeline.laps
    metadata = pb.Metadata(
        compute_chars=min(call.work.characters, UINT32_MAX),
        compute_tokens=min(reply.tokens, UINT32_MAX),
        total_time_ns=_nanoseconds(timeline.total_s()),
        queue_time_ns=_nanoseconds(laps.get("queue", 0.0)),
        inference_time_ns=_nanoseconds(laps.get("upstream", 0.0)),
    )
    return field(2, metadata.SerializeToString())


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


def encode_info(facts: Any) -> bytes:
    """Return the reply to Info. facts: the dialect's `InfoResponse`, whose module has many imports."""
    kinds = {"classifier": pb.MODEL_TYPE_CLASSIFIER, "reranker": pb.MODEL_TYPE_RERANKER}
    (kind,) = facts.model_type
    reply = pb.InfoResponse(
        version=facts.version,
        model_id=facts.model_id,
        model_sha=facts.model_sha,
        model_dtype=facts.model_dtype,
        model_type=kinds.get(kind, pb.MODEL_TYPE_EMBEDDING),
        max_concurrent_requests=facts.max_concurrent_requests,
        max_input_length=facts.max_input_length,
        max_batch_tokens=facts.max_batch_tokens,
        max_client_batch_size=facts.max_client_batch_size,
        tokenization_workers=facts.tokenization_workers,
    )
    return reply.SerializeToString()


def join_rerank(messages: Sequence[pb.RerankStreamRequest]) -> pb.RerankRequest:
    """Return one request for the texts of a RerankStream.

    The first message decides about raw scores and returned texts, as in TEI. All have one query, and are cut
    alike. Raises: InvalidInput.
    """
    if not messages:
        return pb.RerankRequest()
    first = messages[0]
    for name in ("query", "truncate", "truncation_direction"):
        if any(getattr(message, name) != getattr(first, name) for message in messages):
            raise InvalidInput(
                f"`{name}` differs between messages of one RerankStream; open a stream for each", param=name
            )
    return pb.RerankRequest(
        query=first.query,
        texts=[message.text for message in messages],
        truncate=first.truncate,
        raw_scores=first.raw_scores,
        return_text=first.return_text,
        truncation_direction=first.truncation_direction,
    )
