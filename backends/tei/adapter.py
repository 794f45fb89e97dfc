"""Adapter of Text Embeddings Inference (TEI): wire structs, pure encode and decode functions, then the I/O.

Source: huggingface/text-embeddings-inference at 1.9.3 (router/src/http/types.rs, server.rs), and the statuses
of older releases if they differ (Validation was 413 up to 1.8.3).
Rule: never send null, because TEI refuses it for most fields.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from backends.contract import (
    FREE_OPERATIONS,
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
    Operation,
    Output,
    QueueDepth,
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
)
from backends.contract.texts import SPECIAL_TOKENS, surely_fits, token_upper_bound
from backends.http.adapters import (
    HttpBackend,
    Route,
    Routes,
    check_outputs,
    operations_in,
    route_of,
    run_outputs,
    single_output,
)
from backends.http.answers import decode_json, translate_decode_errors, words_of_error
from backends.http.client import UpstreamClient, UpstreamResponse, countdown
from backends.http.offers import OfferHistory
from backends.http.openai_wire import (
    REFUSAL_TYPES,
    REFUSED_INPUT,
    context_length_in,
    decode_embeddings,
    error_of,
    is_without_vectors,
    refused_input,
)
from backends.http.replies import (
    check_tokens,
    check_vectors,
    fit_vectors,
    float32,
    label_scores,
    order_scores,
    read_queue_depth,
    score_matrix,
    term_weights,
    token_matrices,
    truncated_inputs,
)
from backends.http.statuses import status_error, with_answer

# TEI's --payload-limit is 2,000,000 by default, and no route reports it. The margin is for the other fields.
REQUEST_BYTES = 1_990_000
EMBEDDINGS = "/v1/embeddings"
# Source: text-embeddings-inference 1.9.3, core/src/tokenization.rs.
REFUSAL_PREFIX = "Input validation error: "
TOO_LONG = re.compile(r"must have less than (?P<most>\d{1,9}) tokens\. Given: (?P<tokens>\d{1,9})")

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


def operations_and_outputs(
    model_type: dict[str, Any], routes: Routes
) -> tuple[frozenset[Operation], frozenset[Output]]:
    """Return the operations that a model type has and a wire's table carries, and the outputs.

    A SPLADE model has neither dense vectors nor token vectors.
    """
    own: set[Operation] = set()
    outputs: frozenset[Output] = frozenset()
    embedding, labels = model_type.get("embedding"), labels_of(model_type)
    if isinstance(embedding, dict) and embedding.get("pooling") == "splade":
        own, outputs = {Operation.ENCODE}, frozenset({Output.SPARSE})
    elif isinstance(embedding, dict):
        own, outputs = {Operation.EMBED, Operation.ENCODE}, frozenset({Output.DENSE, Output.TOKENS})
    elif "reranker" in model_type:
        # Its /predict returns the one label, if /info has it.
        own = {Operation.RERANK, Operation.CLASSIFY} if len(labels) == 1 else {Operation.RERANK}
    elif labels:
        own = {Operation.CLASSIFY}
    return operations_in(routes) & (own | FREE_OPERATIONS), outputs


def labels_of(model_type: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier or reranker in the order of their ids; of other models, none."""
    described = model_type.get("classifier", model_type.get("reranker"))
    try:
        classifier = msgspec.convert(described, TeiClassifier, strict=False)
    except msgspec.ValidationError:
        return ()
    return tuple(label for _, label in sorted(classifier.id2label.items()))


