"""Stage `prepare`: from a call to the work for replicas, with its prompt and tokens, and the cost to reserve.

Runs between resolve and admit. Admission reserves the counted cost; dispatch cuts and sends the work.
Rule: an instruction is applied as its model was trained, or the call is refused; it is never ignored. Only
queries bring one, unless it is the whole prompt: the cards of instruct embedders leave documents as they are.
"""

import asyncio
import sys
from collections import ChainMap
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import cast

import msgspec

from backends.contract import (
    Capabilities,
    Embed,
    Encode,
    Image,
    Lengths,
    Operation,
    Places,
    Rerank,
    Score,
    ScoreParts,
)
from backends.contract import Work as BackendWork
from backends.contract.texts import INLINE_CHARACTERS_MAX
from backends.contract.work import VectorScores
from backends.instructions import (
    PUBLISHED,
    PUBLISHED_UNPOOLED,
    WHOLE_PROMPT,
    instruction_prompt,
    template_in,
)
from gateway.calls import (
    Call,
    Deadline,
    Similarity,
    Work,
    default_truncation,
    truncation,
)
from gateway.errors import InvalidInput, NoReplica, OperationUnsupported
from gateway.prompts import Prompts, Role, with_prompt, with_roles
from gateway.quotas.limits import Cost
from gateway.routing.routes import Route
from gateway.tenants.keyring import Tenant
from gateway.upstreams.fair_threads import Claim, FairThreads
from gateway.upstreams.model_inputs import ModelInputs, TokenCount, count_here
from gateway.upstreams.text_cuts import ASK_CHARACTERS, CutCall, cut_call
from gateway.upstreams.token_ids import IdDecoder

# Refuses a call of at least this cost if it does not fit now; returns how many tokens fit.
Ask = Callable[[Tenant, Route, Cost], Awaitable[int]]

# As many ids take as long to decode.
ASK_IDS = 16 * 1024
TOKENS_MAX = sys.maxsize
ONE_REQUEST = Cost()
# Of a model of which no replica has joined.
UNKNOWN = Capabilities("", frozenset())
# Beginnings of texts that are pictures or recordings.
MEDIA_TEXTS = ("data:image/", "data:audio/", "data:video/")
MEDIA_OPERATIONS = frozenset({Operation.EMBED_IMAGE, Operation.EMBED_AUDIO, Operation.RERANK_IMAGE})


class PreparedWork:
    """One call as its upstream receives it.

    capabilities: of the replicas when it was prepared, None if none had joined.
    by_vectors: the work embeds inputs whose vectors give the scores that the caller asked for.
    input_tokens: exact tokens of each input, None if they were not counted.
    places: for each input of the call, its index among those of the work; None if the work has them all.
    cut: the inputs that were cut to the call's `text_tokens` and `query_tokens`.
    cost: the most that the call can cost; its tokens are 0 unless a limit counts tokens, or what they cost.
    """

    __slots__ = (
        "_token_bounds",
        "by_vectors",
        "call",
        "capabilities",
        "cost",
        "cut",
        "input_tokens",
        "places",
        "route",
        "work",
    )

    def __init__(
        self,
        call: Call,
        route: Route,
        work: BackendWork,
        capabilities: Capabilities | None,
        by_vectors: VectorScores | None,
    ) -> None:
        self.call = call
        self.route = route
        self.work: BackendWork
        self.places: Places | None
        self.work, self.places = work.without_duplicates()
        self.capabilities = capabilities
        self.by_vectors = by_vectors
        self.input_tokens: list[int] | None = None
        self.cost = ONE_REQUEST
        self.cut = CutCall(call)
        self._token_bounds: list[int] | None = None

    @property
    def prompt(self) -> str | None:
        """Text that the replica puts before each input; None if only the replica knows it."""
        work, capabilities = self.work, self.capabilities
        if not work.has_prompt or capabilities is None:
            return ""
        name = capabilities.default_prompt if work.prompt_name is None else work.prompt_name
        return capabilities.prompts.get(name) if name else ""

    @property
    def work_inputs(self) -> int:
        """Number of inputs of the work."""
        return len(self.work.inputs)

    def most_tokens(self) -> list[int]:
        """Return the tokens of each input: exact where they were counted, else an upper bound."""
        if self.input_tokens is not None:
            return self.input_tokens
        if self._token_bounds is None:
            known = self.capabilities or UNKNOWN
            most = self.work.max_tokens or known.max_input_tokens
            lengths = Lengths(most, self.prompt or "", known.overhead_tokens, known.media_tokens)
            self._token_bounds = self.work.token_bounds(lengths)
        return self._token_bounds


