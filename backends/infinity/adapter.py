"""Adapter of Infinity; its wire is in `wire.py`.

Infinity reports characters instead of tokens and no maximum length, and it truncates silently. The adapter
therefore counts tokens with the model's own tokenizer.
"""

from typing import Any, TypeVar

import msgspec
import numpy as np

from backends.contract import (
    NUMBER_MAX,
    BaseWork,
    Capabilities,
    Classify,
    Detokenize,
    Embed,
    EmbedChunks,
    EmbedParts,
    EmbedReply,
    Encode,
    ModelWork,
    Operation,
    Output,
    QueueDepth,
    ReplicaSpec,
    Reply,
    Score,
    ScoreParts,
    Tokenize,
    TokenizerSource,
    Truncate,
    Vectors,
    Work,
)
from backends.contract.errors import (
    AttemptTimedOut,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.contract.refusals import (
    check_no_instruction,
    check_no_max_tokens,
    check_plain_texts,
    refused_chunks,
    refused_pairs,
)
from backends.contract.texts import clip_text
from backends.contract.vectors import shape_vectors
from backends.http.adapters import HttpBackend, check_outputs
from backends.http.client import SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown, open_client
from backends.http.media import check_media
from backends.http.offers import OfferHistory
from backends.http.openai_wire import (
    Base64Switch,
    UnequalWidths,
    choose_model,
    decode_embeddings,
)
from backends.http.replies import (
    check_dimensions,
    order_labels,
    score_by_query,
)
from backends.infinity.wire import (
    Body,
    InfinityServedModel,
    InfinityWork,
    check_parts,
    decode,
    decode_models,
    decode_predictions,
    encode,
    failure,
    parts_body,
    places_by_modality,
)
from backends.tokens.counting import TokenCounter, apply_prompt, open_token_counter
from backends.tokens.tokenizer import TokenCount

WorkT = TypeVar("WorkT", bound=BaseWork)

# Infinity refuses longer texts. A model of 8,192 tokens reads far less.
CHARACTERS_MAX = 122_880
# Texts of two lengths, for which a model with one vector per token returns rows of different widths.
PROBE = ("a", "a b c")


class InfinityProfile(msgspec.Struct, frozen=True):
    """Properties of a model, determined with short texts when its server joins.

    width: of its dense vectors. multivector: it returns one vector per token. labels: those of a classifier.
    """

    width: int | None = None
    multivector: bool = False
    labels: tuple[str, ...] = ()


def capabilities(model: InfinityServedModel, counter: TokenCounter, profile: InfinityProfile) -> Capabilities:
    """Combine GET /models, the profile and the tokenizer's files to capabilities."""
    outputs = {Output.DENSE: profile.width is not None, Output.MULTIVECTOR: profile.multivector}
    return Capabilities(
        model_id=model.id,
        operations=_operations(model, profile),
        max_input_tokens=counter.rules.max_tokens,
        request_inputs=model.stats.batch_size,
        dimensions=profile.width,
        prompts=counter.rules.prompts,
        default_prompt=counter.rules.default_prompt,
        version="Infinity",
        outputs=frozenset(output for output, is_offered in outputs.items() if is_offered),
        labels=profile.labels,
        notes=("tokens are counted here",),
    )


def _operations(model: InfinityServedModel, profile: InfinityProfile) -> frozenset[Operation]:
    operations = {
        # Infinity lists "embed" for models with one vector per token, too; these have no width.
        Operation.EMBED: profile.width is not None,
        Operation.EMBED_IMAGE: profile.width is not None and "image_embed" in model.capabilities,
        Operation.EMBED_AUDIO: profile.width is not None and "audio_embed" in model.capabilities,
        Operation.ENCODE: profile.multivector,
        Operation.RERANK: "rerank" in model.capabilities,
        Operation.CLASSIFY: bool(profile.labels),
        Operation.TOKENIZE: True,
        Operation.DETOKENIZE: True,
    }
    return frozenset(operation for operation, is_offered in operations.items() if is_offered)


def normalize_texts(work: WorkT, max_tokens: int) -> WorkT:
    """Return the work as the server's tokenizer receives it: stripped, and within the length limit."""

    def normalize(text: str) -> str:
        clipped = clip_text(text.strip(), max_tokens, work.truncate)
        return clipped if work.truncate is Truncate.ERROR else clipped[:CHARACTERS_MAX]

    return work.map_texts(normalize)


def check_supported(work: ModelWork, offered: Capabilities) -> None:
    """Check that Infinity would execute the work as requested.

    Raises: UnsupportedWork.
    """
    check_no_instruction(work)
    check_no_max_tokens(work)
    check_plain_texts(work, "Infinity")
    if work.operation not in offered.operations:
        raise UnsupportedWork("this upstream's model does not do that")
    match work:
        case Embed():
            if not work.normalize:
                raise UnsupportedWork("this upstream always normalizes its vectors")
            check_dimensions(work, offered.dimensions)
        case Encode():
            check_outputs(work, offered.outputs)
            if work.outputs != {Output.MULTIVECTOR}:
                raise UnsupportedWork("this upstream gives one kind of output")
        case Classify(raw_scores=True):
            raise UnsupportedWork("this upstream gives no raw scores of labels")
        case Classify(single_texts=None):
            raise UnsupportedWork("this upstream's wire classifies single texts, not pairs")


def check_truncation(work: ModelWork, count: TokenCount) -> None:
    """Check that no input has to be cut at its left end.

    Raises: UnsupportedWork.
    """
    if work.truncate is Truncate.LEFT and count.truncated:
        raise UnsupportedWork(
            f"input {count.truncated[0]} is too long, and this upstream cuts the right end only"
        )


def profile_vectors(response: UpstreamResponse) -> InfinityProfile:
    """Determine the kind and width of the probe's vectors.

    Raises: ReplicaFailed, if they are quantized or missing.
    """
    try:
        vectors, _ = decode_embeddings(response.body, len(PROBE))
    except UnequalWidths:
        return InfinityProfile(multivector=True)
    if not np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=0.02):
        raise ReplicaFailed("its vectors are not of length 1: start it with --embedding-dtype float32")
    return InfinityProfile(int(vectors.shape[1]))