def capabilities(info: TeiInfo, routes: Routes) -> Capabilities:
    """Convert TEI's /info to capabilities; it lacks the width of the vectors. routes: of the wire."""
    operations, outputs = operations_and_outputs(info.model_type, routes)
    embedding = info.model_type.get("embedding")
    return Capabilities(
        model_id=info.model_id,
        operations=operations,
        max_input_tokens=info.max_input_length,
        request_inputs=info.max_client_batch_size,
        request_bytes=REQUEST_BYTES,
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


def check_supported(work: Work, info: TeiInfo, routes: Routes) -> None:
    """Check that this type of model offers the operation and outputs, and that the wire can state the work.

    routes: of the wire.

    Raises: UnsupportedWork.
    """
    check_no_instruction(work)
    check_no_max_tokens(work)
    check_no_late_chunking(work)
    check_plain_texts(work, "TEI")
    operations, outputs = operations_and_outputs(info.model_type, routes)
    if isinstance(work, Encode):
        check_outputs(work, outputs)
    if work.operation not in operations:
        raise UnsupportedWork(f"this upstream's model does not {work.operation}")


# --- requests: path and body of each kind of work


def encode(work: Work, info: TeiInfo, *, base64: bool = True) -> tuple[str, Body]:
    """Return path and body of one piece of work; an Encode requests one kind of output.

    base64: the server has the OpenAI route, and base64 there. Raises: UnsupportedWork.
    """
    route = route_of(work, ROUTES)
    ready: Any = work if work.is_free else work.clip_texts(info.max_input_length)
    if isinstance(ready, Embed) and base64 and _takes_openai_route(ready, info):
        return EMBEDDINGS, {"input": ready.inputs, "encoding_format": "base64"} | _size(ready)
    return route.encode(ready)


def _encode_embed(work: Embed) -> tuple[str, Body]:
    body = {"inputs": work.inputs, "normalize": work.normalize} | _cut(work) | _prompt(work)
    return "/embed", body | _size(work)


def _encode_output(work: Encode) -> tuple[str, Body]:
    path = "/embed_sparse" if single_output(work) is Output.SPARSE else "/embed_all"
    return path, {"inputs": work.inputs} | _cut(work) | _prompt(work)


def _encode_rerank(work: Rerank) -> tuple[str, Body]:
    body: Body = {"query": work.query, "texts": work.documents, "raw_scores": work.raw_scores}
    return "/rerank", body | _cut(work)


def _encode_score(work: Score) -> tuple[str, Body]:
    return "/predict", {"inputs": work.pairs, "raw_scores": work.raw_scores} | _cut(work)


def _encode_classify(work: Classify) -> tuple[str, Body]:
    # TEI reads a list of two texts as one pair; only a list of lists is a batch.
    inputs = [(item,) if isinstance(item, str) else item for item in work.inputs]
    return "/predict", {"inputs": inputs, "raw_scores": work.raw_scores} | _cut(work)


def _encode_tokenize(work: Tokenize) -> tuple[str, Body]:
    body: Body = {"inputs": work.inputs, "add_special_tokens": work.add_special_tokens}
    return "/tokenize", body | _prompt(work)


def _encode_detokenize(work: Detokenize) -> tuple[str, Body]:
    return "/decode", {"ids": work.inputs, "skip_special_tokens": work.skip_special_tokens}


def _takes_openai_route(work: Embed, info: TeiInfo) -> bool:
    """Return whether the OpenAI route, which offers base64, computes what is asked for.

    It always normalizes, and its truncation is fixed at server start.
    """
    if not work.normalize or work.prompt_name:
        return False
    if work.truncate is (Truncate.RIGHT if info.auto_truncate else Truncate.ERROR):
        return True
    # Neither route has something to cut.
    return surely_fits(work.inputs, info.max_input_length - info.prompt_tokens)


def _cut(work: ModelWork) -> Body:
    if work.truncate is Truncate.ERROR:
        return {"truncate": False}
    # Capitalized, because releases before 1.3 accept no other spelling.
    return {"truncate": True, "truncation_direction": work.truncate.value.capitalize()}


def _prompt(work: Embed | Encode | Tokenize) -> Body:
    return {"prompt_name": work.prompt_name} if work.prompt_name else {}


def _size(work: Embed) -> Body:
    return {} if work.dimensions is None else {"dimensions": work.dimensions}


# --- replies


def decode(work: Work, path: str, response: UpstreamResponse, info: TeiInfo) -> Reply:
    """Decode the reply in a response of status 200. path: of its request.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    with translate_decode_errors():
        decode_reply = _decode_openai if path == EMBEDDINGS else route_of(work, ROUTES).decode
        return decode_reply(cast("Any", work), response, info)


def _decode_openai(work: Embed, response: UpstreamResponse, info: TeiInfo) -> EmbedReply:
    vectors, tokens = decode_embeddings(response.body, len(work.inputs))
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    check_tokens(tokens, len(work.inputs), info.max_input_length)
    return EmbedReply(apply_dimensions(vectors, work), tokens, truncated(work, tokens, info))


def _decode_embed(work: Embed, response: UpstreamResponse, info: TeiInfo) -> EmbedReply:
    vectors = float32(decode_json(response.body, list[list[float]]))
    check_vectors(vectors, len(work.inputs))
    return EmbedReply(apply_dimensions(vectors, work), *_counted(work, response, info))


def _decode_output(work: Encode, response: UpstreamResponse, info: TeiInfo) -> EncodeReply:
    tokens, cut = _counted(work, response, info)
    if single_output(work) is Output.TOKENS:
        lists = decode_json(response.body, list[list[list[float]]])
        matrices = token_matrices(lists, len(work.inputs), info.max_input_length)
        return EncodeReply(tokens, token_vectors=matrices, truncated=cut)
    weights = decode_json(response.body, list[list[TeiTermWeight]])
    _check_count(weights, work.inputs)
    terms = tuple(term_weights((item.index, item.value) for item in row) for row in weights)
    return EncodeReply(tokens, sparse=terms, truncated=cut)


def _decode_rerank(work: Rerank, response: UpstreamResponse, info: TeiInfo) -> RerankReply:
    counted = _counted(work, response, info)
    ranks = decode_json(response.body, list[TeiRankItem])
    scores = order_scores([(rank.index, rank.score) for rank in ranks], len(work.documents), "")
    return RerankReply(scores, *counted)


def _decode_score(work: Score, response: UpstreamResponse, info: TeiInfo) -> RerankReply:
    counted = _counted(work, response, info)
    return RerankReply(pair_scores(_predictions(response), len(work.pairs)), *counted)


def _decode_classify(work: Classify, response: UpstreamResponse, info: TeiInfo) -> ClassifyReply:
    counted, labels = _counted(work, response, info), labels_of(info.model_type)
    return ClassifyReply(labels, label_scores(_predictions(response), labels, len(work.inputs)), *counted)


def _decode_tokenize(work: Tokenize, response: UpstreamResponse, _info: TeiInfo) -> TokenizeReply:
    lists = decode_json(response.body, list[list[Token]])
    _check_count(lists, work.inputs)
    return TokenizeReply(tuple(map(tuple, lists)))


def _decode_detokenize(work: Detokenize, response: UpstreamResponse, _info: TeiInfo) -> DetokenizeReply:
    texts = decode_json(response.body, list[str])
    _check_count(texts, work.inputs)
    return DetokenizeReply(tuple(texts))


def _check_count(entries: Sequence[object], inputs: Sequence[object]) -> None:
    if len(entries) != len(inputs):
        raise ReplicaFailed(f"asked for {len(inputs)} inputs, got {len(entries)}")


def _predictions(response: UpstreamResponse) -> list[list[tuple[str, float]]]:
    lists = decode_json(response.body, list[list[TeiLabelScore]])
    return [[(item.label, item.score) for item in row] for row in lists]


def pair_scores(predictions: Sequence[Sequence[tuple[str, float]]], expected: int) -> Vectors:
    """Return one score per pair; a reranker has exactly one label, of any name. Raises: ReplicaFailed."""
    rows = [[score for _, score in row] for row in predictions]
    return score_matrix(rows, expected, 1)[:, 0].copy()


def _counted(
    work: ModelWork, response: UpstreamResponse, info: TeiInfo
) -> tuple[int, tuple[int, ...] | None]:
    """Return the tokens that a native route reports, and the truncated inputs. Raises: ReplicaFailed."""
    inputs = len(work.inputs)
    tokens = _header_tokens(response, inputs)
    check_tokens(tokens, inputs, info.max_input_length)
    return tokens, truncated(work, tokens, info)


ROUTES: Routes = {
    Embed: Route(_encode_embed, _decode_embed),
    Encode: Route(_encode_output, _decode_output),
    Rerank: Route(_encode_rerank, _decode_rerank),
    Score: Route(_encode_score, _decode_score),
    Classify: Route(_encode_classify, _decode_classify),
    Tokenize: Route(_encode_tokenize, _decode_tokenize),
    Detokenize: Route(_encode_detokenize, _decode_detokenize),
}


# --- what replies show of a server


def truncated(work: ModelWork, tokens: int, info: TeiInfo) -> tuple[int, ...] | None:
    """Return () if certainly no input was cut, otherwise None."""
    # Only the server knows the text of a named prompt.
    prompt_known = not work.prompt_name
    most, prompt_tokens = info.max_input_length, info.prompt_tokens
    return truncated_inputs(work, tokens, most, prompt_known=prompt_known, prompt_tokens=prompt_tokens)


def with_counts(info: TeiInfo, work: Work, tokens: int) -> TeiInfo:
    """Return the description with what the tokens of a reply show of the server's default prompt.

    Each input has at least the tokens of the prompt. More tokens than the bytes of the inputs and the prompt
    known so far show that the server has another prompt now.
    """
    if not work.has_prompt or work.prompt_name or tokens <= 0:
        return info
    inputs, known = len(work.inputs), info.prompt_tokens
    most = max(0, tokens // inputs - SPECIAL_TOKENS)
    if most == known or (most > known and tokens <= _most_tokens(cast("Sequence[str]", work.inputs), known)):
        return info
    return msgspec.structs.replace(info, prompt_tokens=most)


def _most_tokens(texts: Sequence[str], prompt_tokens: int) -> int:
    """Return the most tokens that texts with a prompt before each have."""
    return len(texts) * prompt_tokens + sum(map(token_upper_bound, texts))


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


def refusal(message: str, *, empty: bool = False) -> InvalidWork:
    """Return the refusal of an input in TEI's words, except of one that is too long."""
    message = message.removeprefix(REFUSAL_PREFIX)
    if (found := TOO_LONG.search(message)) is not None:
        return input_too_long(int(found["most"]), f"{found['tokens']} tokens")
    return InvalidWork(message or REFUSED_INPUT, empty=empty)


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    try:
        body = msgspec.json.decode(response.body, type=TeiErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = TeiErrorBody()
    message = body.error or body.message or ""
    kind = body.error_type or body.type
    match response.status:
        case 400 if kind == "Empty":
            return refusal(message or "an input is empty", empty=True)
        case 413 | 422 if kind in ("Validation", "Tokenizer"):
            return refusal(message)
        case 429 if kind == "Overloaded":
            # TEI takes a permit per input. A proxy's 429 has another reason, and no such body.
            return PermitsTaken("the upstream is overloaded")
        case 400 if (error := error_of(response)).type in REFUSAL_TYPES:
            # Another gateway's /v1/embeddings.
            if "context length" in error.message:
                return input_too_long(context_length_in(error.message))
            return refused_input(error)
    return status_error(response)


class TeiServer:
    """One TEI server over either wire. routes: the wire's table."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._offers = OfferHistory()
        # As the server reports it, None before it has joined.
        self._description: TeiInfo | None = None
        # The description with what replies show.
        self._info: TeiInfo | None = None

    def _join(self, description: TeiInfo, found: Capabilities) -> bool:
        """Accept a description, and return whether it is a new one. Raises: ReplicaFailed."""
        self._offers.accept(found)
        if description == self._description:
            return False
        # The default prompt of a server may have any length, until replies show it.
        self._description = description
        self._info = msgspec.structs.replace(description, prompt_tokens=description.max_input_length)
        return True

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work, in one request per kind of output.

        Raises: BackendError.
        """
        if self._info is None:
            raise ReplicaUnavailable("the replica has not joined")
        check_supported(work, self._info, self._routes)
        return await run_outputs(work, self._request, timeout_s)

    async def _request(self, work: Work, timeout_s: float) -> Reply:
        info = self._info
        assert info is not None
        decode_with = await self._exchange(work, info, timeout_s)
        reply = decode_with(info)
        learned = with_counts(info, work, reply.tokens)
        if learned is not info:
            self._info = learned
            reply = decode_with(learned)
        return reply

    async def _exchange(self, work: Work, info: TeiInfo, timeout_s: float) -> Callable[[TeiInfo], Reply]:
        """Send one piece of work and return the decoder of its reply. Raises: BackendError."""
        raise NotImplementedError


class TeiBackend(TeiServer, HttpBackend):
    """Client of one TEI server over HTTP."""

    def __init__(self, http: UpstreamClient) -> None:
        TeiServer.__init__(self, ROUTES)
        HttpBackend.__init__(self, http)
        # Of its vectors, which /info does not report; None before the first reply.
        self._width: int | None = None
        # False once the server has refused base64 and given numbers.
        self._base64 = True

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
        found = capabilities(described, ROUTES)
        if self._join(described, found):
            self._width = None
        return found

    async def _exchange(self, work: Work, info: TeiInfo, timeout_s: float) -> Callable[[TeiInfo], Reply]:
        path, body = encode(work, info, base64=self._base64)
        remaining_s = countdown(timeout_s)
        response = await self._send(work, path, body, remaining_s())
        if path == EMBEDDINGS and refuses_base64(response):
            path, body = encode(work, info, base64=False)
            response = await self._send(work, path, body, remaining_s())
            self._base64 = response.status != 200
        if response.status != 200:
            raise failure(response)
        return partial(self._decode, work, path, body, response)

    def _decode(self, work: Work, path: str, body: Body, response: UpstreamResponse, info: TeiInfo) -> Reply:
        reply = decode(work, path, response, info)
        if "dimensions" not in body and reply.dense_vectors is not None:
            self._width = reply.dense_vectors.shape[1]
        return reply

    async def _send(self, work: Work, path: str, body: Body, timeout_s: float) -> UpstreamResponse:
        width = self._width if work.operation is Operation.EMBED else None
        encoded = msgspec.json.encode(body)
        return await self._http.post(path, encoded, timeout_s, rows=work.reply_rows, width=width)

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Read te_queue_size, the number of waiting inputs, from GET /metrics.

        Raises: BackendError.
        """
        return await read_queue_depth(self._http, "te_queue_size", timeout_s)