class Preparer:
    """Prepares calls. ask: called while tokens are counted, with the lowest cost possible."""

    def __init__(self, threads: FairThreads, ask: Ask) -> None:
        self._threads = threads
        self._ask = ask
        self._flows = count()

    async def prepare(
        self, inputs: ModelInputs, tenant: Tenant, route: Route, call: Call, deadline: Deadline
    ) -> PreparedWork:
        """Return the work, counted exactly where a limit or a shared batch needs the number.

        inputs: of the model that serves the route. Raises: DeadlineExceeded, InvalidInput, Overloaded,
        QuotaExceeded, RequestExceedsLimit.
        """
        if call.text_tokens is None and call.query_tokens is None:
            prepared = _build(inputs, call, route)
        else:
            cut = await self._cut(inputs, tenant, route, call, deadline)
            prepared = _build(inputs, cut.call, route)
            prepared.cut = cut
        # Tokenizing is free, whatever the limits.
        is_limited = not call.work.is_free and _tokens_allowed(tenant, route) is not None
        # A score is kept with its own tokens, which no reply states.
        is_kept = route.cache and call.work.operation is Operation.RERANK
        if is_limited or is_kept or inputs.always_counts:
            prepared.input_tokens = await self._count(inputs, prepared, tenant, deadline)
        tokens = sum(prepared.most_tokens()) if is_limited else 0
        images = sum(isinstance(medium, Image) for medium in call.work.media)
        prepared.cost = route.price.cost(tokens, call.work.counted_inputs, images)
        return prepared

    async def refresh(
        self, inputs: ModelInputs, prepared: PreparedWork, tenant: Tenant, deadline: Deadline
    ) -> PreparedWork:
        """Return the work as the replicas of this moment need it.

        Usually that is `prepared` itself. A replica that joined since may have reported other prompts, or
        that it scores no pairs; then the work is built and counted again.

        Raises: DeadlineExceeded, Overloaded.
        """
        capabilities = inputs.capabilities()
        if capabilities is prepared.capabilities or capabilities == prepared.capabilities:
            return prepared
        return await self.prepare_again(inputs, prepared, tenant, deadline)

    async def prepare_again(
        self, inputs: ModelInputs, prepared: PreparedWork, tenant: Tenant, deadline: Deadline
    ) -> PreparedWork:
        """Return the work as a model needs it now, or another model of the same name.

        inputs: of that model. The quota is reserved already.
        Raises: DeadlineExceeded, InvalidInput, OperationUnsupported, Overloaded.
        """
        fresh = _build(inputs, prepared.call, prepared.route)
        fresh.cut = prepared.cut
        if inputs.always_counts:
            # The tokens of calls that share a batch would otherwise be divided by length.
            fresh.input_tokens = await self._count(inputs, fresh, tenant, deadline, is_reserved=True)
        return fresh

    async def decode_ids(
        self,
        decoder: IdDecoder,
        tenant: Tenant,
        route: Route,
        ids: Sequence[Sequence[int]],
        deadline: Deadline,
    ) -> list[str]:
        """Return the text of each list of token ids. Raises: as `IdDecoder.decode`, and as `ask` for many."""
        if sum(map(len, ids)) > ASK_IDS:
            # Each of the texts has a token at least.
            await self._ask(tenant, route, route.price.cost(len(ids), len(ids)))
        return await decoder.decode(ids, self._threads, self._claim(tenant, bulk=False), deadline)

    async def _cut(
        self, inputs: ModelInputs, tenant: Tenant, route: Route, call: Call, deadline: Deadline
    ) -> CutCall:
        count = call.work.counted_inputs
        room = TokenRoom(lambda tokens: self._ask(tenant, route, route.price.cost(tokens, count)), -1)
        try:
            async with asyncio.timeout_at(deadline.at_s):
                claim = self._claim(tenant, bulk=call.bulk)
                return await cut_call(call, inputs.open_counter, self._threads, claim, room.require)
        except TimeoutError as error:
            raise deadline.error() from error

    async def _count(
        self,
        inputs: ModelInputs,
        prepared: PreparedWork,
        tenant: Tenant,
        deadline: Deadline,
        *,
        is_reserved: bool = False,
    ) -> list[int] | None:
        """Return the exact tokens of each input, None if they cannot be counted here.

        is_reserved: the quota is reserved already.
        """
        work, capabilities, prompt = prepared.work, prepared.capabilities, prepared.prompt
        if capabilities is None or prompt is None or not work.is_countable(capabilities):
            return None
        most = capabilities.max_input_tokens
        if most is None or not inputs.can_count(capabilities):
            return None
        most = min(most, work.max_tokens or most)
        try:
            async with asyncio.timeout_at(deadline.at_s):
                counter = await inputs.counter(capabilities)
                if counter is None:
                    return None
                if isinstance(work, Embed) and _is_short(work, prompt):
                    return count_here(counter, work.inputs, prompt, most)
                tokens = TokenCount(counter, work.model_inputs, prompt, most)
                room = self._room(prepared, tenant, is_large=tokens.characters > ASK_CHARACTERS)
                if is_reserved:
                    room.tokens = TOKENS_MAX
                claim = self._claim(tenant, bulk=prepared.call.bulk)
                return await tokens.run(self._threads, claim, room.require)
        except TimeoutError as error:
            raise deadline.error() from error

    def _room(self, prepared: PreparedWork, tenant: Tenant, *, is_large: bool) -> "TokenRoom":
        route, inputs = prepared.route, prepared.call.work.counted_inputs
        most = _tokens_allowed(tenant, route)
        return TokenRoom(
            lambda tokens: self._ask(tenant, route, route.price.cost(tokens, inputs)),
            # Without room, the first use asks.
            -1 if is_large else TOKENS_MAX if most is None else most,
        )

    def _claim(self, tenant: Tenant, *, bulk: bool) -> Claim:
        priority = "bulk" if bulk else tenant.priority
        return Claim(tenant.name, next(self._flows), tenant.weight, priority)


