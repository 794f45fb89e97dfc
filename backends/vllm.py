"""vLLM's pooling server over HTTP: pure encode and decode, then a few lines of I/O.

Its wire structs are in `vllm_wire.py`, what a replica is found to offer in `vllm_probe.py`.
Rule: vectors are asked for raw where that can be had, then cut and normalized here: the switch has had
three names, and `dimensions` is refused by most models.
"""

from contextlib import suppress

import msgspec
import numpy as np

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
    TermWeights,
    Tokenize,
    TokenizeReply,
    Truncate,
    Vectors,
    Work,
    inputs_of,
)
from backends.counting import TokenCounter, apply_prompt, open_token_counter
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http import SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown
from backends.openai_wire import chosen_model, decode_embeddings, decode_models
from backends.outputs import check_outputs, merge_replies, single_output, split_outputs
from backends.replies import (
    check_dimensions,
    check_tokens,
    fit_vectors,
    read_gauge,
    term_weights,
    translate_decode_errors,
    truncated_inputs,
)
from backends.texts import ModelWork, clip_texts
from backends.vectors import sigmoid
from backends.vllm_probe import Facing, explored
from backends.vllm_wire import (
    BASE64,
    CLASSIFY,
    DETOKENIZE,
    EMBEDDINGS,
    POOLING,
    SCORE,
    TOKENIZE,
    Body,
    Version,
    as_tokens,
    classes,
    detokenized,
    failure,
    scores,
    token_list,
    token_vectors,
    tokenize_body,
    unmasked,
)


def capabilities(facing: Facing, counter: TokenCounter | None) -> Capabilities:
    """What was learnt of a replica, in the contract's words."""
    return Capabilities(
        model_id=facing.model,
        operations=frozenset(_operations(facing, counter)),
        max_input_tokens=facing.max_tokens,
        dimensions=facing.width,
        prompts=counter.rules.prompts if counter else {},
        default_prompt=counter.rules.default_prompt if counter else None,
        version=f"vLLM {facing.version}".strip(),
        outputs=facing.outputs,
        labels=labels_of(facing, counter),
        notes=_notes(facing),
    )


def _operations(facing: Facing, counter: TokenCounter | None) -> set[Operation]:
    own: set[Operation] = set()
    if counter or facing.specials:
        own |= {Operation.TOKENIZE, Operation.DETOKENIZE}
    found = {
        Operation.EMBED: facing.width is not None,
        Operation.ENCODE: bool(facing.outputs - {Output.DENSE}),
        Operation.RERANK: facing.scores is not None,
        Operation.CLASSIFY: facing.classes > 0,
    }
    return own | {operation for operation, there in found.items() if there}


def labels_of(facing: Facing, counter: TokenCounter | None) -> tuple[str, ...]:
    """By class id: as the checkpoint names them where that is here, since the wire does not."""
    if counter is not None and len(counter.labels) == facing.classes:
        return counter.labels
    return tuple(f"LABEL_{index}" for index in range(facing.classes))


def _notes(facing: Facing) -> tuple[str, ...]:
    notes: list[str] = []
    if facing.width is not None:
        notes.append(f"raw vectors by {facing.raw_vectors}" if facing.raw_vectors else "no raw vectors")
    if facing.scores is not None:
        notes.append(f"scores: {facing.scores}")
    if facing.sparse:
        notes.append("term weights")
    if facing.token_width is not None:
        notes.append("token vectors")
    if facing.classes:
        notes.append(f"{facing.classes} classes")
    return tuple(notes)


def encode(work: ModelWork, facing: Facing) -> tuple[str, Body]:
    """Path and body of one piece of work; an Encode asks for one kind of output.

    Raises: UnsupportedWork where this release would do something else than what is asked.
    """
    # Not -1, which 0.8.5 refuses. And no `truncation_side`: it cuts off a special token with the rest, and
    # a model that reads its vector off that token would give another one.
    cuts = work.truncate is Truncate.RIGHT
    if cuts:
        work = clip_texts(work, facing.max_tokens)
    path, body = _encode(work, facing)
    cut: Body = {"truncate_prompt_tokens": facing.max_tokens} if cuts else {}
    return path, {"model": facing.model} | body | cut


def _encode(work: ModelWork, facing: Facing) -> tuple[str, Body]:
    match work:
        case Embed():
            return EMBEDDINGS, _embed_body(work, facing)
        case Encode():
            return _encode_outputs(work, facing)
        case Rerank():
            return SCORE, _pairs_body((work.query,), work.documents, work, facing)
        case Score():
            queries, documents = zip(*work.pairs, strict=True)
            return SCORE, _pairs_body(queries, documents, work, facing)
        case Classify():
            return CLASSIFY, _classify_body(work, facing)


