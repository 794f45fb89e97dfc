"""Text Embeddings Inference over HTTP: wire structs, pure encode and decode, then a few lines of I/O.

Source: huggingface/text-embeddings-inference at 1.9.3 (router/src/http/types.rs, server.rs); statuses of
older releases where they differ (Validation was 413 up to 1.8.3).
Rule: never send null; TEI refuses it for most fields.
"""

from typing import Any

import msgspec

from backends.contract import (
    Capabilities,
    Embed,
    Embedded,
    Load,
    Operation,
    ReplicaSpec,
    Reply,
    Rerank,
    Reranked,
    Token,
    Tokenize,
    Tokenized,
    Truncate,
    Vectors,
    Work,
)
from backends.errors import BackendError, Failed, InvalidWork, Overloaded, Unavailable, UnsupportedWork
from backends.http import Answer, HttpDoor
from backends.openai_wire import decode_embeddings
from backends.replies import (
    check_tokens,
    check_vectors,
    fitted,
    float32,
    gauge,
    readable,
    scores_in_order,
    truncated,
)
from backends.texts import precut

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


class Rank(msgspec.Struct, frozen=True):
    """One entry of POST /rerank; sorted by score, index is the document's."""

    index: int
    score: float


class ErrorBody(msgspec.Struct, frozen=True):
    """`error` and `error_type` on native routes, `message` and `type` on the OpenAI route."""

    error: str | None = None
    error_type: str | None = None
    message: str | None = None
    type: str | None = None


def capabilities(info: Info) -> Capabilities:
    """What TEI's /info says, in the contract's words; it does not tell the vectors' width."""
    embedding = info.model_type.get("embedding")
    own: set[Operation] = {Operation.TOKENIZE}
    pooling = None
    if isinstance(embedding, dict):
        pooling = str(embedding.get("pooling"))
        # A SPLADE model has no dense vectors to give.
        own |= set() if pooling == "splade" else {Operation.EMBED}
    elif "reranker" in info.model_type:
        own.add(Operation.RERANK)
    return Capabilities(
        model_id=info.model_id,
        operations=frozenset(own),
        max_input_tokens=info.max_input_length,
        batch_inputs=info.max_client_batch_size,
        batch_bytes=BATCH_BYTES,
        concurrent_inputs=info.max_concurrent_requests,
        pooling=pooling,
        dtype=info.model_dtype,
        revision=info.model_sha,
        version=info.version,
    )


def encode(work: Work, info: Info) -> tuple[str, Body]:
    """Path and body of one piece of work."""
    match work:
        case Embed():
            return _encode_embed(work, info)
        case Rerank():
            texts = [precut(one, info.max_input_length, work.truncate) for one in work.documents]
            query = precut(work.query, info.max_input_length, work.truncate)
            body: Body = {"query": query, "texts": texts, "raw_scores": work.raw_scores}
            return "/rerank", body | _truncation(work.truncate)
        case Tokenize():
            body = {"inputs": work.inputs, "add_special_tokens": work.add_special_tokens}
            return "/tokenize", body | _prompt(work.prompt_name)
    raise UnsupportedWork("this upstream's wire does not do that")


def _encode_embed(work: Embed, info: Info) -> tuple[str, Body]:
    inputs = [precut(one, info.max_input_length, work.truncate) for one in work.inputs]
    size: Body = {} if work.dimensions is None else {"dimensions": work.dimensions}
    # The OpenAI route has base64, but always normalizes, and truncates as the server was started.
    as_started = info.auto_truncate and work.truncate is Truncate.RIGHT
    if work.normalize and not work.prompt_name and as_started:
        return "/v1/embeddings", {"input": inputs, "encoding_format": "base64"} | size
    body = {"inputs": inputs, "normalize": work.normalize} | _truncation(work.truncate)
    return "/embed", body | _prompt(work.prompt_name) | size


def _truncation(truncate: Truncate) -> Body:
    if truncate is Truncate.ERROR:
        return {"truncate": False}
    # Capitalised: releases before 1.3 know no other spelling.
    return {"truncate": True, "truncation_direction": truncate.value.capitalize()}


def _prompt(name: str | None) -> Body:
    return {"prompt_name": name} if name else {}


def decode(work: Work, path: str, answer: Answer, info: Info) -> Reply:
    """The reply in an answer of status 200.

    Raises: Failed where it is not an answer to this work.
    """
    longest = info.max_input_length
    with readable():
        match work:
            case Embed():
                vectors, tokens = _vectors(path, answer, len(work.inputs))
                check_tokens(tokens, len(work.inputs), longest)
                unprompted = not work.prompt_name
                cut = truncated(work, tokens, longest, prompt_known=unprompted)
                return Embedded(_fitted(vectors, work), tokens, cut)
            case Rerank():
                ranks = msgspec.json.decode(answer.body, type=list[Rank])
                tokens = _header_tokens(answer)
                check_tokens(tokens, len(work.documents), longest)
                scores = scores_in_order([(one.index, one.score) for one in ranks], len(work.documents))
                return Reranked(scores, tokens, truncated(work, tokens, longest))
            case Tokenize():
                lists = msgspec.json.decode(answer.body, type=list[list[Token]])
                if len(lists) != len(work.inputs):
                    raise Failed(f"asked for {len(work.inputs)} inputs, got {len(lists)}")
                return Tokenized(tuple(tuple(one) for one in lists))
    raise UnsupportedWork("this upstream's wire does not do that")


def _vectors(path: str, answer: Answer, expected: int) -> tuple[Vectors, int]:
    if path == "/embed":
        vectors = float32(msgspec.json.decode(answer.body, type=list[list[float]]))
        check_vectors(vectors, expected)
        return vectors, _header_tokens(answer)
    vectors, tokens = decode_embeddings(answer.body, expected)
    if tokens is None:
        raise Failed("the upstream told no usage")
    return vectors, tokens


def _fitted(vectors: Vectors, work: Embed) -> Vectors:
    """Releases before 1.8 know no `dimensions` and ignore it: do here what they did not."""
    done = work.dimensions is None or vectors.shape[1] == work.dimensions
    return vectors if done else fitted(vectors, work)


def _header_tokens(answer: Answer) -> int:
    value = answer.headers.get("x-compute-tokens", "0")
    return int(value) if value.isdecimal() else 0


def failure(answer: Answer) -> BackendError:
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
            return Overloaded("the upstream is overloaded")
        case 503:
            return Unavailable("the upstream says it is not ready")
        case 401 | 403:
            return Failed("the upstream refused the gateway's credential")
    return Failed(f"the upstream answered with status {answer.status}")


class TeiBackend:
    """One TEI server."""

    def __init__(self, http: HttpDoor) -> None:
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
            raise Failed("GET /info is not TEI's") from error
        return capabilities(self._info)

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._info is None:
            raise Unavailable("the replica has not joined")
        path, body = encode(work, self._info)
        answer = await self._http.post(path, msgspec.json.encode(body), timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return decode(work, path, answer, self._info)

    async def load(self, timeout_s: float) -> Load | None:
        """te_queue_size counts inputs that wait. Raises: BackendError."""
        answer = await self._http.get("/metrics", timeout_s)
        waiting = gauge(answer.body, "te_queue_size") if answer.status == 200 else None
        return None if waiting is None else Load(round(waiting))

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> TeiBackend:
    """The TEI server at the spec's base URL."""
    return TeiBackend(HttpDoor(spec.address, spec.headers, tls=spec.tls, ip=spec.ip))
