"""Stage `prepare`: from a call to the work that replicas receive, with its prompt, tokens and cost.

Runs between resolve and admit. Admission reserves the counted cost; dispatch cuts and sends the work.
"""

import asyncio
import sys
from collections import ChainMap
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from backends.contract import (
    Capabilities,
    Detokenize,
    Embed,
    EmbedParts,
    Encode,
    Operation,
    Rerank,
    Score,
    Tokenize,
)
from backends.contract import Work as BackendWork
from backends.contract.texts import INLINE_CHARACTERS_MAX, is_written_plainly, model_inputs_of
from gateway.calls import (
    Call,
    Deadline,
    ScoreParts,
    Work,
    default_truncation,
    inputs_of,
    pictures_in,
    truncation,
)
from gateway.errors import InvalidInput, OperationUnsupported
from gateway.lane.duplicates import without_duplicates
from gateway.lane.slices import token_bounds
from gateway.prompts import Prompts, role_prompts, with_prompt, with_prompt_lengths, with_roles
from gateway.quotas.limits import Cost
from gateway.routing.routes import Route
from gateway.tenants.keyring import Tenant
from gateway.upstreams.fair_threads import Claim, FairThreads
from gateway.upstreams.instructions import InstructedModel, with_pair_instruction, with_query_prompt
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.text_cuts import ASK_CHARACTERS, CutCall, cut_call
from gateway.upstreams.token_counts import TokenCount, count_here
from gateway.upstreams.token_ids import IdDecoder
from gateway.upstreams.vector_scores import neutral_work, scores_by_cosine, sides_of_pairs

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
MEDIA_OPERATIONS = frozenset({Operation.EMBED_IMAGE, Operation.EMBED_AUDIO})


class PreparedWork:
    """One call as its upstream receives it.

    capabilities: of the replicas when it was prepared, None if none had joined.
    by_cosine: the work embeds inputs whose vectors give the scores that the caller asked for.
    input_tokens: exact tokens of each input, None if they were not counted.
    places: for each input of the call, its index among those of the work; None if the work has them all.
    cut: the inputs that were cut to the call's `text_tokens` and `query_tokens`.
    cost: the most that the call can cost; its tokens are 0 unless a limit counts tokens, or what they cost.
    """

    __slots__ = (
        "_token_bounds",
        "by_cosine",
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
        *,
        by_cosine: bool,
    ) -> None:
        self.call = call
        self.route = route
        self.work, self.places = without_duplicates(work)
        self.capabilities = capabilities
        self.by_cosine = by_cosine
        self.input_tokens: list[int] | None = None
        self.cost = ONE_REQUEST
        self.cut = CutCall(call)
        self._token_bounds: list[int] | None = None

    @property
    def prompt(self) -> str | None:
        """Text that the replica puts before each input; None if only the replica knows it."""
        work, capabilities = self.work, self.capabilities
        if not isinstance(work, Embed | Encode | Tokenize) or capabilities is None:
            return ""
        name = capabilities.default_prompt if work.prompt_name is None else work.prompt_name
        return capabilities.prompts.get(name) if name else ""

    @property
    def work_inputs(self) -> int:
        """Number of inputs of the work."""
        return len(inputs_of(self.work))

    def most_tokens(self) -> list[int]:
        """Return the tokens of each input: exact where they were counted, else an upper bound."""
        if self.input_tokens is not None:
            return self.input_tokens
        if self._token_bounds is None:
            known = self.capabilities or UNKNOWN
            most = known.max_input_tokens
            if not isinstance(self.work, Tokenize | Detokenize):
                most = self.work.max_tokens or most
            self._token_bounds = token_bounds(
                self.work,
                most,
                self.prompt or "",
                pair_overhead=known.overhead_tokens,
                media_tokens=known.media_tokens,
            )
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
        is_free = isinstance(call.work, Tokenize | Detokenize)
        is_limited = not is_free and _tokens_allowed(tenant, route) is not None
        # A score is kept with its own tokens, which no reply states.
        is_kept = route.cache and isinstance(call.work, Rerank | Score)
        if is_limited or is_kept or inputs.always_counts:
            prepared.input_tokens = await self._count(inputs, prepared, tenant, deadline)
        tokens = sum(prepared.most_tokens()) if is_limited else 0
        images = pictures_in(call.work) if isinstance(call.work, EmbedParts | ScoreParts) else 0
        prepared.cost = route.price.cost(tokens, len(inputs_of(call.work)), images)
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
        count = len(inputs_of(call.work))
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
        if capabilities is None or prompt is None or not _is_countable(work, capabilities):
            return None
        assert not isinstance(work, Tokenize | Detokenize | EmbedParts)
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
                tokens = TokenCount(counter, model_inputs_of(work), prompt, most)
                room = self._room(prepared, tenant, is_large=tokens.characters > ASK_CHARACTERS)
                if is_reserved:
                    room.tokens = TOKENS_MAX
                claim = self._claim(tenant, bulk=prepared.call.bulk)
                return await tokens.run(self._threads, claim, room.require)
        except TimeoutError as error:
            raise deadline.error() from error

    def _room(self, prepared: PreparedWork, tenant: Tenant, *, is_large: bool) -> "TokenRoom":
        route, inputs = prepared.route, len(inputs_of(prepared.call.work))
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


