"""Count of one call's tokens, a chunk at a time, so that it can stop as soon as the call cannot pass.

A pair has the tokens of its two texts and its special tokens. Therefore the query of a rerank is tokenized
once, and not with each document.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from backends.contract import ModelInput, Truncate
from backends.contract.texts import CHARACTERS_PER_TOKEN, clip_text
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens.tokenizer import TextCounter

# The thread holds the GIL for a moment per text.
CHUNK_INPUTS = 256


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive inputs to count. texts: those of their texts that were not counted before, by identity."""

    inputs: Sequence[ModelInput]
    texts: dict[int, str]
    characters: int


class TokenCount:
    """Tokens of a call's inputs. lengths: of the inputs counted so far, in order."""

    def __init__(
        self, counter: "TextCounter", inputs: Sequence[ModelInput], prompt: str, max_tokens: int
    ) -> None:
        self.lengths: list[int] = []
        self._counter = counter
        self._inputs = inputs
        self._prompt = prompt
        self._max_tokens = max_tokens
        # Tokens of the texts of pairs, which can occur in several pairs.
        self._tokens: dict[int, int] = {}
        self._total = 0

    @property
    def characters(self) -> int:
        """Characters to tokenize, at most; a text that several pairs share counts once."""
        most, extra = self._max_tokens * CHARACTERS_PER_TOKEN, len(self._prompt)
        texts = {id(text): text for item in self._inputs for text in _texts(item)}
        return sum(min(len(text) + extra, most) for text in texts.values())

    @property
    def at_least(self) -> int:
        """The fewest tokens that the whole call can have, given what was counted.

        An input has its special tokens. Its length proves no more: a tokenizer may drop spaces and accents,
        and may read a long word as one unknown token.
        """
        rest = len(self._inputs) - len(self.lengths)
        return self._total + rest * min(self._counter.special_tokens, self._max_tokens)

    async def run(
        self, threads: FairThreads, claim: Claim, on_progress: Callable[[int], Awaitable[None]]
    ) -> list[int]:
        """Return the tokens of each input, counted in threads.

        on_progress: called with the fewest tokens possible; stops the count by raising. Raises: Overloaded.
        """
        with threads.hold(claim.tenant, self.characters):
            for chunk in self._chunks():
                # Not after the last one: what is exact then is checked by the reserve.
                await on_progress(self.at_least)
                if chunk.texts:
                    count = partial(self._counter.count, list(chunk.texts.values()))
                    counts = await threads.run(claim, chunk.characters, count)
                    self._tokens.update(zip(chunk.texts, counts, strict=True))
                self._add(chunk)
        return self.lengths

    def _chunks(self) -> Iterator[Chunk]:
        start = 0
        while start < len(self._inputs):
            texts: dict[int, str] = {}
            characters = taken = 0
            for item in islice(self._inputs, start, start + CHUNK_INPUTS):
                new = {
                    id(text): self._text(text)
                    for text in _texts(item)
                    if id(text) not in self._tokens and id(text) not in texts
                }
                size = sum(map(len, new.values()))
                if taken and characters + size > CHUNK_CHARACTERS:
                    break
                texts.update(new)
                characters, taken = characters + size, taken + 1
            yield Chunk(self._inputs[start : start + taken], texts, characters)
            start += taken

    def _add(self, chunk: Chunk) -> None:
        for item in chunk.inputs:
            tokens = sum(self._tokens[id(text)] for text in _texts(item)) + self._specials(item)
            self.lengths.append(min(tokens, self._max_tokens))
            self._total += self.lengths[-1]

    def _specials(self, item: ModelInput) -> int:
        return self._counter.special_tokens if isinstance(item, str) else self._counter.pair_special_tokens

    def _text(self, text: str) -> str:
        return clip_text(self._prompt + text, self._max_tokens, Truncate.RIGHT)


def count_here(counter: "TextCounter", texts: Sequence[str], prompt: str, max_tokens: int) -> list[int]:
    """Return the tokens of each text without a thread, for a few words."""
    prompted = [prompt + text for text in texts] if prompt else texts
    special_tokens = counter.special_tokens
    return [min(tokens + special_tokens, max_tokens) for tokens in counter.count(prompted)]


def _texts(item: ModelInput) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item
