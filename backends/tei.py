"""Text Embeddings Inference over HTTP: wire structs, pure encode and decode, then a few lines of I/O.

Source: huggingface/text-embeddings-inference at 1.9.3 (router/src/http/types.rs, server.rs); statuses of
older releases where they differ (Validation was 413 up to 1.8.3).
Rule: never send null; TEI refuses it for most fields.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

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
    Operation,
    Output,
    QueueDepth,
    ReplicaSpec,
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
    inputs_of,
    operation_of,
)
from backends.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http import UpstreamClient, UpstreamResponse, countdown
from backends.openai_wire import decode_embeddings
from backends.outputs import check_outputs, merge_replies, single_output, split_outputs
from backends.replies import (
    check_tokens,
    check_vectors,
    checked_scores,
    fit_vectors,
    float32,
    label_scores,
    order_scores,
    read_gauge,
    term_weights,
    token_matrices,
    translate_decode_errors,
    truncated_inputs,
)
from backends.texts import ModelWork, clip_texts

# --payload-limit is 2,000,000 by default and told nowhere; the margin is for what surrounds the inputs.
BATCH_BYTES = 1_990_000

Body = dict[str, Any]


class Info(msgspec.Struct, frozen=True):
    """GET /info, the fields that matter here."""

    model_id: str
    model_type: dict[str, Any]
    max_input_length: int
    max_client_batch_size: int = 32
    max_concurrent_requests: int = 512
    auto_truncate: bool = False
    model_dtype: str | None = None
    model_sha: str | None = None
    version: str | None = None


class Labels(msgspec.Struct, frozen=True):
    """What /info tells of a classifier."""

    id2label: dict[int, str]


class Rank(msgspec.Struct, frozen=True):
    """One entry of POST /rerank; sorted by score, index is the document's."""

    index: int
    score: float


class Prediction(msgspec.Struct, frozen=True):
    """One label of one input of POST /predict; sorted by score."""

    score: float
    label: str


class Weight(msgspec.Struct, frozen=True):
    """One term of one input of POST /embed_sparse."""

    index: int
    value: float


class ErrorBody(msgspec.Struct, frozen=True):
    """`error` and `error_type` on native routes, `message` and `type` on the OpenAI route."""

    error: str | None = None
    error_type: str | None = None
    message: str | None = None
    type: str | None = None


def offered(model_type: dict[str, Any]) -> tuple[frozenset[Operation], frozenset[Output]]:
    """What a kind of model does. A SPLADE model has no dense vectors to give, and no token vectors."""
    free = {Operation.TOKENIZE, Operation.DETOKENIZE}
    embedding = model_type.get("embedding")
    if isinstance(embedding, dict):
        if embedding.get("pooling") == "splade":
            return frozenset({Operation.ENCODE, *free}), frozenset({Output.SPARSE})
        own = {Operation.EMBED, Operation.ENCODE, *free}
        return frozenset(own), frozenset({Output.DENSE, Output.TOKENS})
    if "reranker" in model_type:
        return frozenset({Operation.RERANK, *free}), frozenset()
    if labels_of(model_type):
        return frozenset({Operation.CLASSIFY, *free}), frozenset()
    return frozenset(free), frozenset()


def labels_of(model_type: dict[str, Any]) -> tuple[str, ...]:
    """A classifier's labels, in the order of their ids; nothing for another model."""
    try:
        named = msgspec.convert(model_type.get("classifier"), Labels, strict=False)
    except msgspec.ValidationError:
        return ()
    return tuple(label for _, label in sorted(named.id2label.items()))


def capabilities(info: Info) -> Capabilities:
    """What TEI's /info says, in the contract's words; it does not tell the vectors' width."""
    operations, outputs = offered(info.model_type)
    embedding = info.model_type.get("embedding")
    return Capabilities(
        model_id=info.model_id,
        operations=operations,
        max_input_tokens=info.max_input_length,
        batch_inputs=info.max_client_batch_size,
        batch_bytes=BATCH_BYTES,
        concurrent_inputs=info.max_concurrent_requests,
        pooling=str(embedding.get("pooling")) if isinstance(embedding, dict) else None,
        dtype=info.model_dtype,
        revision=info.model_sha,
        version=info.version,
        outputs=outputs,
        labels=labels_of(info.model_type),
    )


def check_offered(work: Work, info: Info) -> None:
    """Raises: UnsupportedWork where this kind of model does not do that."""
    operations, outputs = offered(info.model_type)
    if isinstance(work, Encode):
        check_outputs(work, outputs)
    if operation_of(work) not in operations:
        raise UnsupportedWork(f"this upstream's model does not {operation_of(work)}")