class InfinityBackend(HttpBackend):
    """Client of one model of one Infinity server."""

    def __init__(self, http: UpstreamClient, model: str | None, tokenizer: TokenizerSource | None) -> None:
        super().__init__(http)
        self._configured_model = model
        self._tokenizer = tokenizer
        self._counter: TokenCounter | None = None
        self._model: str | None = None
        self._capabilities: Capabilities | None = None
        self._base64 = Base64Switch()
        self._offers = OfferHistory()

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query GET /models and probe the model with short texts.

        Raises: BackendError.
        """
        if self._tokenizer is None:
            raise ReplicaFailed("Infinity counts characters: name the model's `tokenizer`")
        remaining_s = countdown(timeout_s)
        counter = await open_token_counter(self._tokenizer, remaining_s())
        models = {model.id: model for model in await self._models(remaining_s())}
        model = models[choose_model(list(models), self._configured_model)]
        profile = await self._probe(model, counter, remaining_s())
        found = capabilities(model, counter, profile)
        self._offers.accept(found)
        self._model, self._counter, self._capabilities = model.id, counter, found
        return found

    async def _models(self, timeout_s: float) -> list[InfinityServedModel]:
        response = await self._http.get("/models", timeout_s)
        if response.status != 200:
            raise failure(response)
        return decode_models(response)

    async def _probe(
        self, model: InfinityServedModel, counter: TokenCounter, timeout_s: float
    ) -> InfinityProfile:
        """Determine the model's profile.

        Raises: BackendError.
        """
        try:
            if "embed" in model.capabilities:
                return profile_vectors(await self._post(Embed(PROBE), model.id, timeout_s))
            if "classify" in model.capabilities:
                response = await self._post(Classify(PROBE), model.id, timeout_s)
                return InfinityProfile(labels=order_labels(decode_predictions(response), counter.labels))
        except (AttemptTimedOut, ReplicaOverloaded):
            # The server is busy. The profile of an earlier join is used, so that load alone does not keep a
            # replica out.
            if self._capabilities is None or self._capabilities.model_id != model.id:
                raise
            earlier = self._capabilities
            return InfinityProfile(earlier.dimensions, Output.MULTIVECTOR in earlier.outputs, earlier.labels)
        return InfinityProfile()

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work.

        Raises: BackendError.
        """
        if self._model is None or self._counter is None or self._capabilities is None:
            raise ReplicaUnavailable("the replica has not joined")
        remaining_s = countdown(timeout_s)
        prompted = apply_prompt(work, self._counter.rules)
        if isinstance(prompted, Tokenize | Detokenize):
            return await self._counter.run(prompted, remaining_s())
        if isinstance(prompted, EmbedParts):
            return await self._embed_parts(prompted, self._model, self._capabilities, remaining_s())
        if isinstance(prompted, EmbedChunks):
            raise refused_chunks()
        if isinstance(prompted, ScoreParts):
            raise refused_pairs()
        check_supported(prompted, self._capabilities)
        ready = normalize_texts(prompted, self._counter.rules.max_tokens)
        count = await self._counter.count(ready, remaining_s())
        check_truncation(ready, count)
        model, labels = self._model, self._capabilities.labels

        async def send(part: InfinityWork) -> Any:
            return decode(part, await self._post(part, model, remaining_s()), count, labels)

        if isinstance(ready, Score):
            scores = await score_by_query(ready, send)
            return msgspec.structs.replace(scores, tokens=count.tokens, truncated=count.truncated)
        reply: Reply = await send(ready)
        return reply

    async def _embed_parts(
        self, work: EmbedParts, model: str, offered: Capabilities, timeout_s: float
    ) -> EmbedReply:
        """Embed texts, images and sound in one request each, because a request has one modality."""
        remaining_s = countdown(timeout_s)
        check_media(work, offered.operations)
        check_parts(work)
        vectors: dict[int, Vectors] = {}
        tokens = 0
        for modality, places in places_by_modality(work).items():
            body = msgspec.json.encode(parts_body([work.inputs[i][0] for i in places], modality, model))
            response = await self._http.post("/embeddings", body, remaining_s(), rows=len(places))
            if response.status != 200:
                raise failure(response)
            rows, counted = decode_embeddings(response.body, len(places))
            vectors |= dict(zip(places, rows, strict=True))
            tokens += max(counted or 0, len(places))
        stacked = np.stack([vectors[i] for i in range(len(work.inputs))])
        return EmbedReply(shape_vectors(stacked, dimensions=work.dimensions, normalize=True), tokens, None)

    async def _post(self, work: InfinityWork, model: str, timeout_s: float) -> UpstreamResponse:
        path, body = encode(work, model)
        is_dense = work.operation is Operation.EMBED
        known = self._capabilities if is_dense and self._model == model else None
        width = known.dimensions if known is not None else None
        remaining_s = countdown(timeout_s)

        async def post(fields: Body) -> UpstreamResponse:
            encoded = msgspec.json.encode(fields)
            return await self._http.post(path, encoded, remaining_s(), rows=work.reply_rows, width=width)

        response = await (self._base64.send(body, post) if is_dense else post(body))
        if response.status != 200:
            raise failure(response)
        return response

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Read queue_absolute, the number of waiting inputs, from GET /models.

        Raises: BackendError.
        """
        models = await self._models(timeout_s)
        waiting = [model.stats.queue_absolute for model in models if model.id == self._model]
        return QueueDepth(waiting[0]) if waiting and 0 <= waiting[0] <= NUMBER_MAX else None


def open_replica(spec: ReplicaSpec) -> InfinityBackend:
    """Return a client of the Infinity server at the spec's base URL, which includes its url prefix."""
    return InfinityBackend(open_client(spec, SHORT_IDLE_S), spec.model, spec.tokenizer)
