"""Adapter of Text Embeddings Inference (TEI): wire structs, pure encode and decode functions, then the I/O.

Source: huggingface/text-embeddings-inference at 1.9.3 (router/src/http/types.rs, server.rs), and the statuses
of older releases if they differ (Validation was 413 up to 1.8.3).
Rule: never send null, because TEI refuses it for most fields.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

from backends.contract import (
    GRPC_SCHEMES,
    Backend,
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    ModelWork,
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
)
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    PermitsTaken,
    ReplicaFailed,
    ReplicaUnavailable,
    UnsupportedWork,
    input_too_long,
)
from backends.contract.refusals import (
    check_no_instruction,
    check_no_late_chunking,
    check_no_max_tokens,
    check_plain_texts,
    refused_parts,
)
from backends.contract.texts import SPECIAL_TOKENS, token_upper_bound
from backends.http.answers import decode_json, translate_decode_errors, with_answer, words_of_error
from backends.http.client import UpstreamClient, UpstreamResponse, countdown, open_client
from backends.http.offers import OfferHistory
from backends.http.openai_envelope import (
    REFUSAL_TYPES,
    REFUSED_INPUT,
    context_length_in,
    error_of,
    refused_input,
)
from backends.http.openai_wire import decode_embeddings, is_without_vectors
from backends.http.outputs import check_outputs, merge_replies, single_output, split_outputs
from backends.http.replies import (
    check_tokens,
    check_vectors,
    fit_vectors,
    float32,
    label_scores,
    order_scores,
    read_gauge,
    rows_of,
    score_matrix,
    status_error,
    term_weights,
    token_matrices,
    truncated_inputs,
)

# TEI's --payload-limit is 2,000,000 by default, and no route reports it. The margin is for the other fields.
BATCH_BYTES = 1_990_000
EMBEDDINGS = "/v1/embeddings"

Body = dict[str, Any]


class TeiInfo(msgspec.Struct, frozen=True):
    """Fields of GET /info that the adapter uses.

    prompt_tokens: the most that the server's default prompt has, which /info does not report; learned from
    its counts.
    """

    model_id: str
    model_type: dict[str, Any]
    max_input_length: int
    max_client_batch_size: int = 32
    max_concurrent_requests: int = 512
    auto_truncate: bool = False
    model_dtype: str | None = None
    model_sha: str | None = None
    version: str | None = None
    prompt_tokens: int = msgspec.field(default=0, name="_prompt_tokens")


class TeiClassifier(msgspec.Struct, frozen=True):
    """Description of a classifier or a reranker in GET /info."""

    id2label: dict[int, str]


class TeiRankItem(msgspec.Struct, frozen=True):
    """One entry of POST /rerank, sorted by score; index is that of the document."""

    score: float
    index: int | None = None


class TeiLabelScore(msgspec.Struct, frozen=True):
    """One label of one input in POST /predict, sorted by score."""

    score: float
    label: str


class TeiTermWeight(msgspec.Struct, frozen=True):
    """One term of one input in POST /embed_sparse."""

    index: int
    value: float


class TeiErrorBody(msgspec.Struct, frozen=True):
    """Error body: `error` and `error_type` on native routes, `message` and `type` on the OpenAI route."""

    error: str | None = None
    error_type: str | None = None
    message: str | None = None
    type: str | None = None


def operations_and_outputs(model_type: dict[str, Any]) -> tuple[frozenset[Operation], frozenset[Output]]:
    """Return the operations and outputs of a model type.

    A SPLADE model has neither dense vectors nor token vectors.
    """
    free = {Operation.TOKENIZE, Operation.DETOKENIZE}
    embedding = model_type.get("embedding")
    if isinstance(embedding, dict):
        if embedding.get("pooling") == "splade":
            return frozenset({Operation.ENCODE, *free}), frozenset({Output.SPARSE})
        own = {Operation.EMBED, Operation.ENCODE, *free}
        return frozenset(own), frozenset({Output.DENSE, Output.TOKENS})
    if "reranker" in model_type:
        # Its /predict returns the one label, if /info has it.
        labelled = {Operation.CLASSIFY} if len(labels_of(model_type)) == 1 else set()
        return frozenset({Operation.RERANK, *labelled, *free}), frozenset()
    if labels_of(model_type):
        return frozenset({Operation.CLASSIFY, *free}), frozenset()
    return frozenset(free), frozenset()


def labels_of(model_type: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier or reranker in the order of their ids; of other models, none."""
    described = model_type.get("classifier", model_type.get("reranker"))
    try:
        classifier = msgspec.convert(described, TeiClassifier, strict=False)
    except msgspec.ValidationError:
        return ()
    return tuple(label for _, label in sorted(classifier.id2label.items()))


