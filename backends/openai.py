"""Any server of OpenAI's embeddings API: wire structs, pure encode and decode, then a few lines of I/O.

Source: OpenAI OpenAPI document 2.3.0; llama.cpp, Ollama and others where they differ.
Rule: only the fields that every such server knows are sent; cutting to `dimensions` and normalizing is done
here, which is what OpenAI's own models define them to be.
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
    Truncate,
    Work,
)
from backends.counting import TokenCount, TokenCounter, apply_prompt, open_token_counter
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http import IDLE_S, SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown
from backends.openai_wire import chosen_model, decode_embeddings, decode_models, error_of
from backends.replies import check_dimensions, check_tokens, fit_vectors, truncated_inputs

PROBE = Embed(("a",))
# How servers say that an input is too long: OpenAI and vLLM, llama.cpp, Ollama.
TOO_LONG = ("maximum context length", "too large to process", "context size", "context length", "too long")

Body = dict[str, Any]


class Facing(msgspec.Struct, frozen=True):
    """What a replica was found to be when it joined; model None is a server that needs no name.

    base64: whether it takes that encoding_format.
    """

    model: str | None = None
    max_tokens: int | None = None
    width: int | None = None
    base64: bool = True
    notes: tuple[str, ...] = ()


def route(address: str) -> str:
    """The path below a base URL: one without a path of its own means its /v1, as clients are given it."""
    rest = address.split("://", 1)[-1].rstrip("/")
    return "" if "/" in rest else "/v1"


def capabilities(facing: Facing, counter: TokenCounter | None) -> Capabilities:
    """What was learnt of a replica, in the contract's words."""
    own = {Operation.EMBED} | ({Operation.TOKENIZE, Operation.DETOKENIZE} if counter else set())
    return Capabilities(
        model_id=facing.model or "unnamed",
        operations=frozenset(own),
        max_input_tokens=facing.max_tokens,
        dimensions=facing.width,
        prompts=counter.rules.prompts if counter else {},
        default_prompt=counter.rules.default_prompt if counter else None,
        version="OpenAI API",
        outputs=frozenset({Output.DENSE}),
        notes=facing.notes,
    )


def encode(work: Embed, facing: Facing) -> Body:
    """The body of POST /v1/embeddings.

    Raises: UnsupportedWork, InvalidWork where this wire cannot say what is asked.
    """
    if not work.normalize:
        raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
    check_dimensions(work, facing.width)
    name: Body = {} if facing.model is None else {"model": facing.model}
    form: Body = {"encoding_format": "base64"} if facing.base64 else {}
    return name | {"input": work.inputs} | form


def decode(work: Embed, answer: UpstreamResponse, facing: Facing, counted: TokenCount | None) -> EmbedReply:
    """The reply in an answer of status 200. counted: by the model's own tokenizer, if it is here.

    Raises: ReplicaFailed where it is not an answer to this work.
    """
    vectors, told = decode_embeddings(answer.body, len(work.inputs))
    if counted is not None:
        return EmbedReply(fit_vectors(vectors, work), counted.tokens, counted.truncated)
    if told is None:
        raise ReplicaFailed("the upstream told no usage")
    check_tokens(told, len(work.inputs), facing.max_tokens)
    return EmbedReply(fit_vectors(vectors, work), told, truncated_inputs(work, told, facing.max_tokens))


def failure(answer: UpstreamResponse) -> BackendError:
    """What an answer of another status than 200 means."""
    error = error_of(answer)
    said = error.message.lower()
    match answer.status:
        case 401 | 403:
            return ReplicaFailed("the upstream refused the gateway's credential")
        case 400 | 413 | 422 | 500 if any(words in said for words in TOO_LONG):
            return InvalidWork("an input has more tokens than the model takes")
        case 400 | 404 if error.code == "model_not_found":
            return ReplicaFailed("the upstream does not serve this model")
        case 400 | 422:
            return InvalidWork("the upstream refused the input")
        case 429 if "insufficient_quota" in (error.code, error.type):
            return ReplicaFailed("the quota of the gateway's account at the upstream is used up")
        case 429:
            return ReplicaOverloaded("the upstream is overloaded")
        case 503:
            return ReplicaUnavailable("the upstream says it is not ready")
    return ReplicaFailed(f"the upstream answered with status {answer.status}")


