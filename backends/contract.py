"""What a backend is asked and what it answers: the one language every adapter speaks.

Knows nothing of HTTP, tenants, quotas or batching. Everything that travels is frozen.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

# Invariant: C-contiguous float32, so that a row is a view and its bytes are its base64 payload.
Vectors: TypeAlias = NDArray[np.float32]


class Operation(StrEnum):
    """What a model can be asked to do."""

    EMBED = "embed"
    RERANK = "rerank"
    TOKENIZE = "tokenize"


class Truncate(StrEnum):
    """What happens to an input longer than the model: refuse it, or cut one side."""

    ERROR = "error"
    LEFT = "left"
    RIGHT = "right"


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Turn each input into one vector.

    dimensions: keep the first N components, then normalize (if asked), as TEI does.
    prompt_name: a key of the checkpoint's sentence-transformers prompts; None is its default.
    """

    inputs: tuple[str, ...]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT


class Rerank(msgspec.Struct, frozen=True, tag="rerank"):
    """Score each document against the query; raw_scores asks for logits instead of sigmoid."""

    query: str
    documents: tuple[str, ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Show how each input becomes tokens; nothing is cut."""

    inputs: tuple[str, ...]
    add_special_tokens: bool = True
    prompt_name: str | None = None


Work: TypeAlias = Embed | Rerank | Tokenize


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    """Vectors in input order.

    vectors: (n_inputs, dim) float32, each row of length 1 where normalize was asked.
    tokens: tokens computed, specials and prompt included, after truncation.
    truncated: indices of inputs that were cut; None where the backend cannot tell.
    input_tokens: the tokens of each input; None where the backend tells their sum only.
    """

    vectors: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None


class Reranked(msgspec.Struct, frozen=True, tag="reranked"):
    """Scores in document order: (n_documents,) float32. The rest as in `Embedded`."""

    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()


class Token(msgspec.Struct, frozen=True):
    """One token; start and stop are UTF-8 byte offsets into the prompted text.

    None for specials, and where the wire tells no offsets.
    """

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """The tokens of each input, in input order. Tokenizing is free: tokens is always 0."""

    inputs: tuple[tuple[Token, ...], ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()


Reply: TypeAlias = Embedded | Reranked | Tokenized


class Capabilities(msgspec.Struct, frozen=True):
    """What a replica said about itself when it joined; None is "it does not say".

    batch_inputs, batch_tokens, batch_bytes: the most that one request to it may hold.
    concurrent_inputs: how many inputs it takes in flight before it refuses.
    prompts: name → text put before an input, and which of them is put there unasked.
    checkpoint: where the weights and tokenizer lie, if on this machine.
    tells_input_tokens: whether its replies hold `input_tokens`, so that several tenants can share one.
    notes: what else an operator should know of it, for the line that tells of its joining.
    """

    model_id: str
    operations: frozenset[Operation]
    max_input_tokens: int | None = None
    batch_inputs: int | None = None
    batch_tokens: int | None = None
    batch_bytes: int | None = None
    concurrent_inputs: int | None = None
    dimensions: int | None = None
    pooling: str | None = None
    dtype: str | None = None
    revision: str | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    checkpoint: str | None = None
    version: str | None = None
    tells_input_tokens: bool = False
    notes: tuple[str, ...] = ()


class Tls(msgspec.Struct, frozen=True):
    """Paths of PEM files. ca: who is trusted instead of the system's; certificate, private_key: our own."""

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class Load(msgspec.Struct, frozen=True):
    """How busy a replica says it is. waiting_inputs: texts or pairs in its own queue, not yet begun."""

    waiting_inputs: int


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Where one replica is and how to speak to it.

    address: a base URL; for torch the path of the engine's Unix socket.
    model: the served model's name, where the wire carries one.
    tokenizer: hub id or path of the model's checkpoint, for wires that tell no tokens or no prompts.
    ip: the one address to connect to, where the host of `address` has several; Host and SNI stay the name.
    """

    address: str
    model: str | None = None
    headers: Mapping[str, str] = {}
    tls: Tls = Tls()
    tokenizer: str | None = None
    ip: str | None = None


class Backend(Protocol):
    """One replica of one upstream, whatever wire it speaks."""

    async def describe(self, timeout_s: float) -> Capabilities:
        """Ask the replica what it is, when it joins.

        Raises: BackendError.
        """

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Carry out one piece of work within timeout_s.

        Raises: BackendError, whose facts say whose fault it is and whether to try elsewhere.
        """

    async def aclose(self) -> None:
        """Let go of connections."""


@runtime_checkable
class TellsLoad(Protocol):
    """What a backend offers beside, where its wire has a signal of the server's own queue."""

    async def load(self, timeout_s: float) -> Load | None:
        """How much waits there now; None where this server does not say.

        Raises: BackendError.
        """


def inputs_of(work: Work) -> Sequence[str]:
    """The texts that count as inputs: one vector, score or token list comes back for each."""
    return work.documents if isinstance(work, Rerank) else work.inputs


def operation_of(work: Work) -> Operation:
    """Which operation a piece of work is."""
    match work:
        case Embed():
            return Operation.EMBED
        case Rerank():
            return Operation.RERANK
        case Tokenize():
            return Operation.TOKENIZE