def capabilities(info: TeiInfo) -> Capabilities:
    """Convert TEI's /info to capabilities; /info does not contain the width of the vectors."""
    operations, outputs = operations_and_outputs(info.model_type)
    embedding = info.model_type.get("embedding")
    return Capabilities(
        model_id=info.model_id,
        operations=operations,
        max_input_tokens=info.max_input_length,
        batch_inputs=info.max_client_batch_size,
        batch_bytes=BATCH_BYTES,
        concurrent_inputs=info.max_concurrent_requests,
        pooling=_pooling(embedding),
        dtype=info.model_dtype,
        revision=info.model_sha,
        version=info.version,
        outputs=outputs,
        labels=labels_of(info.model_type),
        truncates=info.auto_truncate,
    )


def _pooling(embedding: Any) -> str | None:
    pooling = embedding.get("pooling") if isinstance(embedding, dict) else None
    return None if pooling is None else str(pooling)


def check_supported(work: Work, info: TeiInfo) -> None:
    """Check that this type of model offers the operation and outputs, and that the wire can state the work.

    Raises: UnsupportedWork.
    """
    check_no_instruction(work)
    check_no_max_tokens(work)
    check_no_late_chunking(work)
    check_plain_texts(work, "TEI")
    operations, outputs = operations_and_outputs(info.model_type)
    if isinstance(work, Encode):
        check_outputs(work, outputs)
    if work.operation not in operations:
        raise UnsupportedWork(f"this upstream's model does not {work.operation}")


def encode(work: Work, info: TeiInfo, *, base64: bool = True) -> tuple[str, Body]:
    """Return path and body of one piece of work; an Encode requests one kind of output.

    base64: the server has the OpenAI route, and base64 there.
    """
    match work:
        case Tokenize():
            body: Body = {"inputs": work.inputs, "add_special_tokens": work.add_special_tokens}
            return "/tokenize", body | _prompt(work.prompt_name)
        case Detokenize():
            return "/decode", {"ids": work.inputs, "skip_special_tokens": work.skip_special_tokens}
        case EmbedParts():
            raise refused_parts()
    return _encode_model_work(work.clip_texts(info.max_input_length), info, base64=base64)


def _encode_model_work(work: ModelWork, info: TeiInfo, *, base64: bool) -> tuple[str, Body]:
    cut = _truncation(work.truncate)
    match work:
        case Embed():
            return _encode_embed(work, info, base64=base64)
        case Encode():
            path = "/embed_sparse" if single_output(work) is Output.SPARSE else "/embed_all"
            return path, {"inputs": work.inputs} | cut | _prompt(work.prompt_name)
        case Rerank():
            body: Body = {"query": work.query, "texts": work.documents, "raw_scores": work.raw_scores}
            return "/rerank", body | cut
        case Score():
            return "/predict", {"inputs": work.pairs, "raw_scores": work.raw_scores} | cut
        case Classify():
            # TEI reads a list of two texts as one pair; only a list of lists is a batch.
            inputs = [(item,) if isinstance(item, str) else item for item in work.inputs]
            return "/predict", {"inputs": inputs, "raw_scores": work.raw_scores} | cut