def encode(work: Work, info: Info) -> tuple[str, Body]:
    """Path and body of one piece of work; an Encode asks for one kind of output."""
    match work:
        case Tokenize():
            body: Body = {"inputs": work.inputs, "add_special_tokens": work.add_special_tokens}
            return "/tokenize", body | _prompt(work.prompt_name)
        case Detokenize():
            return "/decode", {"ids": work.inputs, "skip_special_tokens": work.skip_special_tokens}
    return _encode_model_work(clip_texts(work, info.max_input_length), info)


def _encode_model_work(work: ModelWork, info: Info) -> tuple[str, Body]:
    cut = _truncation(work.truncate)
    match work:
        case Embed():
            return _encode_embed(work, info)
        case Encode():
            path = "/embed_sparse" if single_output(work) is Output.SPARSE else "/embed_all"
            return path, {"inputs": work.inputs} | cut | _prompt(work.prompt_name)
        case Rerank():
            body: Body = {"query": work.query, "texts": work.documents, "raw_scores": work.raw_scores}
            return "/rerank", body | cut
        case Score():
            return "/predict", {"inputs": work.pairs, "raw_scores": work.raw_scores} | cut
        case Classify():
            # A list of two texts is one pair there: only lists of lists are a batch.
            inputs = [(one,) if isinstance(one, str) else one for one in work.inputs]
            return "/predict", {"inputs": inputs, "raw_scores": work.raw_scores} | cut


def _encode_embed(work: Embed, info: Info) -> tuple[str, Body]:
    size: Body = {} if work.dimensions is None else {"dimensions": work.dimensions}
    # The OpenAI route has base64, but always normalizes, and truncates as the server was started.
    as_started = info.auto_truncate and work.truncate is Truncate.RIGHT
    if work.normalize and not work.prompt_name and as_started:
        return "/v1/embeddings", {"input": work.inputs, "encoding_format": "base64"} | size
    body = {"inputs": work.inputs, "normalize": work.normalize} | _truncation(work.truncate)
    return "/embed", body | _prompt(work.prompt_name) | size


def _truncation(truncate: Truncate) -> Body:
    if truncate is Truncate.ERROR:
        return {"truncate": False}
    # Capitalised: releases before 1.3 know no other spelling.
    return {"truncate": True, "truncation_direction": truncate.value.capitalize()}


def _prompt(name: str | None) -> Body:
    return {"prompt_name": name} if name else {}


def decode(work: Work, path: str, answer: UpstreamResponse, info: Info) -> Reply:
    """The reply in an answer of status 200.

    Raises: ReplicaFailed where it is not an answer to this work.
    """
    with translate_decode_errors():
        match work:
            case Tokenize():
                lists = msgspec.json.decode(answer.body, type=list[list[Token]])
                _check_count(lists, work.inputs)
                return TokenizeReply(tuple(tuple(one) for one in lists))
            case Detokenize():
                texts = msgspec.json.decode(answer.body, type=list[str])
                _check_count(texts, work.inputs)
                return DetokenizeReply(tuple(texts))
            case Embed():
                return _embedded(work, path, answer, info)
        return _decode_native(work, answer, info)


def _check_count(given: Sequence[object], inputs: Sequence[object]) -> None:
    if len(given) != len(inputs):
        raise ReplicaFailed(f"asked for {len(inputs)} inputs, got {len(given)}")


def _embedded(work: Embed, path: str, answer: UpstreamResponse, info: Info) -> EmbedReply:
    vectors, tokens = _vectors(path, answer, len(work.inputs))
    check_tokens(tokens, len(work.inputs), info.max_input_length)
    cut = _truncated(work, tokens, info)
    return EmbedReply(_fitted(vectors, work), tokens, cut)


def _decode_native(work: Encode | Rerank | Score | Classify, answer: UpstreamResponse, info: Info) -> Reply:
    tokens, expected = _header_tokens(answer), len(inputs_of(work))
    check_tokens(tokens, expected, info.max_input_length)
    cut = _truncated(work, tokens, info)
    match work:
        case Rerank():
            ranks = msgspec.json.decode(answer.body, type=list[Rank])
            scores = order_scores([(one.index, one.score) for one in ranks], expected)
            return RerankReply(scores, tokens, cut)
        case Score():
            return RerankReply(_one_score_each(answer, expected), tokens, cut)
        case Classify():
            labels = labels_of(info.model_type)
            return ClassifyReply(labels, label_scores(_predictions(answer), labels, expected), tokens, cut)
        case Encode():
            return _encoded(work, answer, info, EncodeReply(tokens, truncated=cut))


