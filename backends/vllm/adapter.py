"""Adapter of vLLM's pooling server: pure encode and decode functions, then the I/O.

The wire is in `wire.py`, and the detection of a server's features in `probe.py`.
Rule: request raw vectors if the server offers them, and truncate and normalize them here. The switch for
normalization has had three names, and most models refuse `dimensions`.
"""

from contextlib import suppress
from functools import lru_cache, partial
from typing import TypeAlias

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Chat,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedChunks,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    ModelWork,
    Operation,
    Output,
    PartsPair,
    Places,
    QueueDepth,
    ReplicaSpec,
    Reply,
    Rerank,
    RerankReply,
    Score,
    ScoreParts,
    TermWeights,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Truncate,
    Vectors,
    Work,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
    input_too_long,
)
from backends.contract.refusals import check_no_instruction, refused_chunks, refused_pairs
from backends.contract.vectors import shape_vectors, sigmoid
from backends.http.adapters import HttpBackend, Route, Routes, check_outputs, run_outputs, single_output
from backends.http.answers import decode_json
from backends.http.client import SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown, open_client
from backends.http.media import check_media
from backends.http.offers import OfferHistory
from backends.http.openai_wire import (
    Base64Switch,
    choose_model,
    decode_embeddings,
    decode_models,
)
from backends.http.replies import (
    check_dimensions,
    check_reported_cuts,
    check_tokens,
    fit_vectors,
    read_queue_depth,
    run_some,
    term_weights,
    truncated_inputs,
)
from backends.tokens.counting import TokenCounter, apply_prompt, open_token_counter
from backends.vllm.probe import VllmProfile, capabilities, labels_of, media_operations, probe_features
from backends.vllm.wire import (
    BASE64,
    CLASSIFY,
    DETOKENIZE,
    EMBEDDINGS,
    POOLING,
    SCORE,
    TOKENIZE,
    Body,
    VersionResponse,
    decode_classes,
    decode_detokenize,
    decode_scores,
    decode_token_vectors,
    decode_tokenize,
    explain_refusal,
    failure,
    input_fields,
    parts_body,
    restore_status,
    side_of,
    tokenize_body,
    tokens_of,
)

# Release whose /classify reads `add_special_tokens`; earlier ones ignore it.
CLASSIFIES_BARE_TEXTS = (0, 12)
# Requests with one input each that a piece of work sends at once.
PARTS_IN_FLIGHT = 8
Labels: TypeAlias = tuple[str, ...]


def encode(work: ModelWork, profile: VllmProfile) -> tuple[str, Body]:
    """Return path and body of one piece of work; an Encode requests one kind of output.

    Raises: UnsupportedWork, if this release would not execute the work as requested.
    """
    # 0.8.5 refuses a truncate_prompt_tokens of -1. `truncation_side` is not used, because it also cuts off a
    # special token, and a model that pools that token would return a different vector.
    can_truncate = work.truncate is Truncate.RIGHT
    if work.max_tokens is not None and work.truncate is Truncate.LEFT:
        raise UnsupportedWork("this upstream cuts the right end of an input only")
    if can_truncate and work.conversation is None:
        work = work.clip_texts(profile.max_tokens)
    path, body = ROUTES[type(work)].encode(work, profile)
    cut: Body = {"truncate_prompt_tokens": _length_of(work, profile)} if can_truncate else {}
    return path, {"model": profile.model} | body | cut


def _length_of(work: ModelWork, profile: VllmProfile) -> int:
    """Return the tokens that an input is cut at."""
    return min(work.max_tokens or profile.max_tokens, profile.max_tokens)


def _encode_embed(work: Embed, profile: VllmProfile) -> tuple[str, Body]:
    check_dimensions(work, profile.width)
    if profile.width is None:
        raise UnsupportedWork("this upstream gives no vectors")
    if not work.normalize and profile.raw_vectors is None:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    switch: Body = {profile.raw_vectors: False} if profile.raw_vectors else {}
    return EMBEDDINGS, input_fields(work) | BASE64 | switch