def _encode_embed(work: Embed, info: TeiInfo, *, base64: bool) -> tuple[str, Body]:
    size: Body = {} if work.dimensions is None else {"dimensions": work.dimensions}
    # The OpenAI route offers base64, but it always normalizes, and its truncation is fixed at server start.
    if base64 and work.normalize and not work.prompt_name and _is_cut_alike(work, info):
        return EMBEDDINGS, {"input": work.inputs, "encoding_format": "base64"} | size
    body = {"inputs": work.inputs, "normalize": work.normalize} | _truncation(work.truncate)
    return "/embed", body | _prompt(work.prompt_name) | size


def _is_cut_alike(work: Embed, info: TeiInfo) -> bool:
    """Return True if a server cuts inputs at both routes as the request asks for, or has nothing to cut."""
    if info.auto_truncate and work.truncate is Truncate.RIGHT:
        return True
    if not info.auto_truncate and work.truncate is Truncate.ERROR:
        return True
    most = info.max_input_length - info.prompt_tokens
    return all(token_upper_bound(text) <= most for text in work.inputs)


def _truncation(truncate: Truncate) -> Body:
    if truncate is Truncate.ERROR:
        return {"truncate": False}
    # Capitalized, because releases before 1.3 accept no other spelling.
    return {"truncate": True, "truncation_direction": truncate.value.capitalize()}


def _prompt(name: str | None) -> Body:
    return {"prompt_name": name} if name else {}


