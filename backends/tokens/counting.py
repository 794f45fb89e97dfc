"""Token counts, lengths and prompts from a checkpoint's small files, for wires that do not report them.

Rule: the files are read once per process, and counting runs outside the event loop. Weights are never needed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from backends.checkpoints.locations import locate_tokenizer
from backends.contract import (
    Detokenize,
    DetokenizeReply,
    EmbedParts,
    ModelInput,
    ModelWork,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Work,
)
from backends.contract.errors import AttemptTimedOut, InvalidWork
from backends.recipe.checkpoint import read_input_rules
from backends.recipe.recipe import InputRules
from backends.tokens.tokenizer import TextTokenizer, TokenCount, open_tokenizer

logger = logging.getLogger(__name__)

# Dedicated threads, so that a count whose caller timed out does not delay other work.
COUNTING = ThreadPoolExecutor(2, "count")
# A checkpoint that is fetched from the Hub must not delay a count.
OPENING = ThreadPoolExecutor(4, "open")
# A batch waits for a thread again after each chunk of this length, so that batches take turns.
CHUNK_CHARACTERS = 32 * 1024

Result = TypeVar("Result")


class LabelConfig(msgspec.Struct, frozen=True):
    """Class names of a transformers config.json."""

    id2label: dict[int, str] = {}


class TokenCounter:
    """Tokenizer and input rules of one checkpoint, and a classifier's labels in the order of its scores."""

    def __init__(self, tokenizer: TextTokenizer, rules: InputRules, labels: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self.rules = rules
        self.labels = labels

    async def count(self, work: ModelWork, timeout_s: float) -> TokenCount:
        """Count the tokens of a piece of work.

        Raises: InvalidWork, if truncate is ERROR and an input is too long; AttemptTimedOut.
        """
        return await _within(self._count(work), timeout_s)

    async def run(self, work: Tokenize | Detokenize, timeout_s: float) -> TokenizeReply | DetokenizeReply:
        """Tokenize or detokenize; the inputs must contain their prompt already.

        Raises: InvalidWork, AttemptTimedOut.
        """
        return await _within(_in_thread(COUNTING, lambda: self._run(work)), timeout_s)

    async def _count(self, work: ModelWork) -> TokenCount:
        tokens, truncated = 0, list[int]()
        for start, items in _chunks(work.model_inputs):
            measure = partial(self._tokenizer.measure, items, work.truncate, start)
            count = await _in_thread(COUNTING, measure)
            tokens += count.tokens
            truncated += count.truncated
        return TokenCount(tokens, tuple(truncated))

    def _run(self, work: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        return self._tokenize(work) if isinstance(work, Tokenize) else self._detokenize(work)

    def _tokenize(self, work: Tokenize) -> TokenizeReply:
        lists = self._tokenizer.explain(
            work.inputs, add_special_tokens=work.add_special_tokens, pieces=work.pieces
        )
        return TokenizeReply(tuple(tuple(tokens) for tokens in lists))

    def _detokenize(self, work: Detokenize) -> DetokenizeReply:
        texts = self._tokenizer.decode(work.inputs, skip_special_tokens=work.skip_special_tokens)
        return DetokenizeReply(tuple(texts))


async def open_token_counter(source: TokenizerSource, timeout_s: float) -> TokenCounter:
    """Open the token counter of a checkpoint.

    Raises: ModelUnavailable, AttemptTimedOut.
    """
    return await _within(_in_thread(OPENING, lambda: _open(source)), timeout_s)


@cache
def _open(source: TokenizerSource) -> TokenCounter:
    checkpoint = locate_tokenizer(source.location)
    rules = read_input_rules(checkpoint)
    tokenizer = open_tokenizer(checkpoint, rules.max_tokens, source.settings)
    for note in tokenizer.traits.notes:
        logger.warning("tokenizer %s: %s", source.location, note)
    return TokenCounter(tokenizer, rules, read_labels(checkpoint))


def read_labels(checkpoint: Path) -> tuple[str, ...]:
    """Return a classifier's labels in config.json, by class id, or an empty tuple if there are none."""
    try:
        config = msgspec.json.decode((checkpoint / "config.json").read_bytes(), type=LabelConfig)
        return tuple(label for _, label in sorted(config.id2label.items()))
    except (OSError, msgspec.DecodeError):
        return ()


def _chunks(inputs: Sequence[ModelInput]) -> Iterator[tuple[int, Sequence[ModelInput]]]:
    """Yield the index of the first input, and consecutive inputs of about a chunk's length."""
    start = characters = 0
    for index, item in enumerate(inputs):
        length = len(item) if isinstance(item, str) else sum(map(len, item))
        if index > start and characters + length > CHUNK_CHARACTERS:
            yield start, inputs[start:index]
            start, characters = index, 0
        characters += length
    yield start, inputs[start:]


async def _in_thread(executor: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(executor, function)


async def _within(work: Awaitable[Result], timeout_s: float) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise AttemptTimedOut(f"tokens were not counted within {timeout_s:.1f} s") from error


def apply_prompt(work: Work, rules: InputRules | None) -> Work:
    """Return the work with its prompt before each input that is a text, for wires that have no prompts.

    Raises: InvalidWork, if there is no prompt of the requested name.
    """
    if not work.has_prompt:
        return work
    prompts = rules.prompts if rules else {}
    name = work.prompt_name
    if name is None:
        name = rules.default_prompt if rules else None
    if not name:
        return work
    if name not in prompts:
        names = ", ".join(sorted(prompts)) or "none"
        raise InvalidWork(f"there is no prompt {name!r}; known here: {names}")
    if isinstance(work, EmbedParts) and work.chat is not None:
        return work
    prompted = work.with_prompts([prompts[name]] * len(work.inputs))
    return msgspec.structs.replace(prompted, prompt_name=None)
