"""From a piece of work to the sequences that the network computes: prompts, roles, pairs, templates, cutting.

Rule: CPU-bound; called off the event loop, but for a few words. Knows nothing of torch, queues or replies.
"""

from collections.abc import Sequence as Many

import msgspec

from backends.contract import Classify, Embed, Encode, Output, Rerank, Score, Tokenize, Truncate, Work
from backends.errors import InvalidWork, UnsupportedWork
from backends.texts import clip_text
from backends.tokens import TextTokenizer, TokenSequences
from backends.torch.checkpoint import Recipe
from backends.torch.late import Expansion
from backends.torch.sequences import LOGITS, Sequence

Pair = tuple[str, str]


class Prepared(msgspec.Struct, frozen=True):
    """The sequences of one piece of work, and what is wanted of each.

    lengths: the tokens of each sequence as callers count them: fillers are free. truncated: indices of inputs
    that were cut. compared: for late interaction, which two sequences each score compares.
    """

    sequences: Many[Sequence]
    outputs: frozenset[Output]
    truncated: tuple[int, ...]
    lengths: tuple[int, ...]
    compared: tuple[tuple[int, int], ...] = ()


class Template(msgspec.Struct, frozen=True):
    """What stands before a query, between it and its document, and after that: a reranker's chat."""

    before: str
    between: str
    after: str


class Side(msgspec.Struct, frozen=True):
    """How texts of one role become tokens. filler: the id that queries are filled up with."""

    tokenizer: TextTokenizer
    expansion: Expansion | None = None
    filler: int = 0


