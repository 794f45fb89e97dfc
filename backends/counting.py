"""Tokens, lengths and prompts for wires that do not tell them, from the checkpoint's own small files.

Rule: the files are read once a process and the counting is done off the event loop; weights are never needed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from backends.checkpoints import locate_tokenizer
from backends.contract import Detokenize, DetokenizeReply, Embed, Encode, Tokenize, TokenizeReply, Work
from backends.errors import AttemptTimedOut, InvalidWork
from backends.texts import ModelWork, model_inputs_of
from backends.tokens import TextTokenizer, open_tokenizer
from backends.torch.checkpoint import InputRules, read_input_rules

# Threads of its own: counting that nobody waits for any more must not hold up anything else.
COUNTING = ThreadPoolExecutor(2, "count")

Result = TypeVar("Result")


class LabelConfig(msgspec.Struct, frozen=True):
    """The part of transformers' config.json that names classes."""

    id2label: dict[int, str] = {}


class TokenCount(msgspec.Struct, frozen=True):
    """Tokens of all inputs together as the model sees them, and the indices of those that are too long."""

    tokens: int
    truncated: tuple[int, ...]


class TokenCounter:
    """One checkpoint's tokenizer and input rules, and a classifier's labels in the order of its scores."""

    def __init__(self, tokenizer: TextTokenizer, rules: InputRules, labels: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self.rules = rules
        self.labels = labels

    async def count(self, work: ModelWork, timeout_s: float) -> TokenCount:
        """Raises: InvalidWork where truncate is ERROR and an input is too long; AttemptTimedOut."""
        return await _off_loop(lambda: self._count(work), timeout_s)

    async def explain(self, work: Tokenize, timeout_s: float) -> TokenizeReply:
        """The tokens of each input; a prompt must be in it already. Raises: AttemptTimedOut."""
        return await _off_loop(lambda: self._explain(work), timeout_s)

    async def detokenize(self, work: Detokenize, timeout_s: float) -> DetokenizeReply:
        """The text of each list of ids. Raises: InvalidWork, AttemptTimedOut."""
        return await _off_loop(lambda: self._detokenize(work), timeout_s)

    async def free(self, work: Tokenize | Detokenize, timeout_s: float) -> TokenizeReply | DetokenizeReply:
        """What the tokenizer alone can do. Raises: InvalidWork, AttemptTimedOut."""
        if isinstance(work, Tokenize):
            return await self.explain(work, timeout_s)
        return await self.detokenize(work, timeout_s)

    def _count(self, work: ModelWork) -> TokenCount:
        sequences = self._tokenizer.encode_inputs(model_inputs_of(work), work.truncate)
        return TokenCount(sum(sequences.lengths), sequences.truncated)

    def _explain(self, work: Tokenize) -> TokenizeReply:
        lists = self._tokenizer.explain(work.inputs, add_special_tokens=work.add_special_tokens)
        return TokenizeReply(tuple(tuple(one) for one in lists))

    def _detokenize(self, work: Detokenize) -> DetokenizeReply:
        texts = self._tokenizer.decode(work.inputs, skip_special_tokens=work.skip_special_tokens)
        return DetokenizeReply(tuple(texts))


async def open_token_counter(source: str, timeout_s: float) -> TokenCounter:
    """The counter of a checkpoint, by hub id or path. Raises: ModelUnavailable, AttemptTimedOut."""
    return await _off_loop(lambda: _opened(source), timeout_s)


@cache
def _opened(source: str) -> TokenCounter:
    checkpoint = locate_tokenizer(source)
    rules = read_input_rules(checkpoint)
    return TokenCounter(open_tokenizer(checkpoint, rules.max_tokens), rules, read_labels(checkpoint))


def read_labels(checkpoint: Path) -> tuple[str, ...]:
    """A classifier's labels as its config.json names them, by class id; nothing where it names none."""
    try:
        config = msgspec.json.decode((checkpoint / "config.json").read_bytes(), type=LabelConfig)
        return tuple(label for _, label in sorted(config.id2label.items()))
    except (OSError, msgspec.DecodeError):
        return ()


async def _off_loop(function: Callable[[], Result], timeout_s: float) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(COUNTING, function)
    except TimeoutError as error:
        raise AttemptTimedOut(f"tokens were not counted within {timeout_s:.1f} s") from error


def apply_prompt(work: Work, rules: InputRules | None) -> Work:
    """The work with its prompt written into each input, for wires that know no prompts.

    Raises: InvalidWork where no prompt has the name that is asked for.
    """
    if not isinstance(work, Embed | Encode | Tokenize):
        return work
    prompts = rules.prompts if rules else {}
    name = work.prompt_name
    if name is None:
        name = rules.default_prompt if rules else None
    if not name:
        return work
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise InvalidWork(f"there is no prompt {name!r}; known here: {known}")
    inputs = tuple(prompts[name] + text for text in work.inputs)
    return msgspec.structs.replace(work, inputs=inputs, prompt_name=None)
