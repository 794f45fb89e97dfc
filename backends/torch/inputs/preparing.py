"""Preparation of a piece of work for the network: prompts, roles, pairs, templates, fillers, truncation.

Rule: CPU-bound, therefore called off the event loop, except for a few words. Knows nothing of torch, queues
or replies. Ids are compared with the network's table before a pass: a processor raises an IndexError in the
middle of it, and a GPU loses all that the process computes.
Sources: Günther et al., "Late Chunking" (2024), and its code, in which the first chunk takes the special
tokens and the prompt before the text, and the last one those after it. One input has the vector that it has
without late chunking.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple, Protocol

import msgspec

from backends.contract import (
    Chat,
    Classify,
    Embed,
    Encode,
    Output,
    Rerank,
    Score,
    Tokenize,
    Truncate,
    Work,
    WorkInput,
)
from backends.contract.errors import SHORTEN, InvalidWork, ModelUnavailable, UnsupportedWork, input_too_long
from backends.contract.refusals import check_no_instruction, check_plain_texts
from backends.contract.texts import CHARACTERS_PER_TOKEN, clip_text
from backends.recipe.recipe import QueryExpansion, QueryForm, Recipe, takes_late_chunking
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import TextTokenizer, TokenSequences
from backends.torch.inputs.pairs import Pair, PairEncoder
from backends.torch.inputs.sequences import LOGITS, InputSequence, PreparedSequences


def filler_id(expansion: QueryExpansion | None, token_id: Callable[[str], int | None]) -> int:
    """Return the id that fills up texts. token_id: returns that of a token, None for an unknown one.

    Raises: ModelUnavailable if the vocabulary has none of the tokens.
    """
    if expansion is None:
        return 0
    found = [token_id(token) for token in expansion.tokens]
    ids = [id_ for id_ in found if id_ is not None]
    if not ids or (expansion.is_stated and found[0] is None):
        names = " or ".join(map(repr, expansion.tokens)) or "its mask or end token, which no file names"
        raise ModelUnavailable(
            f"queries are filled up with {names}, which the vocabulary does not have: name the token as "
            "`token` of `query_expansion`, or as `mask_token` in tokenizer_config.json"
        )
    return ids[0]


def prepare_chunks(texts: Sequence[str], tokenizer: TextTokenizer, skip: int = 0) -> PreparedSequences:
    """Return one sequence with the tokens of all texts, which are tokenized one by one.

    skip: tokens at its start that belong to a prompt and are left out of pooling. Raises: InvalidWork, if the
    sequence is longer than the model, or a text has no tokens.
    """
    _check_size(sum(map(len, texts)), tokenizer.max_tokens * CHARACTERS_PER_TOKEN, "characters", tokenizer)
    rows = tokenizer.ids(texts)
    empty = next((index for index, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise InvalidWork("it has no tokens, and `late_chunking` needs one of each input", input_index=empty)
    before, after = tokenizer.added_ids()
    rows[0] = [*before, *rows[0]]
    rows[-1] = [*rows[-1], *after]
    ids = list(chain.from_iterable(rows))
    _check_size(len(ids), tokenizer.max_tokens, "tokens", tokenizer)
    lengths = tuple(map(len, rows))
    # The last token of a prompt can also be the first of its text; something has to be pooled.
    bounds = [min(skip, lengths[0] - 1), *accumulate(lengths)]
    sequence = InputSequence(ids, [0] * len(ids), chunks=tuple(pairwise(bounds)))
    return PreparedSequences([sequence], frozenset({Output.DENSE}), (), lengths)


def _check_size(size: int, most: int, unit: str, tokenizer: TextTokenizer) -> None:
    if size > most:
        raise InvalidWork(
            f"This model's maximum context length is {tokenizer.max_tokens} tokens; with `late_chunking` all "
            f"inputs are one text, which has {size} {unit}. {SHORTEN}"
        )


def prepare_queries(
    texts: Sequence[str],
    work: Embed | Encode,
    outputs: frozenset[Output],
    form: QueryForm,
    tokenizer: TextTokenizer,
) -> PreparedSequences:
    """Tokenize queries; truncation keeps what stands around them. Raises: InvalidWork, UnsupportedWork."""
    check_plain_texts(work, "a model of pages")
    if work.truncate is Truncate.LEFT:
        raise UnsupportedWork("this model cannot cut the left end of a query, where its prefix is")
    (suffix,) = tokenizer.ids([form.suffix])
    limit = min(work.max_tokens or tokenizer.max_tokens, tokenizer.max_tokens) - len(suffix)
    written = [form.prefix + text for text in texts]
    encoded = tokenizer.encode(written, work.truncate, limit, special=False)
    too_long = next((i for i, ids in enumerate(encoded.ids) if len(ids) > limit), None)
    if too_long is not None:
        raise input_too_long(limit, f"{encoded.lengths[too_long]} tokens", too_long)
    sequences = [InputSequence([*ids, *suffix], [0] * (len(ids) + len(suffix))) for ids in encoded.ids]
    lengths = tuple(sequence.tokens for sequence in sequences)
    return PreparedSequences(sequences, outputs, encoded.truncated, lengths)


NAMED_MAX = 5


def require_words(prepared: PreparedSequences, rows: int, tokenizer: TextTokenizer) -> None:
    """Compare ids with the rows of a table. Raises: InvalidWork for the first text with a higher one."""
    for place, sequence in enumerate(prepared.sequences):
        if sequence.ids and max(sequence.ids) >= rows:
            token = tokenizer.token(next(id_ for id_ in sequence.ids if id_ >= rows))
            raise InvalidWork(
                f"it contains the token {token!r}, for which the network has no vector",
                input_index=prepared.input_of(place),
            )


def missing_words(tokenizer: TextTokenizer, rows: int) -> tuple[str, ...]:
    """Return the note on tokens without a vector, if there are any."""
    beyond = tokenizer.tokens_from(rows)
    if not beyond:
        return ()
    names = ", ".join(map(repr, beyond[:NAMED_MAX])) + (", …" if len(beyond) > NAMED_MAX else "")
    note = f"the network has vectors for {rows} tokens, and none for {len(beyond)} of its tokenizer: {names}"
    return (f"{note}; a text with one of them is refused",)


class RoleTokenizer(msgspec.Struct, frozen=True):
    """Tokenizer for texts of one role. filler: id that fills up queries."""

    tokenizer: TextTokenizer
    expansion: QueryExpansion | None = None
    filler: int = 0


class RendersChats(Protocol):
    """Renderer of conversations for one model."""

    def render(self, conversations: Sequence[WorkInput], chat: Chat) -> list[str]:
        """Return the text of each conversation. Raises: InvalidWork, UnsupportedWork."""


class Templates(NamedTuple):
    """Templates of the pairs that a model scores, and of its conversations."""

    pairs: RerankTemplate
    chats: RendersChats


class Preparer:
    """Preparation of texts for one checkpoint.

    outputs: those that can be requested. width: of its dense vectors. words: rows of the network's table of
    tokens, None if all ids of the tokenizer are known to be among them.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: TextTokenizer,
        outputs: frozenset[Output],
        width: int,
        templates: Templates,
        words: int | None = None,
    ) -> None:
        self._recipe = recipe
        self._outputs = outputs
        self._pairs = PairEncoder(tokenizer, templates.pairs)
        self._roles = _role_tokenizers(recipe, tokenizer)
        self.tokenizer = self._roles[False].tokenizer if recipe.kind == "multivector" else tokenizer
        self._padding = RoleTokenizer(
            tokenizer, recipe.padding, filler_id(recipe.padding, tokenizer.token_id)
        )
        self._width = width
        self._chats = templates.chats
        self._words = words

    def prepare(self, work: Work) -> PreparedSequences:
        """Tokenize a piece of work. Raises: InvalidWork, UnsupportedWork."""
        prepared = self._prepare(work)
        if self._words is not None:
            require_words(prepared, self._words, self.tokenizer)
        return prepared

    def _prepare(self, work: Work) -> PreparedSequences:
        match work:
            case Embed(late_chunking=True):
                return self._prepare_chunks(work)
            case Embed():
                self.check_dimensions(work.dimensions)
                return self._prepare_texts(work, frozenset({Output.DENSE}))
            case Encode():
                return self._prepare_encode(work)
            case Rerank():
                return self._prepare_pairs([(work.query, document) for document in work.documents], work)
            case Score():
                return self._prepare_pairs(work.pairs, work)
            case Classify():
                encoded = self._encode_classified(work)
                _require_tokens(encoded)
                return _prepared(encoded, LOGITS)
        raise UnsupportedWork("this engine does not do that")

    def prompted(self, work: Embed | Encode | Tokenize) -> list[str]:
        """Return each input with its prompt before it. Raises: InvalidWork."""
        return list(work.with_prompt(self._prompt(work.prompt_name)).inputs)

    def _encode_classified(self, work: Classify) -> TokenSequences:
        if work.chat is None:
            return self._pairs.encode_plainly(
                work.inputs, work.truncate, work.max_tokens, special=work.special_tokens
            )
        texts = self._chats.render(work.inputs, work.chat)
        return self.tokenizer.encode(texts, work.truncate, work.max_tokens, special=work.special_tokens)

    def _prepare_chunks(self, work: Embed) -> PreparedSequences:
        """Prepare all inputs as one text. Raises: InvalidWork, UnsupportedWork."""
        recipe = self._recipe
        if not takes_late_chunking(recipe):
            raise UnsupportedWork("late chunking needs a network with mean pooling, and no routes")
        check_plain_texts(work, "late chunking")
        if work.max_tokens is not None:
            raise InvalidWork(
                "`truncate_prompt_tokens` cuts no text of `late_chunking`: leave one of them out"
            )
        self.check_dimensions(work.dimensions)
        texts = self.prompted(work)
        if recipe.include_prompt:
            return prepare_chunks(texts, self.tokenizer)
        characters = work.prompt_characters or [len(self._prompt(work.prompt_name))]
        (skip,) = self._prompt_tokens([texts[0][: characters[0]]])
        return prepare_chunks(texts, self.tokenizer, skip)

    def _prepare_encode(self, work: Encode) -> PreparedSequences:
        missing = sorted(work.outputs - self._outputs)
        if missing or not work.outputs:
            has = ", ".join(sorted(self._outputs))
            raise UnsupportedWork(
                f"this model gives no {', '.join(missing) or 'such'} output; it gives: {has}"
            )
        if Output.DENSE in work.outputs:
            self.check_dimensions(work.dimensions)
        return self._prepare_texts(work, work.outputs)

    def _prepare_texts(self, work: Embed | Encode, outputs: frozenset[Output]) -> PreparedSequences:
        if self._recipe.kind == "multivector":
            check_plain_texts(work, "a model of late interaction")
            is_query = (work.prompt_name or self._recipe.default_prompt) == "query"
            return self._prepare_role(self.prompted(work), work, outputs, is_query=is_query)
        texts = self.prompted(work) if work.chat is None else self._chats.render(work.inputs, work.chat)
        route = self._route(work)
        if self._recipe.query is not None:
            return prepare_queries(texts, work, outputs, self._recipe.query, self.tokenizer)
        if route in self._recipe.tables:
            return self._prepare_lookup(texts, work, outputs, route)
        encoded = self.tokenizer.encode(texts, work.truncate, work.max_tokens, special=work.special_tokens)
        # A static model has a vector of zeros for such a text, as its library.
        if self._recipe.kind != "static":
            _require_tokens(encoded)
        if self._recipe.padding is not None:
            return _padded(encoded, outputs, self._padding)
        if self._recipe.include_prompt or work.chat is not None:
            return _prepared(encoded, outputs)
        check_plain_texts(work, "a model that leaves prompts out of its pooling")
        if encoded.truncated and work.truncate is Truncate.LEFT:
            raise UnsupportedWork("this model cannot cut the left end of an input, where its prompt may be")
        characters = work.prompt_characters or [len(self._prompt(work.prompt_name))] * len(texts)
        prompts = [text[:length] for text, length in zip(texts, characters, strict=True)]
        skips = zip(self._prompt_tokens(prompts), encoded.lengths, strict=True)
        # The last token of a prompt can also be the first of its text; something has to be pooled.
        return _prepared(encoded, outputs, [min(skip, length - 1) for skip, length in skips])

    def _route(self, work: Embed | Encode) -> str | None:
        """Return the route of a model with routes. Raises: InvalidWork."""
        recipe = self._recipe
        if recipe.network_route is None:
            return None
        name = work.prompt_name
        route = name if name in {*recipe.tables, recipe.network_route} else recipe.default_route
        # The gateway sends "" for inputs that contain their prompt; their role is then unknown.
        if route is None or name == "":
            names = ", ".join(sorted([*recipe.tables, recipe.network_route]))
            raise InvalidWork(
                f"this model has routes: name one of {names} as role or prompt, and configure no `prompts`"
            )
        return route

    def _prepare_lookup(
        self, texts: Sequence[str], work: Embed | Encode, outputs: frozenset[Output], route: str
    ) -> PreparedSequences:
        """Prepare texts whose terms are looked up: without special tokens."""
        if outputs != {Output.SPARSE}:
            raise UnsupportedWork(
                f"inputs of the route {route!r} have no network, and give term weights only"
            )
        truncate, limit = work.truncate, self.tokenizer.max_tokens
        if truncate is not Truncate.ERROR:
            limit = min(limit, work.max_tokens or limit)
        clipped = [clip_text(text, limit, truncate) for text in texts]
        rows = self.tokenizer.ids(clipped)
        cut = [i for i, row in enumerate(rows) if len(row) > limit or clipped[i] != texts[i]]
        if cut and truncate is Truncate.ERROR:
            raise input_too_long(limit, f"{len(rows[cut[0]])} tokens", cut[0])
        kept = [row[-limit:] if truncate is Truncate.LEFT else row[:limit] for row in rows]
        sequences = [InputSequence(row, [0] * len(row), table=route) for row in kept]
        return PreparedSequences(sequences, outputs, tuple(cut), tuple(map(len, kept)))

    def _prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Return the tokens at the start of each sequence that belong to its prompt.

        Raises: InvalidWork, if a prompt leaves no room for a text.
        """
        unique = [prompt for prompt in dict.fromkeys(prompts) if prompt]
        tokens = dict(zip(unique, self.tokenizer.prompt_lengths(unique), strict=True))
        return [tokens.get(prompt, 0) for prompt in prompts]

    def _prepare_role(
        self,
        texts: Sequence[str],
        work: Embed | Encode | Rerank | Score,
        outputs: frozenset[Output],
        *,
        is_query: bool,
    ) -> PreparedSequences:
        role = self._roles[is_query]
        encoded = role.tokenizer.encode(texts, work.truncate, work.max_tokens)
        _require_tokens(encoded)
        rows = zip(encoded.ids, encoded.type_ids, strict=True)
        sequences = [_fill_up(ids, type_ids, role, is_query=is_query) for ids, type_ids in rows]
        return PreparedSequences(sequences, outputs, encoded.truncated, tuple(encoded.lengths))

    def _prepare_pairs(self, pairs: Sequence[Pair], work: Rerank | Score) -> PreparedSequences:
        if self._recipe.kind == "multivector":
            check_no_instruction(work)
            return self._prepare_late_pairs(pairs, work)
        encoded = self._pairs.encode(pairs, work.truncate, work.instruction, work.max_tokens)
        _require_tokens(encoded)
        return _prepared(encoded, LOGITS)

    def _prepare_late_pairs(self, pairs: Sequence[Pair], work: Rerank | Score) -> PreparedSequences:
        """Prepare each query once, however many documents it is compared with."""
        outputs = frozenset({Output.MULTIVECTOR})
        unique = list(dict.fromkeys(query for query, _ in pairs))
        queries = self._prepare_role(
            [self._prompt("query") + query for query in unique], work, outputs, is_query=True
        )
        documents = self._prepare_role(
            [self._prompt("document") + document for _, document in pairs], work, outputs, is_query=False
        )
        place = {query: i for i, query in enumerate(unique)}
        truncated = set(documents.truncated)
        truncated |= {i for i, (query, _) in enumerate(pairs) if place[query] in queries.truncated}
        return PreparedSequences(
            [*queries.sequences, *documents.sequences],
            outputs,
            tuple(sorted(truncated)),
            (*queries.lengths, *documents.lengths),
            tuple((place[query], len(unique) + i) for i, (query, _) in enumerate(pairs)),
        )

    def _prompt(self, name: str | None) -> str:
        prompts = self._recipe.prompts
        chosen = self._recipe.default_prompt if name is None else name
        if not chosen:
            return ""
        if chosen not in prompts:
            names = ", ".join(sorted(prompts)) or "none"
            raise InvalidWork(f"the model has no prompt named {chosen!r}; it has: {names}")
        return prompts[chosen]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidWork if a vector has not so many components."""
        if dimensions is not None and not 1 <= dimensions <= self._width:
            raise InvalidWork(f"`dimensions` must be between 1 and {self._width}, not {dimensions}")


