"""Inputs of one upstream's model: configured prompts, capabilities of its replicas, exact token counts.

The tokens of a call are counted a chunk at a time, so that the count stops as soon as the call cannot pass. A
pair has the tokens of its two texts and its special tokens: the query of a rerank is tokenized once, and not
with each document.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.checkpoints.locations import locate_tokenizer
from backends.contract import (
    Capabilities,
    ModelInput,
    ModelWork,
    TokenizerSettings,
    TokenizerSource,
    Truncate,
)
from backends.contract.errors import ModelUnavailable
from backends.contract.texts import CHARACTERS_PER_TOKEN, clip_text, texts_of
from gateway.config import schema
from gateway.upstreams.background_opener import BackgroundOpener
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens.tokenizer import TextCounter

# The thread holds the GIL for a moment per text.
CHUNK_INPUTS = 256

logger = logging.getLogger("gateway")


class ModelInputs:
    """Inputs of one upstream's model; the tokenizer is opened at the first count.

    capabilities: returns those of the replicas now, None while none has joined.
    """

    def __init__(
        self, settings: schema.UpstreamSettings, capabilities: Callable[[], Capabilities | None]
    ) -> None:
        self.prompts = settings.prompts
        self.instruction_template = settings.instruction_template
        self.capabilities = capabilities
        # Slices of several tenants can share a batch only where each tenant's tokens are known beforehand.
        self.always_counts = not settings.is_local and settings.tokenizer is not None
        self._source = settings.tokenizer
        self._settings = settings.tokenizer_settings
        self._opener: BackgroundOpener[TextCounter] = BackgroundOpener()
        self._is_unreadable = False

    def can_count(self, capabilities: Capabilities) -> bool:
        """Return whether a tokenizer is known, and the replica reports how long an input may be."""
        return bool(self._source or capabilities.checkpoint) and capabilities.max_input_tokens is not None

    def tokenizer_source(self) -> TokenizerSource | None:
        """Return the place of the model's tokenizer, None if a replica that has not joined reports it."""
        capabilities = self.capabilities()
        location = self._source or (capabilities.checkpoint if capabilities else None)
        return None if location is None else TokenizerSource(location, self._settings)

    async def count_few(self, work: ModelWork, prompt: str, capabilities: Capabilities) -> list[int] | None:
        """Return the tokens of a few short inputs, prompt and special tokens included; None if not known."""
        is_countable = self.can_count(capabilities) and work.is_plain
        counter = await self.counter(capabilities) if is_countable else None
        if counter is None:
            return None
        most = capabilities.max_input_tokens
        return [_length(counter, item, prompt, most) for item in work.model_inputs]

    async def open_counter(self) -> "TextCounter | None":
        """Return the counter of the model's tokens, or None if the model or its tokenizer is not known."""
        capabilities = self.capabilities()
        if capabilities is None or not self.can_count(capabilities):
            return None
        return await self.counter(capabilities)

    async def counter(self, capabilities: Capabilities) -> "TextCounter | None":
        """Return the counter of the model's tokens, or None if its tokenizer cannot be opened.

        Without it an upper bound is used, which never lets a tenant exceed a limit.
        """
        if self._opener.resource is not None:
            return self._opener.resource
        source = self._source or capabilities.checkpoint
        assert source
        try:
            counter = await self._opener.get(partial(_open_counter, source, self._settings))
        except ModelUnavailable as error:
            if not self._is_unreadable:
                self._is_unreadable = True
                logger.warning("a tokenizer cannot be used (%s): counting tokens by their upper bound", error)
            return None
        self._is_unreadable = False
        return counter


def _length(counter: "TextCounter", item: ModelInput, prompt: str, most: int | None) -> int:
    is_pair = not isinstance(item, str)
    special = counter.pair_special_tokens if is_pair else counter.special_tokens
    tokens = sum(counter.count([prompt + item] if isinstance(item, str) else item)) + special
    return tokens if most is None else min(tokens, most)


def _open_counter(source: str, settings: TokenizerSettings) -> "TextCounter":
    from backends.tokens.tokenizer import open_counter

    return open_counter(Path(locate_tokenizer(source)), settings)


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
        texts = {id(text): text for item in self._inputs for text in texts_of(item)}
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
                    for text in texts_of(item)
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
            tokens = sum(self._tokens[id(text)] for text in texts_of(item)) + self._specials(item)
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