def _is_countable(work: BackendWork, capabilities: Capabilities) -> bool:
    """Return whether the model's tokenizer alone, with its special tokens, determines the tokens."""
    if isinstance(work, Tokenize | Detokenize | EmbedParts):
        return False
    if isinstance(work, Rerank | Score):
        # Such a reranker puts each pair into a template.
        return not (capabilities.overhead_tokens or work.instruction)
    return is_written_plainly(work)


def _is_short(work: Embed, prompt: str) -> bool:
    return sum(map(len, work.inputs)) + len(prompt) * len(work.inputs) <= INLINE_CHARACTERS_MAX


def _build(inputs: ModelInputs, call: Call, route: Route) -> PreparedWork:
    capabilities = inputs.capabilities()
    by_cosine = scores_by_cosine(call.work, capabilities)
    if (
        by_cosine
        and isinstance(call.work, Rerank | ScoreParts)
        and capabilities is not None
        and capabilities.typed_inputs
    ):
        raise OperationUnsupported(
            f"the model {route.model!r} does not rerank, and its server embeds a query and its documents in "
            "separate requests only: name a reranker"
        )
    _check_late_chunking(call.work, capabilities)
    _check_no_media_texts(call.work, capabilities)
    work = plain = neutral_work(call.work, capabilities, by_cosine=by_cosine)
    if call.instruction is not None:
        work = _with_instruction(work, call, _instructed_model(inputs, route), call.instruction)
    elif isinstance(work, Embed | Encode | Tokenize):
        configured = ChainMap(route.prompts, inputs.prompts)
        work = _with_prompt(work, call, configured, capabilities)
    elif isinstance(call.work, ScoreParts) and isinstance(work, EmbedParts):
        work = _with_prompts_of_pairs(work, call.work, ChainMap(route.prompts, inputs.prompts), capabilities)
    elif isinstance(work, EmbedParts):
        work = _with_prompt_of_texts(work, call, ChainMap(route.prompts, inputs.prompts), capabilities)
    if capabilities is not None and not capabilities.pools_prompt:
        work = _with_prompt_lengths(work, plain)
    if not isinstance(work, Tokenize | Detokenize):
        default = default_truncation(route.truncate, capabilities)
        length, side = _length(call, route, capabilities), truncation(call, default, capabilities)
        work = msgspec.structs.replace(work, truncate=side, max_tokens=length)
    return PreparedWork(call, route, work, capabilities, by_cosine=by_cosine)


def _length(call: Call, route: Route, capabilities: Capabilities | None) -> int | None:
    """Return the tokens at which inputs are cut, None for the model's length."""
    length, most = call.prompt_tokens, capabilities.max_input_tokens if capabilities else None
    if route.input_tokens is not None and most is not None and most > route.input_tokens:
        length = min(length or most, route.input_tokens)
    return None if length is None or (most is not None and length >= most) else length


def _with_prompt(
    work: Embed | Encode | Tokenize,
    call: Call,
    configured: Prompts,
    capabilities: Capabilities | None,
) -> BackendWork:
    """Return the work with the prompt of its role. configured: prompts of the configuration."""
    checkpoint_prompts = capabilities.prompts if capabilities else {}
    if isinstance(call.work, Rerank) and isinstance(work, Embed):
        default = capabilities.default_prompt if capabilities else None
        return with_roles(work, ChainMap(*configured.maps, checkpoint_prompts), default)
    return with_prompt(work, call.role, configured, checkpoint_prompts)