def _encode_outputs(work: Encode, profile: VllmProfile) -> tuple[str, Body]:
    check_outputs(work, profile.outputs)
    if single_output(work) is Output.SPARSE:
        return EMBEDDINGS, input_fields(work) | BASE64
    raw: Body = {"use_activation": False} if single_output(work) is Output.TOKENS else {}
    return POOLING, input_fields(work) | {"task": "token_embed"} | raw


def _encode_rerank(work: Rerank, profile: VllmProfile) -> tuple[str, Body]:
    return _encode_pairs((work.query,), work.documents, work, profile)


def _encode_score(work: Score, profile: VllmProfile) -> tuple[str, Body]:
    queries, documents = zip(*work.pairs, strict=True)
    return _encode_pairs(queries, documents, work, profile)


def _encode_pairs(
    queries: tuple[str, ...], documents: tuple[str, ...], work: Rerank | Score, profile: VllmProfile
) -> tuple[str, Body]:
    """Return a request to /v1/score with the two field names that every release knows."""
    options = _score_options(work, profile)
    # vLLM scores an empty second text as a single text, without the second separator.
    second_texts = tuple(text or " " for text in documents)
    first_texts = queries[0] if len(queries) == 1 else queries
    return SCORE, {"text_1": first_texts, "text_2": second_texts} | options


def _score_options(work: Rerank | Score | ScoreParts, profile: VllmProfile) -> Body:
    """Return the fields of a request for scores next to its pairs. Raises: UnsupportedWork."""
    if profile.scores is None:
        raise UnsupportedWork("this upstream gives no scores")
    if work.raw_scores and profile.scores == "sigmoid":
        raise UnsupportedWork("this upstream gives no raw scores")
    if not profile.instructed:
        check_no_instruction(work)
    instruction: Body = {} if work.instruction is None else {"instruction": work.instruction}
    return {"use_activation": False} | instruction


def _encode_classify(work: Classify, profile: VllmProfile) -> tuple[str, Body]:
    if not profile.classes:
        raise UnsupportedWork("this upstream's model is no classifier")
    if work.single_texts is None:
        raise UnsupportedWork("this upstream's wire classifies single texts, not pairs")
    if work.raw_scores and not profile.raw_classes:
        raise UnsupportedWork("this upstream gives no raw scores")
    if not (work.special_tokens or work.chat) and profile.release < CLASSIFIES_BARE_TEXTS:
        raise UnsupportedWork("this vLLM release ignores `add_special_tokens` at /classify: leave it out")
    return CLASSIFY, input_fields(work) | {"use_activation": not work.raw_scores}