class TokenRoom:
    """Tokens that fit into the limits of one call, as last known. ask: returns what fits now, or refuses."""

    def __init__(self, ask: Callable[[int], Awaitable[int]], tokens: int) -> None:
        self.tokens = tokens
        self._ask = ask

    async def require(self, tokens: int) -> None:
        """Check that this many tokens fit. Raises: QuotaExceeded, RequestExceedsLimit, QuotaUnavailable."""
        if tokens > self.tokens:
            self.tokens = await self._ask(tokens)


def _is_short(work: Embed, prompt: str) -> bool:
    return sum(map(len, work.inputs)) + len(prompt) * len(work.inputs) <= INLINE_CHARACTERS_MAX


def _build(inputs: ModelInputs, call: Call, route: Route) -> PreparedWork:
    capabilities = inputs.capabilities()
    by_vectors = call.work.by_vectors(capabilities)
    roles = None if by_vectors is None else by_vectors.roles
    if roles is not None and capabilities is not None and capabilities.typed_inputs:
        raise OperationUnsupported(
            f"the model {route.model!r} does not rerank, and its server embeds a query and its documents in "
            "separate requests only: name a reranker"
        )
    _check_pages(call.work, by_vectors)
    _check_uncut_pairs(call, by_vectors, capabilities)
    _check_late_chunking(call.work, capabilities)
    _check_no_media_texts(call.work, capabilities)
    work = plain = cast("BackendWork", call.work if by_vectors is None else by_vectors.work)
    known = capabilities or UNKNOWN
    configured, prompts = ChainMap(route.prompts, inputs.prompts), known.prompts
    if call.instruction is not None:
        model = InstructedModel(
            route.model, inputs.instruction_template, ChainMap(*configured.maps, prompts), capabilities
        )
        work = _with_instruction(work, call, model, roles)
    elif roles is not None:
        work = with_roles(work, roles, ChainMap(*configured.maps, prompts), known.default_prompt)
    else:
        work = with_prompt(work, call.role, configured, prompts)
    # Ranges of chunks are those of the text, which begins behind its prompt.
    if not known.pools_prompt or call.work.joins_chunks:
        work = work.with_prompt_lengths(plain)
    default = default_truncation(route.truncate, capabilities)
    work = work.with_lengths(truncation(call, default, capabilities), _length(call, route, capabilities))
    return PreparedWork(call, route, work, capabilities, by_vectors)


