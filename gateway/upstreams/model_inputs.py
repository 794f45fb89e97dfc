"""Inputs of one upstream's model: configured prompts, capabilities of its replicas, exact token counts."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoints.locations import locate_tokenizer
from backends.contract import Capabilities, ModelInput, ModelWork, TokenizerSettings, TokenizerSource
from backends.contract.errors import ModelUnavailable
from gateway.config import schema
from gateway.upstreams.background_opener import BackgroundOpener

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens.tokenizer import TextCounter

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
