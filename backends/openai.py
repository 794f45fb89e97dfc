"""Adapter of any server of OpenAI's embeddings API: pure encode and decode functions, then the I/O.

Source: OpenAI OpenAPI document 2.3.0, and the differences of llama.cpp, Ollama and others.
Rule: only fields that every such server knows are sent. The vectors are truncated to `dimensions` and
normalized here, in the way that OpenAI's own models define.
"""

from typing import Any

import msgspec

from backends.contract import (
    Capabilities,
    Detokenize,
    Embed,
    EmbedReply,
    Operation,
    Output,
    ReplicaSpec,
    Reply,
    Tokenize,
    TokenizerSource,
    Truncate,
    Work,
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
    input_too_long,
)
from backends.http import IDLE_S, SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown, open_client
from backends.offers import check_numbers
from backends.openai_envelope import context_length_in, error_of
from backends.openai_wire import choose_model, decode_embeddings, decode_models
from backends.replies import (
    check_dimensions,
    check_tokens,
    fit_vectors,
    rows_of,
    status_error,
    truncated_inputs,
)
from backends.texts import check_no_max_tokens
from backends.tokens import TokenCount

PROBE = Embed(("a",))
# Error texts for an input that is too long: OpenAI and vLLM, llama.cpp, Ollama.
TOO_LONG = ("maximum context length", "too large to process", "context size", "context length", "too long")

Body = dict[str, Any]


class OpenAIProfile(msgspec.Struct, frozen=True):
    """Properties of a server, determined when it joins.

    model: None for a server that needs no model name. base64: the server accepts that encoding_format.
    """

    model: str | None = None
    max_tokens: int | None = None
    width: int | None = None
    base64: bool = True
    notes: tuple[str, ...] = ()


def route(address: str) -> str:
    """Return the path to append to a base URL: /v1, unless the URL has a path already."""
    location = address.split("://", 1)[-1].rstrip("/")
    return "" if "/" in location else "/v1"


def capabilities(profile: OpenAIProfile, counter: TokenCounter | None) -> Capabilities:
    """Convert a profile to capabilities; a counter adds tokenization and prompts."""
    operations = {Operation.EMBED} | ({Operation.TOKENIZE, Operation.DETOKENIZE} if counter else set())
    return Capabilities(
        model_id=profile.model or "unnamed",
        operations=frozenset(operations),
        max_input_tokens=profile.max_tokens,
        dimensions=profile.width,
        prompts=counter.rules.prompts if counter else {},
        default_prompt=counter.rules.default_prompt if counter else None,
        version="OpenAI API",
        outputs=frozenset({Output.DENSE}),
        notes=profile.notes,
    )


def encode(work: Embed, profile: OpenAIProfile) -> Body:
    """Return the body of POST /v1/embeddings.

    Raises: UnsupportedWork, InvalidWork.
    """
    if not work.normalize:
        raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
    check_dimensions(work, profile.width)
    name: Body = {} if profile.model is None else {"model": profile.model}
    form: Body = {"encoding_format": "base64"} if profile.base64 else {}
    return name | {"input": work.inputs} | form


