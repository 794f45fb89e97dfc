"""What a backend is asked and what it answers: the one language every adapter speaks.

Knows nothing of HTTP, tenants, quotas or batching. Everything that travels is frozen.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

# Invariant: C-contiguous float32, so that a row is a view and its bytes are its base64 payload.
Vectors: TypeAlias = NDArray[np.float32]


class Operation(StrEnum):
    """What a model can be asked to do."""

    EMBED = "embed"
    ENCODE = "encode"
    RERANK = "rerank"
    CLASSIFY = "classify"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class Output(StrEnum):
    """What an input can be turned into.

    DENSE: one vector. SPARSE: a weight for some terms of the vocabulary (SPLADE, BGE-M3). MULTIVECTOR: a
    vector a token, as late interaction compares them (ColBERT, BGE-M3). TOKENS: the network's last hidden
    state at every token, specials too, neither projected nor normalized (TEI's embed_all).
    """

    DENSE = "dense"
    SPARSE = "sparse"
    MULTIVECTOR = "multivector"
    TOKENS = "tokens"


class ScoreKind(StrEnum):
    """What the number is that a reranker gives.

    LOGIT: as the network gives it. SIGMOID: that squeezed between 0 and 1; raw, it is the logit. COSINE: the
    mean over a query's vectors of the best cosine with one of the document's; raw, it is their sum (MaxSim).
    """

    LOGIT = "logit"
    SIGMOID = "sigmoid"
    COSINE = "cosine"


class Truncate(StrEnum):
    """What happens to an input longer than the model: refuse it, or cut one side."""

    ERROR = "error"
    LEFT = "left"
    RIGHT = "right"


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Turn each input into one vector.

    dimensions: keep the first N components, then normalize (if asked), as TEI does.
    prompt_name: a key of the checkpoint's sentence-transformers prompts; None is its default, "" is none.
    """

    inputs: tuple[str, ...]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Turn each input into several kinds of output at once, or into one that is not dense.

    What is dense alone is `Embed`. normalize and dimensions speak of the dense vector.
    """

    inputs: tuple[str, ...]
    outputs: frozenset[Output]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT


class Rerank(msgspec.Struct, frozen=True, tag="rerank"):
    """Score each document against the query; raw_scores asks for what `ScoreKind` says is raw."""

    query: str
    documents: tuple[str, ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Score each pair of a query and a document, as `Rerank` does for one query; `RerankReply` answers."""

    pairs: tuple[tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT


class Classify(msgspec.Struct, frozen=True, tag="classify"):
    """Tell how well each label fits each input, a text or a pair of texts; raw_scores asks for logits."""

    inputs: tuple[str | tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Show how each input becomes tokens; nothing is cut."""

    inputs: tuple[str, ...]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Turn each list of token ids back into text."""

    inputs: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool = True


Work: TypeAlias = Embed | Encode | Rerank | Score | Classify | Tokenize | Detokenize


class EmbedReply(msgspec.Struct, frozen=True, tag="embedded"):
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


class TermWeights(msgspec.Struct, frozen=True):
    """Term weights of one input: ids of the vocabulary, (k,) int32, rising; values (k,) float32, none 0."""

    indices: NDArray[np.int32]
    values: Vectors


class EncodeReply(msgspec.Struct, frozen=True, tag="encoded"):
    """What was asked for of each input, in input order; None where it was not asked for.

    dense: (n_inputs, dim). multivector, token_vectors: for each input (its tokens, dim). The rest as in
    `EmbedReply`.
    """

    tokens: int
    dense: Vectors | None = None
    sparse: tuple[TermWeights, ...] | None = None
    multivector: tuple[Vectors, ...] | None = None
    token_vectors: tuple[Vectors, ...] | None = None
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None


class RerankReply(msgspec.Struct, frozen=True, tag="reranked"):
    """Scores in document order: (n_documents,) float32. The rest as in `EmbedReply`."""

    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()


class ClassifyReply(msgspec.Struct, frozen=True, tag="classified"):
    """Scores in input order and the model's order of labels: (n_inputs, n_labels) float32."""

    labels: tuple[str, ...]
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


class TokenizeReply(msgspec.Struct, frozen=True, tag="tokenized"):
    """The tokens of each input, in input order. Tokenizing is free: tokens is always 0."""

    inputs: tuple[tuple[Token, ...], ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()


class DetokenizeReply(msgspec.Struct, frozen=True, tag="detokenized"):
    """One text for each list of ids. Free, as tokenizing is."""

    texts: tuple[str, ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()


Reply: TypeAlias = EmbedReply | EncodeReply | RerankReply | ClassifyReply | TokenizeReply | DetokenizeReply


class Capabilities(msgspec.Struct, frozen=True):
    """What a replica said about itself when it joined; None is "it does not say".

    batch_inputs, batch_tokens, batch_bytes: the most that one request to it may hold.
    concurrent_inputs: how many inputs it takes in flight before it refuses.
    prompts: name → text put before an input, and which of them is put there unasked.
    checkpoint: where the weights and tokenizer lie, if on this machine.
    reports_input_tokens: whether its replies hold `input_tokens`, so that several tenants can share one.
    outputs: which kinds `Encode` may ask for. labels: of a classifier, in the order of its scores.
    score_kind: what a reranker's score is where raw ones are not asked for.
    overhead_tokens: the most that it adds to each pair beside the tokens of query and document.
    notes: what else an operator should know of it, for the line that tells of its joining.
    loaded: whether its model is in memory; what is said of one that is not comes from its small files alone.
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
    reports_input_tokens: bool = False
    outputs: frozenset[Output] = frozenset()
    labels: tuple[str, ...] = ()
    score_kind: ScoreKind | None = None
    overhead_tokens: int = 0
    notes: tuple[str, ...] = ()
    loaded: bool = True


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files. ca: who is trusted instead of the system's; certificate, private_key: our own."""

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class QueueDepth(msgspec.Struct, frozen=True):
    """How busy a replica says it is. waiting_inputs: texts or pairs in its own queue, not yet begun."""

    waiting_inputs: int


ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "failed"]
# room: another was to be loaded. idle: nobody asked for it. out_of_memory: a batch of another did not fit.
UnloadReason: TypeAlias = Literal["room", "idle", "out_of_memory"]


class Residence(msgspec.Struct, frozen=True):
    """Whether a model is in memory, and what became of it since its process began.

    error: why it was not loaded when that was last tried. memory_bytes: what it holds now. loads: how many
    went well. out_of_memory: batches that did not fit into memory as they were.
    """

    state: ModelState
    error: str | None = None
    memory_bytes: int = 0
    loads: int = 0
    failed_loads: int = 0
    unloads: dict[UnloadReason, int] = {}
    out_of_memory: int = 0


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Where one replica is and how to speak to it.

    address: a base URL; for torch as `backends.torch.wire.address_of` writes it.
    model: the served model's name, where the wire carries one.
    tokenizer: hub id or path of the model's checkpoint, for wires that tell no tokens or no prompts.
    ip: the one address to connect to, where the host of `address` has several; Host and SNI stay the name.
    """

    address: str
    model: str | None = None
    headers: Mapping[str, str] = {}
    tls: TlsFiles = TlsFiles()
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
class ReportsQueueDepth(Protocol):
    """What a backend offers beside, where its wire has a signal of the server's own queue."""

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """How much waits there now; None where this server does not say.

        Raises: BackendError.
        """


@runtime_checkable
class ReportsResidence(Protocol):
    """What a backend offers beside, where its model need not always be in memory."""

    async def residence(self, timeout_s: float) -> Residence:
        """Whether it is there now.

        Raises: BackendError.
        """


# What counts as one input: one vector, score, row of labels or token list comes back for each.
WorkInput: TypeAlias = str | tuple[str, str] | tuple[int, ...]


def inputs_of(work: Work) -> Sequence[WorkInput]:
    """The inputs of a piece of work: texts, pairs of texts, or lists of ids."""
    match work:
        case Embed() | Encode() | Classify() | Tokenize() | Detokenize():
            return work.inputs
        case Rerank():
            return work.documents
        case Score():
            return work.pairs


def operation_of(work: Work) -> Operation:
    """Which operation a piece of work is."""
    match work:
        case Embed():
            return Operation.EMBED
        case Encode():
            return Operation.ENCODE
        case Rerank() | Score():
            return Operation.RERANK
        case Classify():
            return Operation.CLASSIFY
        case Tokenize():
            return Operation.TOKENIZE
        case Detokenize():
            return Operation.DETOKENIZE
