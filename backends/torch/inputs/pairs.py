"""Tokenization of a query and a document in a reranker's prompt.

Knows nothing of torch, queues or replies.
"""

from collections.abc import Sequence
from typing import TypeAlias

from backends.contract import ModelInput, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork, input_too_long
from backends.contract.texts import clip_text
from backends.recipe.rerank_template import Placeholder, Prompt, RerankTemplate
from backends.tokens.tokenizer import AddedIds, TextTokenizer, TokenSequences

Pair: TypeAlias = tuple[str, str]
# The id of a token, and the first of its characters.
PlacedToken: TypeAlias = tuple[int, int]


class PairEncoder:
    """Encoder of pairs of a query and a document in one template.

    Raises: ModelUnavailable if the tokenizer lacks the special tokens that the template has.
    """

    def __init__(self, tokenizer: TextTokenizer, template: RerankTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._before, self._after = _around(tokenizer) if template.special_tokens else AddedIds([], [])
        self._room = tokenizer.max_tokens - len(self._before) - len(self._after)

    @property
    def overhead_tokens(self) -> int:
        """Most tokens that a prompt without an instruction adds to a pair."""
        literals = [literal for piece in self._template.prompt for literal in piece.literals]
        literals = [literal for literal in (*literals, self._template.query_prefix) if literal]
        # Where two texts meet, the cut may lie inside what would be one token.
        around = sum(len(ids) + 1 for ids in self._tokenizer.ids(literals))
        return around + len(self._before) + len(self._after)

    def encode(
        self,
        pairs: Sequence[Pair],
        truncate: Truncate,
        instruction: str | None = None,
        most: int | None = None,
    ) -> TokenSequences:
        """Encode pairs in their prompt. A document is cut before its query, and nothing else is.

        most: as for `TextTokenizer.encode`. Raises: InvalidWork if a pair is too long and must not be cut, or
        the instruction alone is too long; UnsupportedWork if the model takes no instruction.
        """
        prompt = self._prompt(instruction)
        if not prompt:
            return self.encode_plainly(pairs, truncate, most)
        room = self._room_of(most, truncate)
        clipped = [self._clip(pair, truncate) for pair in pairs]
        filled = [
            {"instruction": instruction or "", "query": query, "document": document}
            for query, document in clipped
        ]
        rows = self._rows(prompt, filled)
        too_long = [i for i, row in enumerate(rows) if len(row) > room]
        for i in too_long:
            if truncate is Truncate.ERROR:
                raise self._too_long(len(rows[i]), i)
            rows[i] = self._shortened(prompt, filled[i], truncate, room)
        cut = {i for i, pair in enumerate(pairs) if clipped[i] != pair}
        ids = [[*self._before, *row, *self._after] for row in rows]
        return TokenSequences(ids, [[0] * len(row) for row in ids], tuple(sorted(cut.union(too_long))))

    def encode_plainly(
        self,
        items: Sequence[ModelInput],
        truncate: Truncate,
        most: int | None = None,
        *,
        special: bool = True,
    ) -> TokenSequences:
        """Encode texts, and pairs as the tokenizer joins them. special: as for `TextTokenizer.encode`.

        Raises: InvalidWork.
        """
        prefix = self._template.query_prefix
        if prefix:
            items = [
                prefix + item if isinstance(item, str) else (prefix + item[0], item[1]) for item in items
            ]
        return self._tokenizer.encode(items, truncate, most, special=special)

    def _room_of(self, most: int | None, truncate: Truncate) -> int:
        """Return how many tokens a prompt may have, without special ones."""
        if most is None or truncate is Truncate.ERROR:
            return self._room
        return min(self._room, most - len(self._before) - len(self._after))

    def _prompt(self, instruction: str | None) -> Prompt:
        if instruction is None:
            return self._template.prompt
        if not self._template.instructed:
            raise UnsupportedWork("this reranker takes no `instruction`")
        return self._template.instructed

    def _clip(self, pair: Pair, truncate: Truncate) -> Pair:
        query, document = (clip_text(text, self._tokenizer.max_tokens, truncate) for text in pair)
        return query, document

    def _rows(self, prompt: Prompt, filled: Sequence[dict[str, str]]) -> list[list[int]]:
        """Return the ids of each pair; a text that appears in several prompts is tokenized once."""
        texts = [[piece.fill(values) for piece in prompt] for values in filled]
        unique = list(dict.fromkeys(text for row in texts for text in row))
        ids_of = dict(zip(unique, self._tokenizer.ids(unique), strict=True))
        return [[id_ for text in row for id_ in ids_of[text]] for row in texts]

    def _shortened(self, prompt: Prompt, values: dict[str, str], truncate: Truncate, room: int) -> list[int]:
        """Return the ids of a pair without the excess. Raises: InvalidWork."""
        texts = [piece.fill(values) for piece in prompt]
        tokens = [self._tokenizer.tokens_with_starts(text) for text in texts]
        total = sum(map(len, tokens))
        excess = total - room
        placeholders: tuple[Placeholder, ...] = ("document", "query")
        for placeholder in placeholders:
            place = next(i for i, piece in enumerate(prompt) if placeholder in piece.placeholders)
            inside = _within(tokens[place], texts[place], *prompt[place].span(placeholder, values))
            kept = max(0, len(inside) - excess)
            removed = set(inside[: len(inside) - kept] if truncate is Truncate.LEFT else inside[kept:])
            tokens[place] = [token for i, token in enumerate(tokens[place]) if i not in removed]
            excess -= len(removed)
        if excess > 0:
            raise InvalidWork(
                f"{room} tokens leave no room for a text: the prompt alone has {excess} more; "
                "send a shorter instruction, or allow more tokens"
            )
        return [id_ for row in tokens for id_, _ in row]

    def _too_long(self, tokens: int, index: int) -> Exception:
        total = tokens + len(self._before) + len(self._after)
        return input_too_long(self._tokenizer.max_tokens, f"{total} tokens", index)


def answer_ids(tokenizer: TextTokenizer, template: RerankTemplate) -> tuple[int, int | None]:
    """Return the ids of the next tokens that count for and against a document.

    Raises: ModelUnavailable if a word is not one token of the vocabulary.
    """
    assert template.positive is not None
    negative = template.negative
    return _token_id(tokenizer, template.positive), None if negative is None else _token_id(
        tokenizer, negative
    )


def _token_id(tokenizer: TextTokenizer, token: str | int) -> int:
    if isinstance(token, int):
        return token
    (ids,) = tokenizer.ids([token])
    unknown = tokenizer.token_id(token) is None and tokenizer.token_id(f"\u2581{token}") is None
    if len(ids) != 1 or unknown:
        raise ModelUnavailable(
            f"the model cannot rerank: {token!r} is not one token of its vocabulary; set `positive` and "
            "`negative` of its `rerank_template` to the tokens that it was trained with"
        )
    return ids[0]


def _within(tokens: Sequence[PlacedToken], text: str, start: int, end: int) -> list[int]:
    """Return the places of the tokens whose characters are all between start and end."""
    ends = [*(first for _, first in tokens[1:]), len(text)]
    return [i for i, (_, first) in enumerate(tokens) if start <= first and ends[i] <= end]


def _around(tokenizer: TextTokenizer) -> AddedIds:
    """Return the ids that the tokenizer puts around a text. Raises: ModelUnavailable if it puts none."""
    added = tokenizer.added_ids()
    if not added.before and not added.after:
        raise ModelUnavailable(
            "the reranker's prompt begins or ends with a special token, and tokenizer.json adds none"
        )
    return added