def decode(
    work: ModelWork, response: UpstreamResponse, profile: VllmProfile, labels: tuple[str, ...] = ()
) -> Reply:
    """Decode the reply in a response of status 200. labels: those of a classifier.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    return ROUTES[type(work)].decode(work, response, profile, labels)


def _decode_embed(work: Embed, response: UpstreamResponse, profile: VllmProfile, _: Labels) -> EmbedReply:
    vectors, tokens = decode_embeddings(response.body, len(work.inputs))
    return EmbedReply(fit_vectors(vectors, work), *_check_usage(tokens, work, profile))


def _decode_pairs(
    work: Rerank | Score, response: UpstreamResponse, profile: VllmProfile, _: Labels
) -> RerankReply:
    scores, reported = decode_scores(response, len(work.inputs))
    tokens, cut = _check_usage(reported, work, profile)
    return _ranked(scores, tokens, cut, work, profile)


def _ranked(
    scores: Vectors, tokens: int, cut: Places | None, work: Rerank | Score | ScoreParts, profile: VllmProfile
) -> RerankReply:
    """Return the reply of scores as the server gives them."""
    if work.raw_scores or profile.scores == "sigmoid":
        return RerankReply(scores, tokens, cut)
    return RerankReply(sigmoid(scores), tokens, cut, scores)


def _decode_classify(
    work: Classify, response: UpstreamResponse, profile: VllmProfile, labels: Labels
) -> ClassifyReply:
    scores, tokens = decode_classes(response, len(work.inputs), profile.classes)
    return ClassifyReply(labels, scores, *_check_usage(tokens, work, profile))


def _decode_outputs(work: Encode, response: UpstreamResponse, profile: VllmProfile, _: Labels) -> EncodeReply:
    expected, output = len(work.inputs), single_output(work)
    if output is Output.SPARSE:
        weights, reported = decode_embeddings(response.body, expected)
        tokens, cut = _check_usage(reported, work, profile)
        return EncodeReply(tokens, sparse=tuple(map(_nonzero_terms, weights)), truncated=cut)
    matrices, reported = decode_token_vectors(response, expected, profile.max_tokens)
    tokens, cut = _check_usage(reported, work, profile)
    if output is Output.TOKENS:
        return EncodeReply(tokens, token_vectors=matrices, truncated=cut)
    return EncodeReply(tokens, multivector=matrices, truncated=cut)


def _nonzero_terms(weights: Vectors) -> TermWeights:
    """Convert one input's weights of the whole vocabulary to the weights of its terms."""
    terms = np.flatnonzero(weights)
    return term_weights(zip(terms.tolist(), weights[terms].tolist(), strict=True))


def _check_usage(
    tokens: int | None, work: ModelWork, profile: VllmProfile
) -> tuple[int, tuple[int, ...] | None]:
    """Return the reported tokens, if they are plausible, and the truncated inputs.

    Raises: ReplicaFailed.
    """
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    # A server with chunked processing reads a whole input of any length, unless it was asked to cut it.
    most = None if work.truncate is Truncate.ERROR else _length_of(work, profile)
    check_tokens(tokens, len(work.inputs), most)
    can_truncate = work.truncate is Truncate.RIGHT
    return tokens, truncated_inputs(work, tokens, _length_of(work, profile)) if can_truncate else ()


ROUTES: Routes = {
    Embed: Route(_encode_embed, _decode_embed),
    Encode: Route(_encode_outputs, _decode_outputs),
    Rerank: Route(_encode_rerank, _decode_pairs),
    Score: Route(_encode_score, _decode_pairs),
    Classify: Route(_encode_classify, _decode_classify),
}


def error_for(work: ModelWork, error: BackendError) -> BackendError:
    """Convert "too long" to UnsupportedWork if the left end should be cut, which other servers can do."""
    if work.truncate is Truncate.LEFT and isinstance(error, InvalidWork):
        return UnsupportedWork(f"{error.message}, and this upstream cuts the right end only")
    return explain_refusal(error, work.conversation)


