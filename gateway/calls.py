"""The gateway's own neutral call: what every dialect decodes to. Knows no wire."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from backends.contract import (
    Classify,
    Detokenize,
    Embed,
    Encode,
    Operation,
    Rerank,
    Score,
    Tokenize,
    Truncate,
    WorkInput,
)
from backends.contract import inputs_of as backend_inputs_of
from backends.contract import operation_of as backend_operation_of
from gateway.prompts import Role


class Similarity(msgspec.Struct, frozen=True, tag="similarity"):
    """Cosine of one text with each of many; any embedding model can serve it."""

    source: str
    sentences: tuple[str, ...]
    prompt_name: str | None = None


Work: TypeAlias = Embed | Encode | Rerank | Score | Classify | Similarity | Tokenize | Detokenize


class Call(msgspec.Struct, frozen=True):
    """One caller's request, parsed once.

    model: as the caller wrote it; None takes the default. truncate: whether to cut what is too long, side:
    which end; None takes the model's. bulk: the caller can wait (x-priority: bulk). role: what its inputs
    are for, where the caller names no prompt.
    """

    work: Work
    model: str | None = None
    truncate: bool | None = None
    side: Truncate | None = None
    bulk: bool = False
    role: Role | None = None


def truncation(call: Call, models: Truncate) -> Truncate:
    """What happens to inputs that are too long: the call's own wish, else the model's setting.

    A side says which end goes, not whether anything may.
    """
    refuse = models is Truncate.ERROR if call.truncate is None else not call.truncate
    if refuse:
        return Truncate.ERROR
    return call.side or (Truncate.RIGHT if models is Truncate.ERROR else models)


class Deadline(msgspec.Struct, frozen=True):
    """When a call must have ended, on the event loop's clock; by_caller: the caller asked for less time."""

    at_s: float
    by_caller: bool = False


def operation_of(work: Work) -> Operation:
    """The operation a model must offer for this work; similarity is embedding."""
    return Operation.EMBED if isinstance(work, Similarity) else backend_operation_of(work)


def inputs_of(work: Work) -> Sequence[WorkInput]:
    """What a call pays for, each once; a rerank's query is paid with each document."""
    return (work.source, *work.sentences) if isinstance(work, Similarity) else backend_inputs_of(work)


def characters_of(work: Work) -> int:
    """How long all inputs are together; ids have no characters."""
    return sum(_characters(one) for one in inputs_of(work))


def _characters(given: WorkInput) -> int:
    return len(given) if isinstance(given, str) else sum(len(part) for part in given if isinstance(part, str))
