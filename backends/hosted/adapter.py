"""Adapter of hosted APIs that have a request of their own for each model; `models.py` describes these.

Every request costs money. Rule: a model is asked once for a vector, or for the scores of three pairs, and
later descriptions repeat what was found without a request.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Detokenize,
    Embed,
    EmbedParts,
    EmbedReply,
    Operation,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Tokenize,
    TokenizerSource,
    Truncate,
    Work,
)
from backends.contract.errors import (
    InvalidWork,
    ReplicaFailed,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.contract.refusals import (
    check_no_instruction,
    check_no_max_tokens,
    check_plain_texts,
    refused_parts,
)
from backends.contract.texts import surely_fits, token_upper_bounds
from backends.contract.vectors import shape_vectors
from backends.hosted.models import DEFAULT_TYPE, Body, HostedModel, Request, Rows
from backends.http.adapters import HttpBackend
from backends.http.client import UpstreamClient, UpstreamResponse, countdown
from backends.http.media import check_dense, check_media, check_no_template
from backends.http.offers import check_numbers
from backends.http.replies import (
    check_dimensions,
    check_tokens,
    check_vectors,
    run_some,
    score_by_query,
    truncated_inputs,
)
from backends.tokens.counting import TokenCounter, apply_prompt, open_token_counter
from backends.tokens.tokenizer import TokenCount

# Requests in flight of one piece of work. The lane cuts calls by `request_inputs`, so that only checks of a
# replica, and inputs of different kinds, need more than one.
REQUESTS_IN_FLIGHT = 8
# Bytes of UTF-8 that count as a token where neither the API nor a tokenizer counts them.
BYTES_PER_TOKEN = 4
PROBE = Embed(("a",))
RERANK_PROBE = Rerank("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))


def estimated_tokens(work: Work) -> int:
    """Return about the number of tokens of texts; every picture or recording counts as one."""
    if isinstance(work, EmbedParts):
        texts = ["".join([part for part in parts if isinstance(part, str)]) for parts in work.inputs]
        media = len(work.media)
    else:
        pairs = [item if isinstance(item, tuple) else (item,) for item in getattr(work, "model_inputs", ())]
        texts, media = ["".join(pair) for pair in pairs], 0
    return media + sum([max(1, -(-len(text.encode()) // BYTES_PER_TOKEN)) for text in texts])


class HostedBackend(HttpBackend):
    """Client of one model of a hosted API."""

    def __init__(self, http: UpstreamClient, model: HostedModel, tokenizer: TokenizerSource | None) -> None:
        super().__init__(http)
        self._model = model
        self._tokenizer = tokenizer
        self._counter: TokenCounter | None = None
        self._capabilities: Capabilities | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Ask the model once for a vector or for scores.

        Raises: BackendError.
        """
        if self._capabilities is None:
            remaining_s = countdown(timeout_s)
            if self._tokenizer is not None:
                self._counter = await open_token_counter(self._tokenizer, remaining_s())
            self._capabilities = await self._probe(remaining_s())
        return self._capabilities

    async def _probe(self, timeout_s: float) -> Capabilities:
        probe: Work = PROBE if Embed in self._model.routes else RERANK_PROBE
        try:
            rows = await self._rows(probe, timeout_s)
        except (InvalidWork, UnsupportedWork) as error:
            raise ReplicaFailed(f"it refused a short text: {error.message}").with_facts(
                detail=error.detail, upstream_status=error.upstream_status
            ) from error
        width = rows.values.shape[1] if rows.values.ndim == 2 else None
        found = _capabilities(self._model, width, self._counter)
        if rows.tokens is None and self._counter is None:
            note = "tokens are estimated: its replies have no counts"
            found = msgspec.structs.replace(found, notes=(note,))
        check_numbers(found)
        return found

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work.

        Raises: BackendError.
        """
        if (offered := self._capabilities) is None:
            raise ReplicaUnavailable("the replica has not joined")
        remaining_s, model = countdown(timeout_s), self._model
        if isinstance(work, Tokenize | Detokenize):
            return await self._run_tokenizer(work, remaining_s())
        if isinstance(work, Score):
            check_no_instruction(work)
            return await score_by_query(work, lambda part: self._rerank(part, remaining_s()))
        check_no_max_tokens(work)
        check_plain_texts(work, model.version)
        if isinstance(work, Rerank):
            return await self._rerank(work, remaining_s())
        prompted = self._prompted(work)
        if not isinstance(prompted, Embed | EmbedParts):
            raise UnsupportedWork(f"this upstream's wire does not carry {work.operation}")
        self._check_vectors_asked(prompted, offered)
        return await self._embed(prompted, remaining_s())

    def _prompted(self, work: Work) -> Work:
        """Return the work with the prompt of its role, or with a name that the API has a word for.

        Raises: InvalidWork.
        """
        model, name = self._model, work.prompt_name
        if not (model.types or model.prompts):
            return apply_prompt(work, self._counter.rules if self._counter else None)
        names = (model.types or model.prompts).keys() - {DEFAULT_TYPE}
        if not name or name in model.types:
            return work
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise InvalidWork(f"there is no prompt {name!r}; known here: {known}")
        prompted = work.with_prompts([model.prompts[name]] * len(work.inputs))
        return msgspec.structs.replace(prompted, prompt_name=None)

    def _check_vectors_asked(self, work: Embed | EmbedParts, offered: Capabilities) -> None:
        """Check the options of vectors. Raises: InvalidWork, UnsupportedWork."""
        model = self._model
        if isinstance(work, EmbedParts):
            if EmbedParts not in model.routes:
                raise refused_parts()
            check_dense(work)
            check_no_template(work)
            check_media(work, offered.operations)
        if Embed not in model.routes:
            raise UnsupportedWork("this upstream's model does not do that")
        if not (work.normalize or model.plain_vectors):
            raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
        width = work.dimensions
        if width is not None and model.has_fixed_widths and width not in {*model.widths, offered.dimensions}:
            known = ", ".join(map(str, sorted(model.widths)))
            raise InvalidWork(f"`dimensions` is {width}, the model's vectors have {known}")
        if isinstance(work, Embed):
            check_dimensions(work, offered.dimensions)

    async def _embed(self, work: Embed | EmbedParts, timeout_s: float) -> EmbedReply:
        remaining_s = countdown(timeout_s)
        count = await self._count(work, remaining_s())
        rows = await self._rows(work, remaining_s())
        if work.dimensions is not None and rows.values.shape[1] < work.dimensions:
            raise ReplicaFailed(f"asked for {work.dimensions} dimensions, got {rows.values.shape[1]}")
        vectors = shape_vectors(rows.values, dimensions=work.dimensions, normalize=work.normalize)
        tokens, truncated = self._counts(work, rows, count)
        return EmbedReply(vectors, tokens, truncated)

    async def _rerank(self, work: Rerank, timeout_s: float) -> RerankReply:
        if Rerank not in self._model.routes:
            raise UnsupportedWork("this upstream's wire embeds only")
        check_no_max_tokens(work)
        check_no_instruction(work)
        if work.raw_scores and not self._model.raw_scores:
            raise UnsupportedWork("this upstream gives no raw scores")
        remaining_s = countdown(timeout_s)
        count = await self._count(work, remaining_s())
        rows = await self._rows(work, remaining_s())
        tokens, truncated = self._counts(work, rows, count)
        return RerankReply(rows.values, tokens, truncated)

    def _counts(
        self, work: Embed | EmbedParts | Rerank, rows: Rows, count: TokenCount | None
    ) -> tuple[int, tuple[int, ...] | None]:
        """Return the tokens, as billed if the API reports them, and the inputs that were cut.

        Raises: ReplicaFailed, if the count cannot be.
        """
        tokens = rows.tokens
        if tokens is not None:
            check_tokens(tokens, len(work.inputs), self._most_tokens(work, rows))
        if isinstance(work, EmbedParts):
            return max(tokens or estimated_tokens(work), len(work.inputs)), rows.truncated
        if tokens is None or tokens < len(work.inputs):
            tokens = estimated_tokens(work) if count is None else count.tokens
        if rows.truncated is not None:
            return tokens, rows.truncated
        if count is not None:
            return tokens, count.truncated
        return tokens, truncated_inputs(work, tokens, self._model.max_tokens)

    def _most_tokens(self, work: Embed | EmbedParts | Rerank, rows: Rows) -> int | None:
        """Return the most tokens of one input, None if that is not known."""
        length = self._model.max_tokens
        if length is None or isinstance(work, Rerank):
            # Query and document may each be counted several times.
            return None
        if isinstance(work, EmbedParts):
            return length if rows.truncated == () else None
        # An API that cuts an input may count all of it.
        return max(length, *token_upper_bounds(work.model_inputs))

    async def _run_tokenizer(self, work: Tokenize | Detokenize, timeout_s: float) -> Reply:
        if self._counter is None:
            raise UnsupportedWork("this upstream's API does not tokenize, and it has no `tokenizer`")
        return await self._counter.run(work, timeout_s)

    async def _count(self, work: Embed | EmbedParts | Rerank, timeout_s: float) -> TokenCount | None:
        """Count with the model's own tokenizer; return None if it is not available here.

        Raises: InvalidWork; UnsupportedWork, if an input would be treated otherwise than requested.
        """
        count = None
        if self._counter is not None and not isinstance(work, EmbedParts):
            count = await self._counter.count(work, timeout_s)
        offered, length = self._model.truncation, self._model.max_tokens
        if work.truncate in offered or (count is not None and not count.truncated):
            return count
        is_text = not isinstance(work, EmbedParts)
        if is_text and length is not None and surely_fits(work.model_inputs, length):
            return count
        if work.truncate is Truncate.LEFT:
            raise UnsupportedWork("this upstream's API cannot cut the left end")
        if offered and work.truncate is Truncate.ERROR:
            raise UnsupportedWork(
                "this upstream's API cuts long inputs, and its model has no `tokenizer` to find them"
            )
        return count

    async def _rows(self, work: Work, timeout_s: float) -> Rows:
        """Send the requests of a work and join their replies in its order. Raises: BackendError."""
        remaining_s, model = countdown(timeout_s), self._model
        route = model.routes[type(work)]
        requests = requests_of(work, model)

        async def send(request: Request) -> Rows:
            response = await self.post(request.path, request.body, len(request.places), remaining_s())
            if response.status != 200:
                raise model.failure(response)
            return route.decode(response, len(request.places))

        replies = await run_some(send, requests, REQUESTS_IN_FLIGHT)
        return _joined(replies, [request.places for request in requests], len(work.inputs))

    async def post(self, path: str, body: Body, rows: int, timeout_s: float) -> UpstreamResponse:
        """Send one request; return the response of any status. Raises: BackendError."""
        return await self._http.post(path, msgspec.json.encode(body), timeout_s, rows=rows)


def requests_of(work: Work, model: HostedModel) -> list[Request]:
    """Return the requests of a work, each with as many inputs as the API takes. Raises: InvalidWork."""
    encode, requests = model.routes[type(work)].encode, list[Request]()
    count = len(work.inputs)
    most = model.request_inputs or count
    for start in range(0, count, most):
        part = work if count <= most else work.part(start, min(start + most, count))
        try:
            found = encode(part, model)
        except InvalidWork as error:
            if error.input_index is not None:
                error.input_index += start
            raise
        requests += [request._replace(places=[start + i for i in request.places]) for request in found]
    return requests


def _capabilities(model: HostedModel, width: int | None, counter: TokenCounter | None) -> Capabilities:
    rules = counter.rules if counter else None
    names = {
        Operation.EMBED: Embed in model.routes,
        Operation.RERANK: Rerank in model.routes,
        Operation.TOKENIZE: counter is not None,
        Operation.DETOKENIZE: counter is not None,
    }
    offered = frozenset(operation for operation, is_offered in names.items() if is_offered)
    types = [name for name in model.types if name != DEFAULT_TYPE]
    return Capabilities(
        model_id=model.name,
        operations=offered | model.media,
        max_input_tokens=model.max_tokens or (rules.max_tokens if rules else None),
        request_inputs=model.request_inputs,
        request_tokens=model.request_tokens,
        request_bytes=model.request_bytes,
        dimensions=width,
        prompts=dict.fromkeys(types, "")
        if types
        else dict(model.prompts or (rules.prompts if rules else {})),
        default_prompt=rules.default_prompt if rules and not (types or model.prompts) else None,
        version=model.version,
        outputs=frozenset({Output.DENSE} if Embed in model.routes else ()),
        typed_inputs=bool(types),
        norm_before_cut=model.has_fixed_widths,
        metered=True,
    )


def _joined(replies: Sequence[Rows], places: Sequence[Sequence[int]], expected: int) -> Rows:
    """Return the rows of all requests in the order of the work. places: of each request."""
    widths = {rows.values.shape[1:] for rows in replies}
    if len(widths) > 1:
        raise ReplicaFailed("the upstream's vectors differ in width")
    order = np.argsort(np.concatenate([np.asarray(place, np.intp) for place in places]))
    values = np.concatenate([rows.values for rows in replies])[order]
    if values.ndim == 2:
        check_vectors(values, expected)
    tokens: int | None = 0
    truncated: list[int] | None = []
    for rows, own in zip(replies, places, strict=True):
        tokens = None if tokens is None or rows.tokens is None else tokens + rows.tokens
        cut = rows.truncated
        truncated = None if truncated is None or cut is None else truncated + [own[i] for i in cut]
    return Rows(values, tokens, None if truncated is None else tuple(sorted(truncated)))