class Preparer:
    """One checkpoint's ways with texts.

    outputs: what can be asked of it. width: of its dense vectors. template: of a language model that reranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: TextTokenizer,
        outputs: frozenset[Output],
        width: int,
        template: Template | None = None,
    ) -> None:
        self._recipe = recipe
        self._outputs = outputs
        self._template = template
        self._sides = _sides(recipe, tokenizer)
        self.tokenizer = self._sides[False].tokenizer if recipe.kind == "multivector" else tokenizer
        self._width = width

    def prepare(self, work: Work) -> Prepared:
        """Raises: InvalidWork, UnsupportedWork."""
        match work:
            case Embed():
                self._check_dimensions(work.dimensions)
                return self._texts(work, frozenset({Output.DENSE}))
            case Encode():
                return self._encode(work)
            case Rerank():
                return self._pairs([(work.query, document) for document in work.documents], work.truncate)
            case Score():
                return self._pairs(work.pairs, work.truncate)
            case Classify():
                return _asked(self.tokenizer.encode(work.inputs, work.truncate), LOGITS)
        raise UnsupportedWork("this engine does not do that")

    def prompted(self, work: Embed | Encode | Tokenize) -> list[str]:
        """Each input with its prompt before it. Raises: InvalidWork."""
        prompt = self._prompt(work.prompt_name)
        texts = [prompt + text for text in work.inputs]
        return [text.lower() for text in texts] if self._recipe.lower_case else texts

    def _encode(self, work: Encode) -> Prepared:
        missing = sorted(work.outputs - self._outputs)
        if missing or not work.outputs:
            has = ", ".join(sorted(self._outputs))
            raise UnsupportedWork(
                f"this model gives no {', '.join(missing) or 'such'} output; it gives: {has}"
            )
        if Output.DENSE in work.outputs:
            self._check_dimensions(work.dimensions)
        return self._texts(work, work.outputs)

    def _texts(self, work: Embed | Encode, outputs: frozenset[Output]) -> Prepared:
        if self._recipe.kind == "multivector":
            is_query = (work.prompt_name or self._recipe.default_prompt) == "query"
            return self._by_role(self.prompted(work), work.truncate, outputs, is_query=is_query)
        prompt = self._prompt(work.prompt_name)
        sequences = self.tokenizer.encode(self.prompted(work), work.truncate)
        if not prompt or self._recipe.include_prompt:
            return _asked(sequences, outputs)
        # The prompt alone ends in a separator that the prompted text does not have there.
        alone = self.tokenizer.encode([prompt], work.truncate).lengths[0] - 1
        return _asked(sequences, outputs, skip=alone)

    def _by_role(
        self, texts: Many[str], truncate: Truncate, outputs: frozenset[Output], *, is_query: bool
    ) -> Prepared:
        side = self._sides[is_query]
        found = side.tokenizer.encode(texts, truncate)
        rows = zip(found.ids, found.type_ids, strict=True)
        sequences = [_filled(ids, types, side, is_query=is_query) for ids, types in rows]
        return Prepared(sequences, outputs, found.truncated, tuple(found.lengths))

    def _pairs(self, pairs: Many[Pair], truncate: Truncate) -> Prepared:
        if self._recipe.kind == "multivector":
            return self._compared(pairs, truncate)
        if self._template is not None:
            return _asked(_templated(self.tokenizer, self._template, pairs, truncate), LOGITS)
        return _asked(self.tokenizer.encode(pairs, truncate), LOGITS)

    def _compared(self, pairs: Many[Pair], truncate: Truncate) -> Prepared:
        """Each query is computed once, however many documents it is compared with."""
        wanted = frozenset({Output.MULTIVECTOR})
        names = list(dict.fromkeys(query for query, _ in pairs))
        queries = self._by_role(
            [self._prompt("query") + one for one in names], truncate, wanted, is_query=True
        )
        documents = self._by_role(
            [self._prompt("document") + one for _, one in pairs], truncate, wanted, is_query=False
        )
        place = {name: i for i, name in enumerate(names)}
        cut = set(documents.truncated)
        cut |= {i for i, (query, _) in enumerate(pairs) if place[query] in queries.truncated}
        return Prepared(
            [*queries.sequences, *documents.sequences],
            wanted,
            tuple(sorted(cut)),
            (*queries.lengths, *documents.lengths),
            tuple((place[query], len(names) + i) for i, (query, _) in enumerate(pairs)),
        )

    def _prompt(self, name: str | None) -> str:
        prompts = self._recipe.prompts
        chosen = self._recipe.default_prompt if name is None else name
        if not chosen:
            return ""
        if chosen not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidWork(f"the model has no prompt named {chosen!r}; it has: {known}")
        return prompts[chosen]

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and not 1 <= dimensions <= self._width:
            raise InvalidWork(f"`dimensions` must be between 1 and {self._width}, not {dimensions}")


def template_tokens(tokenizer: TextTokenizer, template: Template) -> int:
    """How many tokens a template adds to a pair, at most."""
    return sum(len(ids) + 1 for ids in tokenizer.ids([template.before, template.between, template.after]))


def _asked(found: TokenSequences, outputs: frozenset[Output], skip: int = 0) -> Prepared:
    rows = zip(found.ids, found.type_ids, strict=True)
    sequences = [Sequence(ids, types, skip) for ids, types in rows]
    return Prepared(sequences, outputs, found.truncated, tuple(found.lengths))


def _sides(recipe: Recipe, tokenizer: TextTokenizer) -> dict[bool, Side]:
    """By whether a text is a query."""
    if recipe.kind != "multivector":
        return {}
    late = recipe.late
    queries, documents = (
        tokenizer.with_max_tokens(most, late.markers) for most in late.lengths(recipe.max_tokens)
    )
    fill = late.expansion
    return {True: Side(queries, fill, _filler(tokenizer, fill)), False: Side(documents)}


def _filler(tokenizer: TextTokenizer, expansion: Expansion | None) -> int:
    named = expansion.token if expansion is not None else None
    found = [
        tokenizer.token_id(name) for name in (named, "[MASK]", "<mask>", "<|endoftext|>", "</s>") if name
    ]
    return next((one for one in found if one is not None), 0)


def _filled(ids: list[int], type_ids: list[int], side: Side, *, is_query: bool) -> Sequence:
    fill = side.expansion
    missing = fill.length - len(ids) if fill is not None else 0
    if fill is None or missing <= 0:
        return Sequence(ids, type_ids, is_query=is_query)
    seen = None if fill.attended else len(ids)
    return Sequence([*ids, *[side.filler] * missing], [*type_ids, *[0] * missing], 0, seen, is_query)


def _templated(
    tokenizer: TextTokenizer, template: Template, pairs: Many[Pair], truncate: Truncate
) -> TokenSequences:
    """The documents are what is cut: without its end a chat asks for no answer.

    Raises: InvalidWork where truncate is ERROR and a pair is too long.
    """
    most = tokenizer.max_tokens
    shortened = [(query, clip_text(document, most, truncate)) for query, document in pairs]
    texts = [
        template.before + query + template.between + document + template.after
        for query, document in shortened
    ]
    rows = tokenizer.ids(texts)
    too_long = [i for i, row in enumerate(rows) if len(row) > most]
    if too_long and truncate is Truncate.ERROR:
        raise InvalidWork(f"input {too_long[0]} has {len(rows[too_long[0]])} tokens, the model takes {most}")
    (ending,) = tokenizer.ids([template.after])
    for i in too_long:
        start = len(template.before) + len(shortened[i][0]) + len(template.between)
        rows[i] = _fitted(tokenizer.tokens_with_starts(texts[i]), start, ending, most, truncate)
    cut = {i for i, pair in enumerate(pairs) if shortened[i] != pair}
    return TokenSequences(rows, [[0] * len(row) for row in rows], tuple(sorted({*too_long, *cut})))


def _fitted(
    found: list[tuple[int, int]], start: int, ending: list[int], most: int, truncate: Truncate
) -> list[int]:
    """The ids of a chat, without what of its document is too much. start: its first character."""
    ids = [id_ for id_, _ in found]
    excess = len(ids) - most
    first = sum(1 for _, at in found if at < start)
    if truncate is Truncate.LEFT and first + excess <= len(ids) - len(ending):
        return ids[:first] + ids[first + excess :]
    return ids[: most - len(ending)] + ending