class OpenAIBackend:
    """One server, or a hosted API."""

    def __init__(self, http: UpstreamClient, model: str | None = None, tokenizer: str | None = None) -> None:
        self._http = http
        self._path = route(http.base_url)
        self._asked = model
        self._source = tokenizer
        self._facing: Facing | None = None
        self._counter: TokenCounter | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        left = countdown(timeout_s)
        if self._source is not None:
            self._counter = await open_token_counter(self._source, left())
        facing = await self._named(left())
        # A server that loads its model at the first call is there all the same.
        try:
            facing = await self._probed(facing, left() * 0.9)
        except (AttemptTimedOut, ReplicaOverloaded) as error:
            facing = msgspec.structs.replace(facing, notes=(f"width not learnt: {error.message}",))
        self._facing = facing
        return capabilities(facing, self._counter)

    async def _named(self, timeout_s: float) -> Facing:
        """The served model and its length, as far as GET /v1/models tells; not every server has it."""
        answer = await self._http.get(f"{self._path}/models", timeout_s)
        if answer.status in {401, 403}:
            raise failure(answer)
        own = self._counter.rules.max_tokens if self._counter else None
        try:
            models = decode_models(answer) if answer.status == 200 else []
        except ReplicaFailed:
            models = []
        lengths = {one.id: one.max_model_len for one in models}
        # A name that is asked for may be an alias that the list does not hold.
        model = self._asked or (chosen_model(list(lengths), None) if lengths else None)
        told = lengths.get(model) if model is not None else None
        return Facing(model, min(filter(None, (told, own)), default=None))

    async def _probed(self, facing: Facing, timeout_s: float) -> Facing:
        """What one short text tells. Raises: BackendError."""
        left = countdown(timeout_s)
        answer = await self._post(PROBE, facing, left())
        if answer.status in {400, 422}:
            facing = msgspec.structs.replace(facing, base64=False, notes=("numbers, not base64",))
            answer = await self._post(PROBE, facing, left())
        if answer.status != 200:
            error = failure(answer)
            # Whatever it says of the probe is not the fault of an input.
            raise (
                error
                if error.retryable
                else ReplicaFailed(f"its embeddings answer with status {answer.status}")
            )
        vectors, told = decode_embeddings(answer.body, 1)
        if told is None and self._counter is None:
            raise ReplicaFailed("its replies tell no usage: name the model's `tokenizer`")
        return msgspec.structs.replace(facing, width=vectors.shape[1])

    async def _post(self, work: Embed, facing: Facing, timeout_s: float) -> UpstreamResponse:
        body = msgspec.json.encode(encode(work, facing))
        return await self._http.post(f"{self._path}/embeddings", body, timeout_s)

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._facing is None:
            raise ReplicaUnavailable("the replica has not joined")
        left = countdown(timeout_s)
        ready = apply_prompt(work, self._counter.rules if self._counter else None)
        if isinstance(ready, Tokenize | Detokenize) and self._counter is not None:
            return await self._counter.free(ready, left())
        if not isinstance(ready, Embed):
            raise UnsupportedWork("this upstream's wire embeds only")
        counted = await self._counted(ready, left())
        answer = await self._post(ready, self._facing, left())
        if answer.status != 200:
            raise failure(answer)
        return decode(ready, answer, self._facing, counted)

    async def _counted(self, work: Embed, timeout_s: float) -> TokenCount | None:
        """By the model's own tokenizer; None where that is not here.

        Raises: InvalidWork, UnsupportedWork where an input is too long to be cut as asked.
        """
        counted = await self._counter.count(work, timeout_s) if self._counter else None
        if work.truncate is Truncate.LEFT and (counted is None or counted.truncated):
            raise UnsupportedWork("this upstream's wire cuts no left end")
        return counted

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> OpenAIBackend:
    """The server at the spec's base URL."""
    # A hosted API keeps a connection that was dear to open; a small server near by drops it early.
    idle_s = IDLE_S if spec.address.startswith("https:") else SHORT_IDLE_S
    return OpenAIBackend(
        UpstreamClient(spec.address, spec.headers, tls=spec.tls, ip=spec.ip, idle_s=idle_s),
        spec.model,
        spec.tokenizer,
    )