class VllmBackend(HttpBackend):
    """Client of one vLLM server."""

    def __init__(
        self, http: UpstreamClient, model: str | None = None, tokenizer: TokenizerSource | None = None
    ) -> None:
        super().__init__(http)
        self._configured_model = model
        self._tokenizer = tokenizer
        self._profile: VllmProfile | None = None
        self._base64 = Base64Switch()
        self._offers = OfferHistory()
        self._counter: TokenCounter | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query the model and version and probe the features.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        if self._tokenizer is not None:
            self._counter = await open_token_counter(self._tokenizer, remaining_s())
        response = await self._http.get("/v1/models", remaining_s())
        if response.status != 200:
            raise failure(response)
        lengths = {item.id: item.max_model_len for item in decode_models(response)}
        model = choose_model(list(lengths), self._configured_model)
        max_tokens = lengths[model]
        if max_tokens is None:
            raise ReplicaFailed("GET /v1/models is not vLLM's: it has no max_model_len")
        profile = VllmProfile(model, max_tokens, await self._version(model, remaining_s()))

        async def send(path: str, body: Body) -> UpstreamResponse:
            return await self._post(path, {"model": model} | body, remaining_s())

        earlier = self._profile
        try:
            profile = await probe_features(profile, send)
        except (AttemptTimedOut, ReplicaOverloaded):
            # The server is busy. The profile of an earlier join is used, so that load alone does not keep a
            # replica out.
            if earlier is None or not profile.same_server(earlier):
                raise
            profile = earlier
        rules = self._counter.rules if self._counter else None
        found = capabilities(profile, rules, self._labels(profile))
        self._offers.accept(found, profile.options)
        self._profile = profile
        return found

    def _labels(self, profile: VllmProfile) -> tuple[str, ...]:
        return labels_of(profile, self._counter.labels if self._counter else ())

    async def _version(self, model: str, timeout_s: float) -> str:
        """Return the server's release; the last known one of the same model if it does not report it now."""
        response = await self._http.get("/version", timeout_s)
        with suppress(ReplicaFailed):
            if response.status == 200:
                return decode_json(response.body, VersionResponse).version
        earlier = self._profile
        return earlier.version if earlier is not None and earlier.model == model else ""

    async def _post(
        self, path: str, body: Body, timeout_s: float, rows: int | None = None
    ) -> UpstreamResponse:
        width = self._profile.width if self._profile is not None and path == EMBEDDINGS else None
        encoded = msgspec.json.encode(body)
        return restore_status(await self._http.post(path, encoded, timeout_s, rows=rows, width=width))

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work, in one request per kind of output.

        Raises: BackendError.
        """
        if self._profile is None:
            raise ReplicaUnavailable("the replica has not joined")
        remaining_s = countdown(timeout_s)
        prompted = apply_prompt(work, self._counter.rules if self._counter else None)
        if isinstance(prompted, Tokenize | Detokenize):
            return await self._run_tokenizer(prompted, self._profile, remaining_s())
        if isinstance(prompted, EmbedParts):
            return await self._embed_parts(prompted, self._profile, remaining_s())
        if isinstance(prompted, ScoreParts):
            return await self._score_parts(prompted, self._profile, remaining_s())
        if isinstance(prompted, EmbedChunks):
            raise refused_chunks()
        if isinstance(prompted, Encode):
            check_outputs(prompted, self._profile.outputs)
        return await run_outputs(prompted, partial(self._request, self._profile), remaining_s())

    async def _request(self, profile: VllmProfile, work: ModelWork, timeout_s: float) -> Reply:
        path, body = encode(work, profile)
        remaining_s, rows = countdown(timeout_s), work.reply_rows

        async def post(fields: Body) -> UpstreamResponse:
            return await self._post(path, fields, remaining_s(), rows)

        is_dense = work.operation is Operation.EMBED
        response = await (self._base64.send(body, post) if is_dense else post(body))
        if response.status != 200:
            raise error_for(work, failure(response))
        check_reported_cuts(work, response)
        return decode(work, response, profile, self._labels(profile))

    async def _embed_parts(
        self, work: EmbedParts, profile: VllmProfile, timeout_s: float
    ) -> EmbedReply | EncodeReply:
        """Embed each input by a request with its messages, some at a time."""
        check_media(work, media_operations(profile))
        if work.output not in profile.outputs:
            raise UnsupportedWork(f"this upstream gives no {work.output} output of images or sound")
        is_dense = work.output is Output.DENSE
        if not is_dense and work.dimensions is not None:
            raise UnsupportedWork("`dimensions` does not apply to multivector output; leave it out")
        path = EMBEDDINGS if is_dense else POOLING
        bodies = [parts_body(work, index, profile.raw_vectors) for index in range(len(work.inputs))]
        remaining_s = countdown(timeout_s)

        async def embed(body: Body) -> tuple[Vectors, int]:
            response = await self._post(path, body | {"model": profile.model}, remaining_s(), 1)
            if response.status != 200:
                raise explain_refusal(failure(response), work.chat or Chat())
            if is_dense:
                vectors, tokens = decode_embeddings(response.body, 1)
                return vectors, tokens or 1
            (rows,), tokens = decode_token_vectors(response, 1, None)
            return rows, tokens or len(rows)

        found = await run_some(embed, bodies, PARTS_IN_FLIGHT)
        counted = sum(tokens for _, tokens in found)
        if not is_dense:
            return EncodeReply(counted, multivector=tuple(rows for rows, _ in found), truncated=None)
        vectors = np.concatenate([rows for rows, _ in found])
        shaped = shape_vectors(vectors, dimensions=work.dimensions, normalize=work.normalize)
        return EmbedReply(shaped, counted, None)

    async def _score_parts(self, work: ScoreParts, profile: VllmProfile, timeout_s: float) -> RerankReply:
        """Score each pair by a request of its own, some at a time: releases differ in lists with pictures."""
        if not profile.scored_images:
            raise refused_pairs()
        options, remaining_s = _score_options(work, profile), countdown(timeout_s)
        # The pairs of a query follow each other, and its pictures may be large.
        query_side = lru_cache(maxsize=1)(side_of)

        async def score(pair: PartsPair) -> tuple[Vectors, int]:
            sides = {"text_1": query_side(pair[0]), "text_2": side_of(pair[1])}
            response = await self._post(SCORE, sides | options | {"model": profile.model}, remaining_s(), 1)
            if response.status != 200:
                raise failure(response)
            scores, tokens = decode_scores(response, 1)
            if tokens is None:
                raise ReplicaFailed("the upstream reported no usage")
            # The length that all upstreams of the model have; vLLM cuts no pair with images.
            if work.max_tokens is not None and tokens > work.max_tokens:
                raise input_too_long(work.max_tokens, f"{tokens} tokens")
            return scores, tokens

        found = await run_some(score, work.pairs, PARTS_IN_FLIGHT)
        counted = sum(tokens for _, tokens in found)
        # Without a length in the request vLLM refuses what is longer than the model.
        return _ranked(np.concatenate([scores for scores, _ in found]), counted, (), work, profile)

    async def _run_tokenizer(
        self, work: Tokenize | Detokenize, profile: VllmProfile, timeout_s: float
    ) -> TokenizeReply | DetokenizeReply:
        if self._counter is not None:
            return await self._counter.run(work, timeout_s)
        if profile.specials is None:
            raise UnsupportedWork("this upstream shows no tokens")
        # The routes accept one input per request. Sequential requests do not delay other work.
        remaining_s = countdown(timeout_s)
        if isinstance(work, Tokenize):
            specials = profile.specials if work.add_special_tokens else (0, 0)
            bodies = [tokenize_body(text, special=work.add_special_tokens) for text in work.inputs]
            replies = [await self._ask(TOKENIZE, body, profile, remaining_s()) for body in bodies]
            return TokenizeReply(tuple([tokens_of(decode_tokenize(reply), specials) for reply in replies]))
        # The wire has no switch for special tokens. Their ids are known from the probe and are removed here.
        skipped = profile.special_ids if work.skip_special_tokens else frozenset[int]()
        bodies = [{"tokens": [id_ for id_ in ids if id_ not in skipped]} for ids in work.inputs]
        replies = [await self._ask(DETOKENIZE, body, profile, remaining_s()) for body in bodies]
        return DetokenizeReply(tuple(map(decode_detokenize, replies)))

    async def _ask(self, path: str, body: Body, profile: VllmProfile, timeout_s: float) -> UpstreamResponse:
        response = await self._post(path, body | {"model": profile.model}, timeout_s)
        if response.status != 200:
            raise failure(response)
        return response

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Read the waiting requests from GET /metrics; the engine handles each input as one request.

        Raises: BackendError.
        """
        return await read_queue_depth(self._http, "vllm:num_requests_waiting", timeout_s)


def open_replica(spec: ReplicaSpec) -> VllmBackend:
    """Return a client of the vLLM server at the spec's base URL."""
    return VllmBackend(open_client(spec, SHORT_IDLE_S), spec.model, spec.tokenizer)