def _embed_body(work: Embed, facing: Facing) -> Body:
    check_dimensions(work, facing.width)
    if facing.width is None:
        raise UnsupportedWork("this upstream gives no vectors")
    if not work.normalize and facing.raw_vectors is None:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    switch: Body = {facing.raw_vectors: False} if facing.raw_vectors else {}
    return {"input": work.inputs} | BASE64 | switch


def _encode_outputs(work: Encode, facing: Facing) -> tuple[str, Body]:
    check_outputs(work, facing.outputs)
    if single_output(work) is Output.SPARSE:
        return EMBEDDINGS, {"input": work.inputs} | BASE64
    raw: Body = {"use_activation": False} if single_output(work) is Output.TOKENS else {}
    return POOLING, {"input": work.inputs, "task": "token_embed"} | raw


def _pairs_body(
    queries: tuple[str, ...], documents: tuple[str, ...], work: Rerank | Score, facing: Facing
) -> Body:
    """In the one pair of names that every release knows."""
    if facing.scores is None:
        raise UnsupportedWork("this upstream gives no scores")
    if work.raw_scores and facing.scores == "sigmoid":
        raise UnsupportedWork("this upstream gives no raw scores")
    # An empty second half would be scored as no second half at all, a separator short.
    seconds = tuple(text or " " for text in documents)
    first = queries[0] if len(queries) == 1 else queries
    return {"text_1": first, "text_2": seconds, "use_activation": False}


def _classify_body(work: Classify, facing: Facing) -> Body:
    if not facing.classes:
        raise UnsupportedWork("this upstream's model is no classifier")
    if not all(isinstance(one, str) for one in work.inputs):
        raise UnsupportedWork("this upstream's wire classifies single texts, not pairs")
    if work.raw_scores and not facing.raw_classes:
        raise UnsupportedWork("this upstream gives no raw scores")
    return {"input": work.inputs, "use_activation": not work.raw_scores}


def decode(work: ModelWork, answer: UpstreamResponse, facing: Facing, labels: tuple[str, ...] = ()) -> Reply:
    """The reply in an answer of status 200. labels: of a classifier.

    Raises: ReplicaFailed where it is not an answer to this work.
    """
    expected = len(inputs_of(work))
    match work:
        case Embed():
            vectors, told = decode_embeddings(answer.body, expected)
            return EmbedReply(fit_vectors(vectors, work), *_counted(told, work, facing))
        case Encode():
            return _encoded(work, answer, facing)
        case Rerank() | Score():
            found, told = scores(answer, expected)
            if not work.raw_scores and facing.scores != "sigmoid":
                found = sigmoid(found)
            return RerankReply(found, *_counted(told, work, facing))
        case Classify():
            found, told = classes(answer, expected, facing.classes)
            return ClassifyReply(labels, found, *_counted(told, work, facing))


def _encoded(work: Encode, answer: UpstreamResponse, facing: Facing) -> EncodeReply:
    expected, kind = len(work.inputs), single_output(work)
    if kind is Output.SPARSE:
        weights, told = decode_embeddings(answer.body, expected)
        tokens, cut = _counted(told, work, facing)
        return EncodeReply(tokens, sparse=tuple(map(_terms, weights)), truncated=cut)
    matrices, told = token_vectors(answer, expected, facing.max_tokens)
    tokens, cut = _counted(told, work, facing)
    if kind is Output.TOKENS:
        return EncodeReply(tokens, token_vectors=matrices, truncated=cut)
    return EncodeReply(tokens, multivector=matrices, truncated=cut)


def _terms(weights: Vectors) -> TermWeights:
    """Of one input, from a weight for each term of the vocabulary."""
    places = np.flatnonzero(weights)
    return term_weights(zip(places.tolist(), weights[places].tolist(), strict=True))


def _counted(told: int | None, work: ModelWork, facing: Facing) -> tuple[int, tuple[int, ...] | None]:
    """The tokens, and which inputs were cut."""
    if told is None:
        raise ReplicaFailed("the upstream told no usage")
    check_tokens(told, len(inputs_of(work)), facing.max_tokens)
    cuts = work.truncate is Truncate.RIGHT
    return told, truncated_inputs(work, told, facing.max_tokens) if cuts else ()


def refusal(work: ModelWork, error: BackendError) -> BackendError:
    """The failure of this work: what is too long might have been cut at the left by another server."""
    if work.truncate is Truncate.LEFT and isinstance(error, InvalidWork):
        return UnsupportedWork(f"{error.message}, and this upstream cuts the right end only")
    return error