def _length(call: Call, route: Route, capabilities: Capabilities | None) -> int | None:
    """Return the tokens at which inputs are cut, None for the model's length."""
    length, most = call.prompt_tokens, capabilities.max_input_tokens if capabilities else None
    if route.input_tokens is not None and most is not None and most > route.input_tokens:
        length = min(length or most, route.input_tokens)
    return None if length is None or (most is not None and length >= most) else length


def _check_late_chunking(work: Work, capabilities: Capabilities | None) -> None:
    """Check that the model can read its inputs as one text, if they are. Raises: InvalidInput."""
    if work.joins_chunks and capabilities is not None and not capabilities.late_chunking:
        pooling = capabilities.pooling or "not known"
        raise InvalidInput(
            f"this model offers no `late_chunking`, which needs mean pooling (its pooling: {pooling}) in the "
            "gateway's own engine, or a hosted model that has it; leave it out",
            param="late_chunking",
        )


def _check_pages(work: Work, by_vectors: VectorScores | None) -> None:
    """Check that no document is a text, which a model of pages reads as a query. Raises: InvalidInput."""
    if by_vectors is None or not isinstance(work, ScoreParts):
        return
    if not by_vectors.work.outputs_of(UNKNOWN):
        return
    for index, (_, document) in enumerate(work.pairs):
        if any(isinstance(part, str) for part in document):
            raise InvalidInput(f"this model ranks images: document {index} has a text", param="documents")


def _check_uncut_pairs(
    call: Call, by_vectors: VectorScores | None, capabilities: Capabilities | None
) -> None:
    """Check that no pair with images is cut by its caller, which no reranker does. Raises: InvalidInput."""
    if by_vectors is not None or capabilities is None or not isinstance(call.work, ScoreParts):
        return
    length, most = call.prompt_tokens, capabilities.max_input_tokens
    if length is not None and (most is None or length < most):
        raise InvalidInput(
            "this model cuts no pair with images: leave out `truncate_prompt_tokens`",
            param="truncate_prompt_tokens",
        )


