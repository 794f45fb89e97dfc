"""Inputs of one upstream's model: configured prompts, capabilities of its replicas, exact token counts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoints import locate_tokenizer
from backends.contract import Capabilities, Embed, Truncate
from backends.errors import ModelUnavailable
from backends.texts import INLINE_CHARACTERS_MAX, ModelWork, map_texts, model_inputs_of
from gateway.config import schema

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens import TextTokenizer

# Threads of their own: counting whose caller has left must not delay anything else.
COUNTING = ThreadPoolExecutor(2, "count")


class ModelInputs:
    """Inputs of one upstream's model; the tokenizer is opened at the first count.

    capabilities: returns those of the replicas now, None while none has joined.
    """

    def __init__(
        self, settings: schema.UpstreamSettings, capabilities: Callable[[], Capabilities | None]
    ) -> None:
        self.prompts = settings.prompts
        self.capabilities = capabilities
        # Slices of several tenants can share a batch only where each tenant's tokens are known beforehand.
        self.always_counts = not settings.is_hosted and settings.tokenizer is not None
        self._source = settings.tokenizer
        self._tokenizer: TextTokenizer | None = None
        self._opening = asyncio.Lock()

    def can_count(self, capabilities: Capabilities) -> bool:
        """Return whether a tokenizer is known, and the replica reports how long an input may be."""
        return bool(self._source or capabilities.checkpoint) and capabilities.max_input_tokens is not None

    async def count(self, work: ModelWork, prompt: str, capabilities: Capabilities) -> list[int] | None:
        """Return the tokens of each input, prompt and special tokens included.

        None if the tokenizer cannot be opened.
        """
        tokenizer = await self._open(capabilities) if self.can_count(capabilities) else None
        if tokenizer is None:
            return None
        if isinstance(work, Embed) and _characters(work, prompt) <= INLINE_CHARACTERS_MAX:
            return _lengths(tokenizer, work, prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(COUNTING, _lengths, tokenizer, work, prompt)

    async def _open(self, capabilities: Capabilities) -> "TextTokenizer | None":
        source, max_tokens = self._source or capabilities.checkpoint, capabilities.max_input_tokens
        assert source
        assert max_tokens is not None
        if self._tokenizer is None:
            async with self._opening:
                if self._tokenizer is None:
                    self._tokenizer = await asyncio.to_thread(_open_tokenizer, source, max_tokens)
        return self._tokenizer


def _open_tokenizer(source: str, max_tokens: int) -> "TextTokenizer | None":
    from backends.tokens import open_tokenizer

    try:
        return open_tokenizer(Path(locate_tokenizer(source)), max_tokens)
    except ModelUnavailable:
        # The upper bound is used instead of the count: it never lets a tenant exceed a limit.
        return None


def _characters(work: Embed, prompt: str) -> int:
    return sum(map(len, work.inputs)) + len(prompt) * len(work.inputs)


def _lengths(tokenizer: "TextTokenizer", work: ModelWork, prompt: str) -> list[int]:
    prompted = map_texts(work, lambda text: prompt + text) if prompt else work
    return tokenizer.encode_inputs(model_inputs_of(prompted), Truncate.RIGHT).lengths