def _with_prompt_of_texts(
    work: EmbedParts, call: Call, configured: Prompts, capabilities: Capabilities | None
) -> EmbedParts:
    """Return the work with a prompt before each input that is one text, as texts alone would have it."""
    places = [i for i, parts in enumerate(work.inputs) if len(parts) == 1 and isinstance(parts[0], str)]
    if not places:
        return work
    texts = Embed(tuple(str(work.inputs[i][0]) for i in places), prompt_name=work.prompt_name)
    prompted = with_prompt(texts, call.role, configured, capabilities.prompts if capabilities else {})
    inputs = list(work.inputs)
    for place, text in zip(places, prompted.inputs, strict=True):
        inputs[place] = (text,)
    return msgspec.structs.replace(work, inputs=tuple(inputs), prompt_name=prompted.prompt_name)


def _with_prompts_of_pairs(
    work: EmbedParts, pairs: ScoreParts, configured: Prompts, capabilities: Capabilities | None
) -> EmbedParts:
    """Return the work with the prompt of its role before each input that is one text."""
    default = capabilities.default_prompt if capabilities else None
    prompts = role_prompts(ChainMap(*configured.maps, capabilities.prompts if capabilities else {}), default)
    if prompts is None:
        return work
    query, document = prompts
    inputs = tuple(
        ((query if is_query else document) + parts[0],)
        if len(parts) == 1 and isinstance(parts[0], str)
        else parts
        for is_query, parts in sides_of_pairs(pairs)
    )
    return msgspec.structs.replace(work, inputs=inputs, prompt_name="")


def _check_late_chunking(work: Work, capabilities: Capabilities | None) -> None:
    """Check that the model can read its inputs as one text, if they are. Raises: InvalidInput."""
    if not isinstance(work, Embed) or not work.late_chunking or capabilities is None:
        return
    if not capabilities.late_chunking:
        pooling = capabilities.pooling or "not known"
        raise InvalidInput(
            f"this model offers no `late_chunking`, which needs mean pooling (its pooling: {pooling}) in the "
            "gateway's own engine; leave it out",
            param="late_chunking",
        )


def _check_no_media_texts(work: Work, capabilities: Capabilities | None) -> None:
    """Check that no text is a picture or a recording, for a model that could read it. Raises: InvalidInput.

    The base64 would be embedded as a text.
    """
    if capabilities is None or not capabilities.operations & MEDIA_OPERATIONS:
        return
    if isinstance(work, Rerank):
        _refuse_media_texts((work.query,), "the query")
        _refuse_media_texts(work.documents, "document {}")
    elif isinstance(work, Embed | Encode) and work.chat is None:
        _refuse_media_texts(work.inputs, "input {}")


def _refuse_media_texts(texts: Sequence[str], name: str) -> None:
    for index, text in enumerate(texts):
        if text.startswith(MEDIA_TEXTS):
            raise InvalidInput(
                f"{name.format(index)} is a picture or a recording in the place of a text: its letters would "
                'be read; send an object such as {"image": "data:…"}'
            )


def _with_prompt_lengths(work: BackendWork, plain: BackendWork) -> BackendWork:
    if isinstance(work, Embed | Encode) and isinstance(plain, Embed | Encode):
        return with_prompt_lengths(work, plain)
    return work


def _instructed_model(inputs: ModelInputs, route: Route) -> InstructedModel:
    capabilities = inputs.capabilities()
    checkpoint_prompts = capabilities.prompts if capabilities else {}
    prompts = ChainMap(route.prompts, inputs.prompts, checkpoint_prompts)
    return InstructedModel(route.model, inputs.instruction_template, prompts, capabilities)


def _with_instruction(work: BackendWork, call: Call, model: InstructedModel, instruction: str) -> BackendWork:
    """Return the work with the instruction of its call: in its queries, or for its replica to apply.

    Raises: InvalidInput, NoReplica.
    """
    match work:
        case Rerank() | Score():
            return with_pair_instruction(work, instruction, model)
        case Embed() if isinstance(call.work, Rerank):
            default = model.capabilities.default_prompt if model.capabilities else None
            return with_roles(work, model.prompts, default, model.query_prompt(instruction))
        case Embed() | Encode() if call.work is work:
            prompt = model.query_prompt(instruction)
            model.check_role(call.role)
            return with_query_prompt(work, prompt)
    raise InvalidInput(
        "this operation takes no `instruction` with this model: embed or rerank with it", param="instruction"
    )


def _tokens_allowed(tenant: Tenant, route: Route) -> int | None:
    """Return the most tokens that the limits of a call allow, None if they count neither tokens nor money."""
    return route.price.tokens_within((limit, limit.amount) for limit in tenant.limits + route.limits)
