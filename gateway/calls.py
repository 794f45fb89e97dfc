"""The gateway's own neutral call: what every dialect decodes to. Knows no wire."""

from typing import TypeAlias

import msgspec

from backends.contract import Embed, Operation, Rerank, Tokenize, Truncate


class Similarity(msgspec.Struct, frozen=True, tag="similarity"):
    """Cosine of one text with each of many; any embedding model can serve it."""

    source: str
    sentences: tuple[str, ...]
    prompt_name: str | None = None


Work: TypeAlias = Embed | Rerank | Similarity | Tokenize


class Call(msgspec.Struct, frozen=True):
    """One caller's request, parsed once.

    model: as the caller wrote it; None takes the default. truncate: whether to cut what is too long, side:
    which end; None takes the model's. bulk: the caller can wait (x-priority: bulk).
    """

    work: Work
    model: str | None = None
    truncate: bool | None = None
    side: Truncate | None = None
    bulk: bool = False


class Caller(msgspec.Struct, frozen=True):
    """Who is on the line, as the transport tells it.

    api_key: the secret itself; it goes no further than the keyring. timeout_s: what the caller asked
    for in x-timeout-s.
    """

    api_key: str | None = None
    timeout_s: float | None = None


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
    match work:
        case Embed() | Similarity():
            return Operation.EMBED
        case Rerank():
            return Operation.RERANK
        case Tokenize():
            return Operation.TOKENIZE


def texts_of(work: Work) -> tuple[str, ...]:
    """Every text whose tokens a call pays for once; a rerank's query is paid with each document."""
    match work:
        case Embed() | Tokenize():
            return work.inputs
        case Similarity():
            return (work.source, *work.sentences)
        case Rerank():
            return work.documents