def _predictions(answer: UpstreamResponse) -> list[list[tuple[str, float]]]:
    lists = msgspec.json.decode(answer.body, type=list[list[Prediction]])
    return [[(one.label, one.score) for one in each] for each in lists]


def _one_score_each(answer: UpstreamResponse, expected: int) -> Vectors:
    """A reranker has one label, whatever its name."""
    rows = [[score for _, score in one] for one in _predictions(answer)]
    return checked_scores(rows, expected, 1)[:, 0].copy()


def _encoded(work: Encode, answer: UpstreamResponse, info: Info, empty: EncodeReply) -> EncodeReply:
    if single_output(work) is Output.TOKENS:
        lists = msgspec.json.decode(answer.body, type=list[list[list[float]]])
        matrices = token_matrices(lists, len(work.inputs), info.max_input_length)
        return msgspec.structs.replace(empty, token_vectors=matrices)
    weights = msgspec.json.decode(answer.body, type=list[list[Weight]])
    _check_count(weights, work.inputs)
    terms = tuple(term_weights((one.index, one.value) for one in each) for each in weights)
    return msgspec.structs.replace(empty, sparse=terms)


def _truncated(work: ModelWork, tokens: int, info: Info) -> tuple[int, ...] | None:
    # What is put before an input unasked, only the server knows.
    known = not isinstance(work, Embed | Encode) or not work.prompt_name
    return truncated_inputs(work, tokens, info.max_input_length, prompt_known=known)


def _vectors(path: str, answer: UpstreamResponse, expected: int) -> tuple[Vectors, int]:
    if path == "/embed":
        vectors = float32(msgspec.json.decode(answer.body, type=list[list[float]]))
        check_vectors(vectors, expected)
        return vectors, _header_tokens(answer)
    vectors, tokens = decode_embeddings(answer.body, expected)
    if tokens is None:
        raise ReplicaFailed("the upstream told no usage")
    return vectors, tokens


def _fitted(vectors: Vectors, work: Embed) -> Vectors:
    """Releases before 1.8 know no `dimensions` and ignore it: do here what they did not."""
    done = work.dimensions is None or vectors.shape[1] == work.dimensions
    return vectors if done else fit_vectors(vectors, work)


def _header_tokens(answer: UpstreamResponse) -> int:
    value = answer.headers.get("x-compute-tokens", "0")
    return int(value) if value.isdecimal() else 0


def failure(answer: UpstreamResponse) -> BackendError:
    """What an answer of another status than 200 means."""
    try:
        body = msgspec.json.decode(answer.body, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = ErrorBody()
    message = (body.error or body.message or "").removeprefix("Input validation error: ")
    kind = body.error_type or body.type
    match answer.status:
        case 400 if kind == "Empty":
            return InvalidWork(message or "an input is empty", empty=True)
        case 413 | 422 if kind in ("Validation", "Tokenizer"):
            return InvalidWork(message or "the upstream refused the input")
        case 413:
            return InvalidWork("an input is larger than the upstream's payload limit")
        case 429:
            return ReplicaOverloaded("the upstream is overloaded")
        case 503:
            return ReplicaUnavailable("the upstream says it is not ready")
        case 401 | 403:
            return ReplicaFailed("the upstream refused the gateway's credential")
    return ReplicaFailed(f"the upstream answered with status {answer.status}")


class TeiBackend:
    """One TEI server."""

    def __init__(self, http: UpstreamClient) -> None:
        self._http = http
        self._info: Info | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        answer = await self._http.get("/info", timeout_s)
        if answer.status != 200:
            raise failure(answer)
        try:
            self._info = msgspec.json.decode(answer.body, type=Info)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplicaFailed("GET /info is not TEI's") from error
        return capabilities(self._info)

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._info is None:
            raise ReplicaUnavailable("the replica has not joined")
        check_offered(work, self._info)
        if not isinstance(work, Encode):
            return await self._one(work, self._info, timeout_s)
        left = countdown(timeout_s)
        return merge_replies([await self._one(part, self._info, left()) for part in split_outputs(work)])

    async def _one(self, work: Work, info: Info, timeout_s: float) -> Reply:
        path, body = encode(work, info)
        answer = await self._http.post(path, msgspec.json.encode(body), timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return decode(work, path, answer, info)

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """te_queue_size counts inputs that wait. Raises: BackendError."""
        answer = await self._http.get("/metrics", timeout_s)
        waiting = read_gauge(answer.body, "te_queue_size") if answer.status == 200 else None
        return None if waiting is None else QueueDepth(round(waiting))

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> TeiBackend:
    """The TEI server at the spec's base URL."""
    return TeiBackend(UpstreamClient(spec.address, spec.headers, tls=spec.tls, ip=spec.ip))