def _check_no_media_texts(work: Work, capabilities: Capabilities | None) -> None:
    """Check that no text is a picture or a recording, for a model that could read it. Raises: InvalidInput.

    The base64 would be embedded as a text.
    """
    if capabilities is None or not capabilities.operations & MEDIA_OPERATIONS:
        return
    named: Sequence[tuple[str, Sequence[str]]] = ()
    if isinstance(work, Rerank):
        named = (("the query", (work.query,)), ("document {}", work.documents))
    elif isinstance(work, Score):
        named = (
            ("text 1 of pair {}", [first for first, _ in work.pairs]),
            ("text 2 of pair {}", [second for _, second in work.pairs]),
        )
    elif isinstance(work, Similarity) or (isinstance(work, Embed | Encode) and work.chat is None):
        named = (("input {}", work.inputs),)
    for name, texts in named:
        for index, text in enumerate(texts):
            if text.startswith(MEDIA_TEXTS):
                raise InvalidInput(
                    f"{name.format(index)} is a picture or a recording in the place of a text: its letters "
                    'would be read; send an object such as {"image": "data:…"}'
                )


class InstructedModel(msgspec.Struct, frozen=True):
    """Facts about the model of a call that brings an instruction.

    name: the public name. template: of the configuration. prompts: of configuration and checkpoint, by name.
    capabilities: None while no replica has joined.
    """

    name: str
    template: str | None
    prompts: Prompts
    capabilities: Capabilities | None

    def check_pairs(self) -> None:
        """Check that scores of pairs take an instruction; a replica that has not joined checks it itself.

        Raises: InvalidInput.
        """
        if self.capabilities is not None and not self.capabilities.takes_instruction:
            raise InvalidInput(
                f"the model {self.name!r} takes no `instruction`: send the call without it",
                param="instruction",
            )

    def query_prompt(self, instruction: str) -> str:
        """Return the text that puts an instruction before a query. Raises: InvalidInput, NoReplica."""
        capabilities = self.capabilities
        if capabilities is None:
            raise NoReplica("no replica has reported yet how this model takes an `instruction`")
        if capabilities.typed_inputs:
            raise InvalidInput(
                f"the server of the model {self.name!r} puts its own prompt before a query: send the call "
                "without `instruction`",
                param="instruction",
            )
        template = self._template(capabilities)
        if template is None or Operation.EMBED not in capabilities.operations:
            raise InvalidInput(
                f"the model {self.name!r} has no known template for `instruction`: write it into the texts, "
                "or have `instruction_template` set for its upstream",
                param="instruction",
            )
        return instruction_prompt(template, instruction)

    def check_role(self, role: Role | None) -> None:
        """Check that the inputs may bring an instruction: queries, or all if it is the whole prompt.

        Raises: InvalidInput.
        """
        is_whole_prompt = self.capabilities is not None and self._template(self.capabilities) == WHOLE_PROMPT
        if role == "document" and not is_whole_prompt:
            raise InvalidInput("`instruction` is for queries: send documents without it", param="instruction")

    def _template(self, capabilities: Capabilities) -> str | None:
        published = PUBLISHED if capabilities.pools_prompt else PUBLISHED_UNPOOLED
        return self.template or template_in(self.prompts.values()) or published.get(capabilities.model_id)


def _with_instruction(
    work: BackendWork, call: Call, model: InstructedModel, roles: Sequence[bool] | None
) -> BackendWork:
    """Return the work with the instruction of its call: in its queries, or for its replica to apply.

    roles: of its inputs, None if they have none. Raises: InvalidInput, NoReplica.
    """
    instruction = call.instruction or ""
    if work.instruction_place == "pair":
        model.check_pairs()
        return msgspec.structs.replace(work, instruction=instruction)
    if work.instruction_place == "text":
        if call.work is work:
            prompt = model.query_prompt(instruction)
            model.check_role(call.role)
            return work.with_prompt(prompt)
        if roles is not None:
            default = model.capabilities.default_prompt if model.capabilities else None
            return with_roles(work, roles, model.prompts, default, model.query_prompt(instruction))
    raise InvalidInput(
        "this operation takes no `instruction` with this model: embed or rerank with it", param="instruction"
    )


def _tokens_allowed(tenant: Tenant, route: Route) -> int | None:
    """Return the most tokens that the limits of a call allow, None if they count neither tokens nor money."""
    return route.price.tokens_within((limit, limit.amount) for limit in tenant.limits + route.limits)