def decode(
    work: Embed, response: UpstreamResponse, profile: OpenAIProfile, count: TokenCount | None
) -> EmbedReply:
    """Decode the reply in a response of status 200. count: from the model's tokenizer, if available here.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    vectors, tokens = decode_embeddings(response.body, len(work.inputs))
    if count is not None:
        return EmbedReply(fit_vectors(vectors, work), count.tokens, count.truncated)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    check_tokens(tokens, len(work.inputs), profile.max_tokens)
    cut = truncated_inputs(work, tokens, profile.max_tokens)
    return EmbedReply(fit_vectors(vectors, work), tokens, cut)


def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    error = error_of(response)
    message = error.message.lower()
    match response.status:
        case 400 | 413 | 422 | 500 if any(phrase in message for phrase in TOO_LONG):
            return input_too_long(context_length_in(message))
        case 400 | 404 if error.code == "model_not_found":
            return ReplicaFailed("the upstream does not serve this model")
        case 400 | 422:
            return InvalidWork("the upstream refused the input")
        case 429 if "insufficient_quota" in (error.code, error.type):
            return ReplicaFailed("the quota of the gateway's account at the upstream is used up")
    return status_error(response)


class OpenAIBackend:
    """Client of one server or hosted API."""

    def __init__(
        self, http: UpstreamClient, model: str | None = None, tokenizer: TokenizerSource | None = None
    ) -> None:
        self._http = http
        self._path = route(http.base_url)
        self._configured_model = model
        self._tokenizer = tokenizer
        self._profile: OpenAIProfile | None = None
        self._counter: TokenCounter | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query the model list and embed a short text.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        if self._tokenizer is not None:
            self._counter = await open_token_counter(self._tokenizer, remaining_s())
        profile = await self._find_model(remaining_s())
        # A server that loads its model on the first request joins as well, without a width.
        try:
            profile = await self._probe(profile, remaining_s() * 0.9)
        except (AttemptTimedOut, ReplicaOverloaded) as error:
            earlier = self._profile
            if earlier is not None and earlier.width is not None and earlier.model == profile.model:
                profile = earlier
            else:
                profile = msgspec.structs.replace(profile, notes=(f"width not learnt: {error.message}",))
        found = capabilities(profile, self._counter)
        check_numbers(found)
        self._profile = profile
        return found

    async def _find_model(self, timeout_s: float) -> OpenAIProfile:
        """Determine the model and its length from GET /v1/models, which not every server has."""
        response = await self._http.get(f"{self._path}/models", timeout_s)
        if response.status in {401, 403}:
            raise failure(response)
        own_length = self._counter.rules.max_tokens if self._counter else None
        try:
            models = decode_models(response) if response.status == 200 else []
        except ReplicaFailed:
            models = []
        lengths = {item.id: item.max_model_len for item in models}
        # A configured name may be an alias that is not in the list.
        model = self._configured_model or (choose_model(list(lengths), None) if lengths else None)
        listed_length = lengths.get(model) if model is not None else None
        return OpenAIProfile(model, min(filter(None, (listed_length, own_length)), default=None))

    async def _probe(self, profile: OpenAIProfile, timeout_s: float) -> OpenAIProfile:
        """Embed one short text to determine the width and the support of base64.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        response = await self._post(PROBE, profile, remaining_s())
        if response.status in {400, 422}:
            profile = msgspec.structs.replace(profile, base64=False, notes=("numbers, not base64",))
            response = await self._post(PROBE, profile, remaining_s())
        if response.status != 200:
            error = failure(response)
            # An error about the probe is never the caller's fault.
            raise (
                error
                if error.retryable
                else ReplicaFailed(f"its embeddings endpoint returns status {response.status}")
            )
        vectors, tokens = decode_embeddings(response.body, 1)
        if tokens is None and self._counter is None:
            raise ReplicaFailed("its replies contain no usage: name the model's `tokenizer`")
        return msgspec.structs.replace(profile, width=vectors.shape[1])

    async def _post(self, work: Embed, profile: OpenAIProfile, timeout_s: float) -> UpstreamResponse:
        body = msgspec.json.encode(encode(work, profile))
        return await self._http.post(f"{self._path}/embeddings", body, timeout_s, rows=rows_of(work))

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work.

        Raises: BackendError.
        """
        if self._profile is None:
            raise ReplicaUnavailable("the replica has not joined")
        remaining_s = countdown(timeout_s)
        prompted = apply_prompt(work, self._counter.rules if self._counter else None)
        if isinstance(prompted, Tokenize | Detokenize) and self._counter is not None:
            return await self._counter.run(prompted, remaining_s())
        if not isinstance(prompted, Embed):
            raise UnsupportedWork("this upstream's wire embeds only")
        check_no_max_tokens(prompted)
        count = await self._count(prompted, remaining_s())
        response = await self._post(prompted, self._profile, remaining_s())
        if response.status != 200:
            raise failure(response)
        return decode(prompted, response, self._profile, count)

    async def _count(self, work: Embed, timeout_s: float) -> TokenCount | None:
        """Count with the model's own tokenizer; return None if it is not available here.

        Raises: InvalidWork; UnsupportedWork, if the left end of an input would have to be cut.
        """
        count = await self._counter.count(work, timeout_s) if self._counter else None
        if work.truncate is Truncate.LEFT and (count is None or count.truncated):
            raise UnsupportedWork("this upstream's API cannot cut the left end")
        return count

    def drop_connections(self) -> None:
        """Close the idle connections to the server."""
        self._http.drop_connections()

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> OpenAIBackend:
    """Return a client of the server at the spec's base URL."""
    # Connections to a hosted API are expensive to open, and it keeps them. A small local server closes early.
    idle_s = IDLE_S if spec.address.startswith("https:") else SHORT_IDLE_S
    return OpenAIBackend(open_client(spec, idle_s), spec.model, spec.tokenizer)
