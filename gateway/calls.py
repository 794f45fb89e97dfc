"""Neutral call of the gateway, which every dialect decodes to. Knows no wire format."""

from typing import ClassVar, Literal, TypeAlias

import msgspec

from backends.contract import BaseWork, Capabilities, Embed, Operation, Truncate
from backends.contract import Work as BackendWork
from backends.contract.work import VectorScores
from gateway.errors import DeadlineExceeded
from gateway.prompts import Role


class Similarity(BaseWork, frozen=True, tag="similarity"):
    """Cosine of one text with each of many; any embedding model serves it."""

    source: str
    sentences: tuple[str, ...]
    prompt_name: str | None = None

    kind: ClassVar[Operation] = Operation.EMBED

    @property
    def inputs(self) -> tuple[str, ...]:
        """All texts, of which each is embedded."""
        return (self.source, *self.sentences)

    def by_vectors(self, capabilities: Capabilities | None) -> VectorScores:  # noqa: ARG002
        """Return the scores of the first text with each other: no replica scores them."""
        places = [(0, index + 1) for index in range(len(self.sentences))]
        return VectorScores(Embed(self.inputs, prompt_name=self.prompt_name), places)


Work: TypeAlias = BackendWork | Similarity


class Call(msgspec.Struct, frozen=True):
    """Request of one caller, parsed once.

    model: as the caller wrote it; None takes the default. truncate: cut inputs that are too long, or refuse
    them; None takes the model's setting. side: the end to cut; None takes the model's. bulk: the caller can
    wait (`x-priority: bulk`). role: purpose of the inputs, for a call that specifies no prompt. instruction:
    task of the queries in words, in place of the model's own; never an empty text. text_tokens: the most
    tokens of each text to embed, or of each document to rank, apart from special ones and the prompt.
    query_tokens: the same for the query of a rerank, or the first text of each pair. prompt_tokens: the most
    tokens of each input with all of these, at which a longer one is cut.
    """

    work: Work
    model: str | None = None
    truncate: bool | None = None
    side: Truncate | None = None
    bulk: bool = False
    role: Role | None = None
    instruction: str | None = None
    text_tokens: int | None = None
    query_tokens: int | None = None
    prompt_tokens: int | None = None


def default_truncation(configured: Truncate | None, capabilities: Capabilities | None) -> Truncate:
    """Return how a model cuts inputs that are too long if a call does not say it.

    As configured, else as its server does: at the end that the model's tokenizer names, usually the right.
    """
    if configured is not None:
        return configured
    if capabilities is None:
        return Truncate.RIGHT
    return Truncate.ERROR if capabilities.truncates is False else capabilities.truncation_side


def truncation(call: Call, model_setting: Truncate, capabilities: Capabilities | None = None) -> Truncate:
    """Return how to cut inputs that are too long: as the call asks, else as the model is configured.

    A side alone does not permit cutting: it only specifies the end that is cut.
    """
    refuse = model_setting is Truncate.ERROR if call.truncate is None else not call.truncate
    if refuse:
        return Truncate.ERROR
    if model_setting is not Truncate.ERROR:
        return call.side or model_setting
    return call.side or (Truncate.RIGHT if capabilities is None else capabilities.truncation_side)


# Use of the cache of vectors by a call. use: read and write. refresh: write only. bypass: neither.
CacheMode: TypeAlias = Literal["use", "refresh", "bypass"]


class Deadline(msgspec.Struct, frozen=True):
    """Time limit of a call.

    at_s: on the event loop's clock. timeout_s: the allowed time. by_caller: the caller asked for less
    time than the model allows.
    """

    at_s: float
    timeout_s: float
    by_caller: bool = False

    def error(self) -> DeadlineExceeded:
        """Return the error of a call that has outlasted it."""
        if self.by_caller:
            return DeadlineExceeded(f"your x-timeout-s of {self.timeout_s:g} s passed")
        return DeadlineExceeded(f"the model's deadline of {self.timeout_s:g} s passed; send fewer inputs")