class VllmBackend:
    """One vLLM server."""

    def __init__(self, http: UpstreamClient, model: str | None = None, tokenizer: str | None = None) -> None:
        self._http = http
        self._asked = model
        self._source = tokenizer
        self._facing: Facing | None = None
        self._counter: TokenCounter | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        left = countdown(timeout_s)
        if self._source is not None:
            self._counter = await open_token_counter(self._source, left())
        answer = await self._http.get("/v1/models", left())
        if answer.status != 200:
            raise failure(answer)
        lengths = {one.id: one.max_model_len for one in decode_models(answer)}
        model = chosen_model(list(lengths), self._asked)
        max_tokens = lengths[model]
        if max_tokens is None:
            raise ReplicaFailed("GET /v1/models is not vLLM's: it tells no max_model_len")
        facing = Facing(model, max_tokens, await self._version(left()))

        async def ask(path: str, body: Body) -> UpstreamResponse:
            return await self._post(path, {"model": model} | body, left())

        try:
            self._facing = await explored(facing, ask)
        except (AttemptTimedOut, ReplicaOverloaded):
            # Busy, and known from before: it must not stay out for being busy.
            if self._facing is None or not facing.same_server(self._facing):
                raise
        return capabilities(self._facing, self._counter)

    async def _version(self, timeout_s: float) -> str:
        answer = await self._http.get("/version", timeout_s)
        with suppress(ReplicaFailed), translate_decode_errors():
            return msgspec.json.decode(answer.body, type=Version).version if answer.status == 200 else ""
        return ""

    async def _post(self, path: str, body: Body, timeout_s: float) -> UpstreamResponse:
        return unmasked(await self._http.post(path, msgspec.json.encode(body), timeout_s))

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._facing is None:
            raise ReplicaUnavailable("the replica has not joined")
        left = countdown(timeout_s)
        ready = apply_prompt(work, self._counter.rules if self._counter else None)
        match ready:
            case Tokenize() | Detokenize():
                return await self._free(ready, self._facing, left())
            case Encode():
                check_outputs(ready, self._facing.outputs)
                parts = split_outputs(ready)
                return merge_replies([await self._one(part, self._facing, left()) for part in parts])
        return await self._one(ready, self._facing, left())

    async def _one(self, work: ModelWork, facing: Facing, timeout_s: float) -> Reply:
        path, body = encode(work, facing)
        answer = await self._post(path, body, timeout_s)
        if answer.status != 200:
            raise refusal(work, failure(answer))
        return decode(work, answer, facing, labels_of(facing, self._counter))

    async def _free(
        self, work: Tokenize | Detokenize, facing: Facing, timeout_s: float
    ) -> TokenizeReply | DetokenizeReply:
        if self._counter is not None:
            return await self._counter.free(work, timeout_s)
        if facing.specials is None:
            raise UnsupportedWork("this upstream shows no tokens")
        if isinstance(work, Tokenize):
            return await self._tokenize(work, facing, facing.specials, timeout_s)
        return await self._detokenize(work, facing, timeout_s)

    async def _detokenize(self, work: Detokenize, facing: Facing, timeout_s: float) -> DetokenizeReply:
        left = countdown(timeout_s)
        # The wire has no switch for it: those that stand around a text are known, and left out here.
        skipped = facing.special_ids if work.skip_special_tokens else frozenset[int]()
        texts = []
        for ids in work.inputs:
            body = {"model": facing.model, "tokens": [one for one in ids if one not in skipped]}
            answer = await self._post(DETOKENIZE, body, left())
            if answer.status != 200:
                raise failure(answer)
            texts.append(detokenized(answer))
        return DetokenizeReply(tuple(texts))

    async def _tokenize(
        self, work: Tokenize, facing: Facing, around: tuple[int, int], timeout_s: float
    ) -> TokenizeReply:
        left = countdown(timeout_s)
        specials = around if work.add_special_tokens else (0, 0)
        shown = []
        # One text a request is all that the route takes; one after another, they hold up nobody.
        for text in work.inputs:
            body = tokenize_body(text, special=work.add_special_tokens) | {"model": facing.model}
            answer = await self._post(TOKENIZE, body, left())
            if answer.status != 200:
                raise failure(answer)
            shown.append(as_tokens(token_list(answer), specials))
        return TokenizeReply(tuple(shown))

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Each input is a request of the engine's. Raises: BackendError."""
        answer = await self._http.get("/metrics", timeout_s)
        waiting = read_gauge(answer.body, "vllm:num_requests_waiting") if answer.status == 200 else None
        return None if waiting is None else QueueDepth(round(waiting))

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> VllmBackend:
    """The vLLM server at the spec's base URL."""
    door = UpstreamClient(spec.address, spec.headers, tls=spec.tls, ip=spec.ip, idle_s=SHORT_IDLE_S)
    return VllmBackend(door, spec.model, spec.tokenizer)
