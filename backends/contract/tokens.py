"""Tokenize and detokenize: the tokens of texts, and the texts of token ids. Both are free."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import msgspec

from backends.contract.capabilities import Operation, Truncate
from backends.contract.texts import normalized_bytes, token_upper_bounds
from backends.contract.work import BaseReply, BaseWork, Lengths, chained


class FreeWork(BaseWork, frozen=True):
    """Request that costs no tokens; no input is truncated."""

    is_free: ClassVar[bool] = True

    def with_lengths(self, truncate: Truncate, max_tokens: int | None) -> Self:
        return self


class Tokenize(FreeWork, frozen=True, tag="tokenize"):
    """Request for the tokens of each input; no input is truncated.

    pieces: the text of a token is the vocabulary's (`##ing`), instead of the part of the input it covers.
    """

    inputs: tuple[str, ...]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    pieces: bool = False

    kind: ClassVar[Operation] = Operation.TOKENIZE
    has_prompt: ClassVar[bool] = True

    def token_bounds(self, lengths: Lengths) -> list[int]:
        extra = normalized_bytes(lengths.prompt)
        return [bound + extra for bound in token_upper_bounds(self.inputs)]

    def with_prompts(self, prompts: Iterable[str]) -> Self:
        inputs = tuple([prompt + text for prompt, text in zip(prompts, self.inputs, strict=True)])
        return msgspec.structs.replace(self, inputs=inputs, prompt_name="")


class Detokenize(FreeWork, frozen=True, tag="detokenize"):
    """Request for the text of each list of token ids."""

    inputs: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool = True

    kind: ClassVar[Operation] = Operation.DETOKENIZE

    def token_bounds(self, lengths: Lengths) -> list[int]:
        """Return zeros: token ids are converted back to text free of charge."""
        return [0] * len(self.inputs)


class Token(msgspec.Struct, frozen=True):
    """One token of an input.

    text: as `Tokenize` requests it; a special token's is always the vocabulary's.
    start, stop: UTF-8 byte offsets into the text with its prompt. They are None for special tokens, and for
    all tokens if the wire carries no offsets.
    """

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class TokenizeReply(BaseReply, frozen=True, tag="tokenized"):
    """Tokens of each input, in input order. Tokenization is free, therefore `tokens` is always 0."""

    inputs: tuple[tuple[Token, ...], ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()

    is_free: ClassVar[bool] = True

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        return cls(chained([reply.inputs for reply in replies]))

    def select(self, places: Sequence[int]) -> Self:
        return msgspec.structs.replace(self, inputs=tuple([self.inputs[place] for place in places]))


class DetokenizeReply(BaseReply, frozen=True, tag="detokenized"):
    """One text per list of token ids. Detokenization is free, as tokenization is."""

    texts: tuple[str, ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()

    is_free: ClassVar[bool] = True

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        return cls(chained([reply.texts for reply in replies]))

    def select(self, places: Sequence[int]) -> Self:
        return msgspec.structs.replace(self, texts=tuple([self.texts[place] for place in places]))