def decode(work: Work, path: str, response: UpstreamResponse, info: TeiInfo) -> Reply:
    """Decode the reply in a response of status 200.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    with translate_decode_errors():
        match work:
            case Tokenize():
                lists = decode_json(response.body, list[list[Token]])
                _check_count(lists, work.inputs)
                return TokenizeReply(tuple(tuple(tokens) for tokens in lists))
            case Detokenize():
                texts = decode_json(response.body, list[str])
                _check_count(texts, work.inputs)
                return DetokenizeReply(tuple(texts))
            case Embed():
                return _decode_embed(work, path, response, info)
            case EmbedParts():
                raise refused_parts()
        return _decode_native(work, response, info)


def _check_count(entries: Sequence[object], inputs: Sequence[object]) -> None:
    if len(entries) != len(inputs):
        raise ReplicaFailed(f"asked for {len(inputs)} inputs, got {len(entries)}")


def _decode_embed(work: Embed, path: str, response: UpstreamResponse, info: TeiInfo) -> EmbedReply:
    vectors, tokens = _vectors(path, response, len(work.inputs))
    check_tokens(tokens, len(work.inputs), info.max_input_length)
    cut = truncated(work, tokens, info)
    return EmbedReply(apply_dimensions(vectors, work), tokens, cut)


def _decode_native(
    work: Encode | Rerank | Score | Classify, response: UpstreamResponse, info: TeiInfo
) -> Reply:
    expected = len(work.inputs)
    tokens = _header_tokens(response, expected)
    check_tokens(tokens, expected, info.max_input_length)
    cut = truncated(work, tokens, info)
    match work:
        case Rerank():
            ranks = decode_json(response.body, list[TeiRankItem])
            scores = order_scores([(rank.index, rank.score) for rank in ranks], expected, "")
            return RerankReply(scores, tokens, cut)
        case Score():
            return RerankReply(_pair_scores(response, expected), tokens, cut)
        case Classify():
            labels = labels_of(info.model_type)
            return ClassifyReply(labels, label_scores(_predictions(response), labels, expected), tokens, cut)
        case Encode():
            return _decode_encode(work, response, info, EncodeReply(tokens, truncated=cut))


def _predictions(response: UpstreamResponse) -> list[list[tuple[str, float]]]:
    lists = decode_json(response.body, list[list[TeiLabelScore]])
    return [[(item.label, item.score) for item in row] for row in lists]


def _pair_scores(response: UpstreamResponse, expected: int) -> Vectors:
    """Return one score per pair; a reranker has exactly one label, of any name."""
    rows = [[score for _, score in row] for row in _predictions(response)]
    return score_matrix(rows, expected, 1)[:, 0].copy()


def _decode_encode(
    work: Encode, response: UpstreamResponse, info: TeiInfo, empty: EncodeReply
) -> EncodeReply:
    if single_output(work) is Output.TOKENS:
        lists = decode_json(response.body, list[list[list[float]]])
        matrices = token_matrices(lists, len(work.inputs), info.max_input_length)
        return msgspec.structs.replace(empty, token_vectors=matrices)
    weights = decode_json(response.body, list[list[TeiTermWeight]])
    _check_count(weights, work.inputs)
    terms = tuple(term_weights((item.index, item.value) for item in row) for row in weights)
    return msgspec.structs.replace(empty, sparse=terms)


def truncated(work: ModelWork, tokens: int, info: TeiInfo) -> tuple[int, ...] | None:
    """Return () if certainly no input was cut, otherwise None."""
    # Only the server knows the text of a named prompt.
    prompt_known = not isinstance(work, Embed | Encode) or not work.prompt_name
    most, prompt_tokens = info.max_input_length, info.prompt_tokens
    return truncated_inputs(work, tokens, most, prompt_known=prompt_known, prompt_tokens=prompt_tokens)


def of_unknown_prompt(info: TeiInfo) -> TeiInfo:
    """Return the description of a server whose default prompt is not known: it may have any length."""
    return msgspec.structs.replace(info, prompt_tokens=info.max_input_length)


def with_counts(info: TeiInfo, work: Work, tokens: int) -> TeiInfo:
    """Return the description with what the tokens of a reply show of the server's default prompt.

    Each input has at least the tokens of the prompt. More tokens than the bytes of the inputs and the prompt
    known so far show that the server has another prompt now.
    """
    if not isinstance(work, Embed | Encode) or work.prompt_name or tokens <= 0:
        return info
    inputs, known = len(work.inputs), info.prompt_tokens
    most = max(0, tokens // inputs - SPECIAL_TOKENS)
    if most == known or (most > known and tokens <= _most_tokens(work.inputs, known)):
        return info
    return msgspec.structs.replace(info, prompt_tokens=most)


def _most_tokens(texts: Sequence[str], prompt_tokens: int) -> int:
    """Return the most tokens that texts with a prompt before each have."""
    return len(texts) * prompt_tokens + sum(map(token_upper_bound, texts))


def _vectors(path: str, response: UpstreamResponse, expected: int) -> tuple[Vectors, int]:
    if path == "/embed":
        vectors = float32(decode_json(response.body, list[list[float]]))
        check_vectors(vectors, expected)
        return vectors, _header_tokens(response, expected)
    vectors, tokens = decode_embeddings(response.body, expected)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    return vectors, tokens


def apply_dimensions(vectors: Vectors, work: Embed) -> Vectors:
    """Apply `dimensions` for releases before 1.8, which ignore the field."""
    is_applied = work.dimensions is None or vectors.shape[1] == work.dimensions
    return vectors if is_applied else fit_vectors(vectors, work)


def _header_tokens(response: UpstreamResponse, inputs: int) -> int:
    """Return the reported tokens, or 0 if there are none, two counts, or fewer than inputs."""
    value = response.headers.get("x-compute-tokens", "")
    # A larger number than any count is as invalid as none; int() of thousands of digits would be slow.
    tokens = int(value) if value.isascii() and value.isdecimal() and len(value) <= 18 else 0
    return tokens if tokens >= inputs else 0


def refuses_base64(response: UpstreamResponse) -> bool:
    """Return whether a server refused the encoding, or replied with no vector because it does not know it."""
    if response.status == 200:
        return is_without_vectors(response.body)
    words = words_of_error(response).lower()
    return response.status in {400, 415, 422} and ("base64" in words or "encoding_format" in words)


def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    return with_answer(_failure(response), response)


def _failure(response: UpstreamResponse) -> BackendError:
    try:
        body = msgspec.json.decode(response.body, type=TeiErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = TeiErrorBody()
    message = (body.error or body.message or "").removeprefix("Input validation error: ")
    kind = body.error_type or body.type
    match response.status:
        case 400 if kind == "Empty":
            return InvalidWork(message or "an input is empty", empty=True)
        case 413 | 422 if kind in ("Validation", "Tokenizer"):
            return InvalidWork(message or REFUSED_INPUT)
        case 429 if kind == "Overloaded":
            # TEI takes a permit per input. A proxy's 429 has another reason, and no such body.
            return PermitsTaken("the upstream is overloaded")
        case 400 if (error := error_of(response)).type in REFUSAL_TYPES:
            # Another gateway's /v1/embeddings.
            if "context length" in error.message:
                return input_too_long(context_length_in(error.message))
            return refused_input(error)
    return status_error(response)


class TeiBackend:
    """Client of one TEI server."""

    def __init__(self, http: UpstreamClient) -> None:
        self._http = http
        # As the server describes itself, and with what its replies show.
        self._described: TeiInfo | None = None
        self._info: TeiInfo | None = None
        # Of its vectors, which /info does not report; None before the first reply.
        self._width: int | None = None
        # False once the server has refused base64 and given numbers.
        self._base64 = True
        self._offers = OfferHistory()

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query GET /info.

        Raises: BackendError.
        """
        response = await self._http.get("/info", timeout_s)
        if response.status != 200:
            raise failure(response)
        try:
            described = decode_json(response.body, TeiInfo)
        except ReplicaFailed as error:
            raise ReplicaFailed("GET /info is not TEI's").with_facts(detail=error.detail) from error
        found = capabilities(described)
        self._offers.accept(found)
        if described != self._described:
            self._described, self._info, self._width = described, of_unknown_prompt(described), None
        return found

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work, in one request per kind of output.

        Raises: BackendError.
        """
        if self._info is None:
            raise ReplicaUnavailable("the replica has not joined")
        check_supported(work, self._info)
        if not isinstance(work, Encode):
            return await self._request(work, self._info, timeout_s)
        remaining_s = countdown(timeout_s)
        parts = split_outputs(work)
        return merge_replies([await self._request(part, self._info, remaining_s()) for part in parts])

    async def _request(self, work: Work, info: TeiInfo, timeout_s: float) -> Reply:
        path, body = encode(work, info, base64=self._base64)
        remaining_s = countdown(timeout_s)
        response = await self._send(work, path, body, remaining_s())
        if isinstance(work, Embed) and path == EMBEDDINGS and refuses_base64(response):
            path, body = encode(work, info, base64=False)
            response = await self._send(work, path, body, remaining_s())
            self._base64 = response.status != 200
        if response.status != 200:
            raise failure(response)
        reply = decode(work, path, response, info)
        learned = with_counts(info, work, reply.tokens)
        if learned is not info:
            self._info = learned
            reply = decode(work, path, response, learned)
        if isinstance(work, Embed) and isinstance(reply, EmbedReply) and work.dimensions is None:
            self._width = reply.vectors.shape[1]
        return reply

    async def _send(self, work: Work, path: str, body: Body, timeout_s: float) -> UpstreamResponse:
        width = self._width if isinstance(work, Embed) else None
        encoded = msgspec.json.encode(body)
        return await self._http.post(path, encoded, timeout_s, rows=rows_of(work), width=width)

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Read te_queue_size, the number of waiting inputs, from GET /metrics.

        Raises: BackendError.
        """
        response = await self._http.get("/metrics", timeout_s)
        waiting = read_gauge(response.body, "te_queue_size") if response.status == 200 else None
        return None if waiting is None else QueueDepth(round(waiting))

    def drop_connections(self) -> None:
        """Close the idle connections to the server."""
        self._http.drop_connections()

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> Backend:
    """Return a client of the TEI server at the spec's base URL, over HTTP or over gRPC."""
    if spec.address.startswith(GRPC_SCHEMES):
        # Imported here, because it needs the packages of an extra.
        return cast("Backend", import_module("backends.tei.grpc_adapter").open_replica(spec))
    return TeiBackend(open_client(spec))
