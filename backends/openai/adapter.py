"""Adapter of any server of OpenAI's embeddings API, and of the hosted APIs that resemble it.

Requests and replies are in `api.py`, and the detection of what a model does in `probe.py`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from backends.contract import (
    NO_PROXY,
    Capabilities,
    Detokenize,
    Embed,
    EmbedChunks,
    EmbedChunksReply,
    EmbedParts,
    EmbedReply,
    Operation,
    Output,
    ReplicaSpec,
    Reply,
    Rerank,
    RerankReply,
    Score,
    ScoreParts,
    Tokenize,
    Truncate,
    Work,
)
from backends.contract.errors import (
    InvalidWork,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.contract.refusals import (
    check_no_instruction,
    check_no_max_tokens,
    check_plain_texts,
    refused_pairs,
    refused_parts,
)
from backends.http.adapters import HttpBackend
from backends.http.client import IDLE_S, SHORT_IDLE_S, UpstreamClient, countdown, open_client
from backends.http.egress import open_egress
from backends.http.offers import check_numbers
from backends.http.replies import check_reported_cuts, score_by_query
from backends.openai.api import (
    Follow,
    OpenAIApi,
    OpenAIProfile,
    decode,
    decode_rerank,
    failure,
    settings_of,
    without_base64,
)
from backends.openai.chunks import embed_chunks
from backends.openai.kind import OPENAI
from backends.openai.media import embed_media, score_media
from backends.openai.probe import ModelProbe
from backends.openai.shapes import DEFAULT_TYPE, ApiShape, Treatments, origin_of
from backends.openai.vendors import vendor_of
from backends.tokens.counting import TokenCounter, apply_prompt, open_token_counter
from backends.tokens.tokenizer import TokenCount


def capabilities(profile: OpenAIProfile, counter: TokenCounter | None, shape: ApiShape) -> Capabilities:
    """Convert a profile to capabilities; a counter adds tokenization and prompts."""
    rules = counter.rules if counter else None
    types = [name for name in shape.input_type if name != DEFAULT_TYPE]
    return Capabilities(
        model_id=profile.model or "unnamed",
        operations=_operations(profile, shape, has_tokenizer=counter is not None),
        max_input_tokens=profile.max_tokens,
        request_tokens=shape.request_tokens,
        request_inputs=shape.embed_inputs if profile.embeds else shape.rerank_inputs,
        dimensions=profile.width,
        # With types, the server applies the prompts of the checkpoint itself.
        prompts=dict.fromkeys(types, "") if shape.input_type else (rules.prompts if rules else {}),
        default_prompt=rules.default_prompt if rules and not shape.input_type else None,
        version=shape.version,
        outputs=frozenset({Output.DENSE} if profile.embeds else ()),
        typed_inputs=bool(types),
        metered=shape.metered,
        late_chunking=profile.embeds and shape.chunks is not None,
        notes=profile.notes if profile.scores is None else (*profile.notes, f"scores: {profile.scores}"),
    )


def _operations(profile: OpenAIProfile, shape: ApiShape, *, has_tokenizer: bool) -> frozenset[Operation]:
    operations = {
        Operation.EMBED: profile.embeds,
        Operation.EMBED_IMAGE: profile.embeds and profile.images,
        Operation.RERANK: profile.scores is not None,
        Operation.RERANK_IMAGE: profile.scores is not None and shape.rerank_media is not None,
        Operation.TOKENIZE: has_tokenizer,
        Operation.DETOKENIZE: has_tokenizer,
    }
    return frozenset(operation for operation, is_offered in operations.items() if is_offered)


def typed_work(work: Work, shape: ApiShape) -> Work:
    """Return the work for a server that knows the prompts: names of types remain, others are refused.

    Raises: InvalidWork.
    """
    if not work.prompt_name:
        return work
    if work.prompt_name not in shape.input_type or work.prompt_name == DEFAULT_TYPE:
        names = ", ".join(sorted(set(shape.input_type) - {DEFAULT_TYPE})) or "none"
        raise InvalidWork(f"there is no prompt {work.prompt_name!r}; known here: {names}")
    return msgspec.structs.replace(work, prompt_name="") if work.is_free else work


class OpenAIBackend(HttpBackend):
    """Client of one server or hosted API.

    http: a client of the origin of the spec's address. follow: as in `OpenAIApi`.
    """

    def __init__(self, http: UpstreamClient, spec: ReplicaSpec, follow: Follow | None = None) -> None:
        super().__init__(http)
        self._api = OpenAIApi(http, spec, follow)
        self._probe = ModelProbe(self._api, spec)
        self._tokenizer = spec.tokenizer
        self._profile: OpenAIProfile | None = None
        self._counter: TokenCounter | None = None
        self._handlers: dict[type, Callable[[Any, OpenAIProfile, float], Awaitable[Reply]]] = {
            Embed: self._embed,
            EmbedParts: self._embed_parts,
            EmbedChunks: self._embed_chunks,
            Rerank: self._rerank,
            Score: self._score,
            ScoreParts: self._score_parts,
            Tokenize: self._run_tokenizer,
            Detokenize: self._run_tokenizer,
        }

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query the model list, embed a short text, and score pairs if the server may rerank.

        Raises: BackendError.
        """
        remaining_s = countdown(timeout_s)
        if self._tokenizer is not None:
            self._counter = await open_token_counter(self._tokenizer, remaining_s())
        profile = await self._probe.profile(self._counter, remaining_s())
        found = capabilities(profile, self._counter, self._api.shape)
        check_numbers(found)
        self._profile = self._probe.known = profile
        return found

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work.

        Raises: BackendError.
        """
        profile = self._profile
        if profile is None:
            raise ReplicaUnavailable("the replica has not joined")
        remaining_s = countdown(timeout_s)
        check_no_max_tokens(work)
        check_plain_texts(work, "OpenAI's API")
        prompted = self._prompted(work)
        if isinstance(prompted, EmbedParts) and not profile.images:
            raise refused_parts()
        handler = self._handlers.get(type(prompted))
        offered = _operations(profile, self._api.shape, has_tokenizer=self._counter is not None)
        is_offered = prompted.operation in offered
        if handler is None or not (is_offered or isinstance(prompted, EmbedParts)):
            if isinstance(prompted, ScoreParts):
                raise refused_pairs()
            if profile.embeds and profile.scores is None:
                raise UnsupportedWork("this upstream's wire embeds only")
            raise UnsupportedWork("this upstream's model does not do that")
        return await handler(prompted, profile, remaining_s())

    def _prompted(self, work: Work) -> Work:
        if self._api.shape.input_type:
            return typed_work(work, self._api.shape)
        return apply_prompt(work, self._counter.rules if self._counter else None)

    async def _embed(self, work: Embed, profile: OpenAIProfile, timeout_s: float) -> EmbedReply:
        remaining_s = countdown(timeout_s)
        count = await self._count(work, self._api.shape.truncation, remaining_s())
        response = await self._api.embed(work, profile, remaining_s())
        if self._api.may_refuse_base64(response, profile):
            plain = without_base64(profile)
            second = await self._api.embed(work, plain, remaining_s())
            if second.status == 200:
                response = second
                self._profile = self._probe.known = plain
        if response.status != 200:
            raise failure(response)
        check_reported_cuts(work, response)
        return decode(work, response, profile, count, self._api.shape)

    async def _embed_parts(self, work: EmbedParts, profile: OpenAIProfile, timeout_s: float) -> EmbedReply:
        return await embed_media(self._api, work, profile, timeout_s)

    async def _embed_chunks(
        self, work: EmbedChunks, profile: OpenAIProfile, timeout_s: float
    ) -> EmbedChunksReply:
        return await embed_chunks(self._api, work, profile, timeout_s)

    async def _rerank(self, work: Rerank, profile: OpenAIProfile, timeout_s: float) -> RerankReply:
        remaining_s = countdown(timeout_s)
        count = await self._count(work, self._api.shape.rerank_truncation, remaining_s())
        response = await self._api.rerank(work, profile, remaining_s())
        if response.status != 200:
            raise failure(response)
        check_reported_cuts(work, response)
        assert profile.scores is not None
        return decode_rerank(work, response, profile.scores, count, profile.max_tokens)

    async def _score(self, work: Score, profile: OpenAIProfile, timeout_s: float) -> RerankReply:
        check_no_instruction(work)
        remaining_s = countdown(timeout_s)
        return await score_by_query(work, lambda part: self._rerank(part, profile, remaining_s()))

    async def _score_parts(self, work: ScoreParts, profile: OpenAIProfile, timeout_s: float) -> RerankReply:
        return await score_media(self._api, work, profile, timeout_s)

    async def _run_tokenizer(
        self, work: Tokenize | Detokenize, _profile: OpenAIProfile, timeout_s: float
    ) -> Reply:
        assert self._counter is not None
        return await self._counter.run(work, timeout_s)

    async def _count(
        self, work: Embed | Rerank, treatments: Treatments, timeout_s: float
    ) -> TokenCount | None:
        """Count with the model's own tokenizer; return None if it is not available here.

        treatments: those of long inputs that the API offers; empty if it has no field for them.

        Raises: InvalidWork; UnsupportedWork, if an input would be treated otherwise than requested.
        """
        count = await self._counter.count(work, timeout_s) if self._counter else None
        if work.truncate in treatments or (count is not None and not count.truncated):
            return count
        if work.truncate is Truncate.LEFT:
            raise UnsupportedWork("this upstream's API cannot cut the left end")
        if treatments and work.truncate is Truncate.ERROR:
            raise UnsupportedWork(
                "this upstream's API cuts long inputs, and its model has no `tokenizer` to find them"
            )
        return count


def open_replica(spec: ReplicaSpec) -> OpenAIBackend:
    """Return a client of the server at the spec's base URL, through a proxy if it is a vendor's."""
    # Connections to a hosted API are expensive to open, and it keeps them. A small local server closes early.
    idle_s = IDLE_S if spec.address.startswith("https:") else SHORT_IDLE_S
    origin = msgspec.structs.replace(spec, address=origin_of(spec.address))
    settings = settings_of(spec)
    is_vendor = settings.kind != OPENAI.name or vendor_of(settings, spec.address) is not None
    if not is_vendor and spec.proxy in {None, NO_PROXY}:
        return OpenAIBackend(open_client(origin, idle_s), spec)
    return OpenAIBackend(open_egress(origin, idle_s=idle_s), spec)