def _prepared(
    encoded: TokenSequences, outputs: frozenset[Output], skips: Sequence[int] | None = None
) -> PreparedSequences:
    """Return the sequences. skips: tokens at the start of each that are left out of pooling; None is none."""
    rows = zip(encoded.ids, encoded.type_ids, skips or repeat(0), strict=False)
    sequences = [InputSequence(ids, type_ids, skip) for ids, type_ids, skip in rows]
    return PreparedSequences(sequences, outputs, encoded.truncated, tuple(encoded.lengths))


def _padded(encoded: TokenSequences, outputs: frozenset[Output], role: RoleTokenizer) -> PreparedSequences:
    """Return the sequences, each filled up to one length."""
    rows = zip(encoded.ids, encoded.type_ids, strict=True)
    sequences = [_fill_up(ids, type_ids, role, is_query=False) for ids, type_ids in rows]
    return PreparedSequences(sequences, outputs, encoded.truncated, tuple(encoded.lengths))


def _require_tokens(encoded: TokenSequences) -> None:
    """Raise InvalidWork for an input without tokens, whose vector would depend on the rest of a batch."""
    if [] in encoded.ids:
        raise InvalidWork(
            "it has no tokens, as the model reads none of its characters", input_index=encoded.ids.index([])
        )


def _role_tokenizers(recipe: Recipe, tokenizer: TextTokenizer) -> dict[bool, RoleTokenizer]:
    """Return the tokenizer of queries under True, of documents under False."""
    if recipe.kind != "multivector":
        return {}
    late = recipe.late
    queries, documents = (
        tokenizer.with_max_tokens(max_tokens, late.markers) for max_tokens in late.lengths(recipe.max_tokens)
    )
    filler = filler_id(late.expansion, tokenizer.token_id)
    return {True: RoleTokenizer(queries, late.expansion, filler), False: RoleTokenizer(documents)}


def _fill_up(ids: list[int], type_ids: list[int], role: RoleTokenizer, *, is_query: bool) -> InputSequence:
    expansion = role.expansion
    missing = expansion.length - len(ids) if expansion is not None else 0
    if expansion is None or missing <= 0:
        return InputSequence(ids, type_ids, is_query=is_query)
    return InputSequence(
        [*ids, *[role.filler] * missing],
        [*type_ids, *[0] * missing],
        attended_tokens=None if expansion.attended else len(ids),
        is_query=is_query,
    )
