"""Detection of what the model of an OpenAI-compatible server does, with short texts, when it joins.

Scores, and all requests to a hosted API, cost money. Rule: they are requested once for a model; afterwards
only the list of models is, which is free and shows that the server answers.
"""

import msgspec

from backends.contract import Embed, ReplicaSpec, ScoreKind
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
)
from backends.http.client import UpstreamResponse, countdown
from backends.http.openai_wire import choose_model, decode_models
from backends.http.statuses import status_error
from backends.openai.api import (
    RERANK_PROBE,
    OpenAIApi,
    OpenAIProfile,
    decode_scores,
    decode_vectors,
    failure,
    scale_of,
    without_base64,
)
from backends.openai.media import PROBE as IMAGE_PROBE
from backends.openai.media import media_requests
from backends.tokens.counting import TokenCounter

PROBE = Embed(("a",))
# Statuses of a route that does not exist, or exists for a different kind of model.
NOT_OFFERED = frozenset({400, 404, 405, 422, 500, 501})


BREAKS_ON_IMAGES = "no images: the connection broke at a picture"


class OperationNotOffered(ReplicaFailed):
    """Refusal of a probe that shows that the model does not have the operation."""


class ModelProbe:
    """Probes of one server. known: the profile of its last description, None before the first."""

    def __init__(self, api: OpenAIApi, spec: ReplicaSpec) -> None:
        self.known: OpenAIProfile | None = None
        self._api = api
        self._configured_model = spec.model
        self._task = api.settings.task
        # The model whose server broke the connection at a picture, in a tuple because it may have no name.
        self._breaks_on_images: tuple[str | None] | None = None
        self._may_rerank = api.shape.rerank is not None and api.settings.task != "embed"

    async def profile(self, counter: TokenCounter | None, timeout_s: float) -> OpenAIProfile:
        """Determine the model and what it does. counter: of the model's tokenizer, if it is here.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        own_length = counter.rules.max_tokens if counter else None
        found = await self._find_model(own_length, remaining_s())
        # A server that loads its model on the first request joins as well, without a width.
        try:
            return await self._probe(found, remaining_s() * 0.9, counted=counter is not None)
        except (AttemptTimedOut, ReplicaOverloaded) as error:
            return self._profile_of_busy(found, error)

    async def _find_model(self, own_length: int | None, timeout_s: float) -> OpenAIProfile:
        """Determine the model and its length from GET /v1/models, which not every server has."""
        configured = OpenAIProfile(self._configured_model, own_length)
        if self._api.shape.metered and self.known is None:
            return configured
        response = await self._api.models(timeout_s)
        if self.known is not None and not self._is_repeated(self.known) and response.status >= 500:
            raise status_error(response)
        if self._api.shape.metered:
            # Only whether it answers is of interest: a hosted API need not have this route.
            return configured
        if response.status in {401, 403}:
            raise failure(response)
        lengths = _lengths_of(response)
        # A configured name may be an alias that is not in the list.
        model = self._configured_model or (choose_model(list(lengths), None) if lengths else None)
        listed_length = lengths.get(model) if model is not None else None
        return OpenAIProfile(model, min(filter(None, (listed_length, own_length)), default=None))

    def _profile_of_busy(self, profile: OpenAIProfile, error: BackendError) -> OpenAIProfile:
        """Return the profile of a server that did not answer its probes in time.

        Raises: BackendError, if it is not known whether the model embeds or reranks.
        """
        if (known := self._known(profile.model)) is not None:
            return known
        if self._may_rerank:
            # LiteLLM repeats a request that it cannot serve, then pauses the model for all requests.
            way_out = (
                "" if self._task else "; `task: embed` or `task: rerank` sends it one kind of request only"
            )
            raise type(error)(f"{error.message}{way_out}") from error
        return msgspec.structs.replace(profile, notes=(f"width not learnt: {error.message}",))

    def _known(self, model: str | None) -> OpenAIProfile | None:
        """Return the profile of the same model that earlier probes determined."""
        known = self.known
        if known is None or known.model != model:
            return None
        return known if known.width is not None or known.scores is not None else None

    def _is_repeated(self, known: OpenAIProfile) -> bool:
        """Return True if a known model embeds a text for each description."""
        return known.embeds and not self._api.shape.metered

    async def _probe(self, profile: OpenAIProfile, timeout_s: float, *, counted: bool) -> OpenAIProfile:
        """Determine what the model does, or that a known one still does it.

        Raises: BackendError.
        """
        known = self._known(profile.model)
        if known is None:
            return await self._detect(profile, timeout_s, counted=counted)
        if not self._is_repeated(known):
            return known
        if not known.base64:
            profile = without_base64(profile)
        probed = await self._probe_embedding(profile, timeout_s, counted=counted)
        return msgspec.structs.replace(probed, scores=known.scores)

    async def _detect(self, profile: OpenAIProfile, timeout_s: float, *, counted: bool) -> OpenAIProfile:
        remaining_s = countdown(timeout_s)
        refusal: BackendError | None = None
        if self._task != "rerank":
            try:
                profile = await self._probe_embedding(profile, remaining_s(), counted=counted)
            except (OperationNotOffered, ModelNotServed) as error:
                refusal = error
        if not self._may_rerank:
            if refusal is not None:
                raise refusal
            return profile
        embeds = self._task != "rerank" and refusal is None
        profile = msgspec.structs.replace(profile, embeds=embeds)
        try:
            return await self._probe_scores(profile, remaining_s(), counted=counted)
        except (OperationNotOffered, ModelNotServed) as error:
            if embeds:
                return profile
            if refusal is None:
                raise
            kind = ModelNotServed if isinstance(refusal, ModelNotServed) else ReplicaFailed
            message = f"its model has no operation: {refusal.message}; {error.message}"
            raise kind(message).with_facts(upstream_status=error.upstream_status) from error

    async def _probe_embedding(
        self, profile: OpenAIProfile, timeout_s: float, *, counted: bool
    ) -> OpenAIProfile:
        """Embed one short text to determine the width and the support of base64.

        counted: the gateway has the model's tokenizer. Raises: OperationNotOffered, BackendError.
        """
        remaining_s = countdown(timeout_s)
        response = await self._api.embed(PROBE, profile, remaining_s())
        if self._api.may_refuse_base64(response, profile):
            profile = without_base64(profile)
            response = await self._api.embed(PROBE, profile, remaining_s())
        _check_probe(response, "embeddings")
        vectors, tokens = decode_vectors(response.body, 1, self._api.shape)
        if tokens is None and not counted:
            raise ReplicaFailed("its replies contain no usage: name the model's `tokenizer`")
        profile = msgspec.structs.replace(profile, width=vectors.shape[1])
        return await self._probe_image(profile, remaining_s())

    async def _probe_image(self, profile: OpenAIProfile, timeout_s: float) -> OpenAIProfile:
        """Embed one small picture, if the API has a form for it.

        Raises: BackendError, unless the model refuses pictures.
        """
        if self._api.shape.media is None:
            return profile
        if self._breaks_on_images == (profile.model,):
            return msgspec.structs.replace(profile, notes=(*profile.notes, BREAKS_ON_IMAGES))
        (request,) = media_requests(IMAGE_PROBE, self._api.shape)
        try:
            response = await self._api.send(request.fields, profile, 1, timeout_s)
        except ConnectionLost:
            # A server that ends at a picture would otherwise never join. It is not asked for one again.
            self._breaks_on_images = (profile.model,)
            return msgspec.structs.replace(profile, notes=(*profile.notes, BREAKS_ON_IMAGES))
        if response.status in NOT_OFFERED:
            return profile
        if response.status != 200:
            raise failure(response)
        return msgspec.structs.replace(profile, images=True, notes=(*profile.notes, "images"))

    async def _probe_scores(
        self, profile: OpenAIProfile, timeout_s: float, *, counted: bool
    ) -> OpenAIProfile:
        """Score three pairs to determine the scale of the scores.

        counted: as in `_probe_embedding`. Raises: OperationNotOffered, BackendError.
        """
        response = await self._api.rerank(RERANK_PROBE, profile, timeout_s)
        _check_probe(response, "rerank")
        scores, tokens = decode_scores(response, len(RERANK_PROBE.documents))
        if tokens is None and not counted:
            raise ReplicaFailed("its reranks report no token counts: name the model's `tokenizer`")
        # A small logit looks like a cosine.
        scale = ScoreKind.LOGIT if self._api.shape.rerank_form == "ranking" else scale_of(scores)
        return msgspec.structs.replace(profile, scores=scale)


def _lengths_of(response: UpstreamResponse) -> dict[str, int | None]:
    """Return the length of each listed model; a list that cannot be read is none."""
    try:
        models = decode_models(response) if response.status == 200 else []
    except ReplicaFailed:
        models = []
    return {item.id: item.max_model_len for item in models}


def _check_probe(response: UpstreamResponse, endpoint: str) -> None:
    """Check the status of a probe, whose refusal is never a caller's fault.

    Raises: OperationNotOffered, BackendError.
    """
    if response.status == 200:
        return
    error = failure(response)
    message = (
        error.message if error.retryable else f"its {endpoint} endpoint returns status {response.status}"
    )
    if isinstance(error, ModelNotServed):
        raise error
    kind = OperationNotOffered if response.status in NOT_OFFERED else ReplicaFailed
    if kind is ReplicaFailed and error.retryable:
        raise error
    raise kind(message).with_facts(detail=error.detail, upstream_status=error.upstream_status)
