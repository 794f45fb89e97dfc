"""Neutral work, replies and capabilities: the interface that every backend adapter implements.

This module knows nothing of HTTP, tenants, quotas or batching. Every message is frozen.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

# Values of `upstreams.<name>.backend`. The adapter of each kind is listed in `backends.registry`.
BackendKind: TypeAlias = Literal["tei", "infinity", "vllm", "openai", "cohere", "jina", "voyage", "torch"]
# Kinds that the OpenAI adapter serves: any server of OpenAI's API, and hosted APIs that differ in details.
ApiKind: TypeAlias = Literal["openai", "cohere", "jina", "voyage"]
# Base URLs of the providers; servers of OpenAI's own API are run by many.
API_ADDRESSES: dict[ApiKind, str | None] = {
    "openai": None,
    "cohere": "https://api.cohere.com/v2",
    "jina": "https://api.jina.ai/v1",
    "voyage": "https://api.voyageai.com/v1",
}
# Beginnings of the addresses of TEI servers that are called over gRPC, without and with TLS.
GRPC_SCHEMES = ("grpc://", "grpcs://")
# Bound on every number that a server reports. Lengths, batches and quotas are computed from them.
NUMBER_MAX = 2**31
# Invariant: C-contiguous float32, so that a row is a view and its bytes are its base64 payload.
Vectors: TypeAlias = NDArray[np.float32]


class Operation(StrEnum):
    """Operations that a model can offer."""

    EMBED = "embed"
    EMBED_IMAGE = "embed_image"
    EMBED_AUDIO = "embed_audio"
    ENCODE = "encode"
    RERANK = "rerank"
    RERANK_IMAGE = "rerank_image"
    CLASSIFY = "classify"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class Output(StrEnum):
    """Kinds of output that an embedding model can compute for an input.

    DENSE: one vector. SPARSE: weights for some terms of the vocabulary (SPLADE, BGE-M3). MULTIVECTOR: one
    vector per token, as late interaction compares them (ColBERT, BGE-M3). TOKENS: the network's last hidden
    state at every token, special tokens included, neither projected nor normalized (TEI's embed_all).
    """

    DENSE = "dense"
    SPARSE = "sparse"
    MULTIVECTOR = "multivector"
    TOKENS = "tokens"


class ScoreKind(StrEnum):
    """Scales of a reranker's score.

    LOGIT: the network's output. SIGMOID: the logit mapped to the range 0 to 1; the raw score is the logit.
    COSINE: the mean, over the query's vectors, of the best cosine with one of the document's vectors; the raw
    score is the sum (MaxSim).
    """

    LOGIT = "logit"
    SIGMOID = "sigmoid"
    COSINE = "cosine"


class Truncate(StrEnum):
    """Treatment of an input that is longer than the model: refuse it, or cut one end."""

    ERROR = "error"
    LEFT = "left"
    RIGHT = "right"


class Chat(msgspec.Struct, frozen=True):
    """Rendering of conversations by the chat template of a model, as transformers renders them.

    add_generation_prompt: the text ends with the start of an answer. continue_final_message: it ends with the
    last message, without the mark of its end. template: of the request; None is the checkpoint's.
    variables: further variables of the template, a JSON object as text, so that work is hashable.
    """

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    template: str | None = None
    variables: str = "{}"


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Request for one vector per input.

    dimensions: keep the first N components, then normalize (if requested), as TEI does.
    prompt_name: a key of the checkpoint's sentence-transformers prompts. None selects the checkpoint's
    default prompt; "" selects no prompt. prompt_characters: length of the prompt that each input begins with,
    for a model that leaves prompts out of its pooling (`pools_prompt`); empty for any other.
    max_tokens: a longer input is cut at so many tokens, prompt and special ones included. None is the model's
    length, which also holds if it is less. It has no effect on a request that refuses to be cut.
    late_chunking: the model reads all inputs as one text with one prompt, and the vector of an input is the
    mean over its own tokens. Only a model that reports `late_chunking` does so. No input is truncated.
    chat: each input is a conversation: a JSON list of messages, objects with `role`, `content` and maybe
    `name`, whose content is a text or a list of parts with `type` and `text`. Such a request has one input.
    special_tokens: the tokenizer's own special tokens are put around each text.
    """

    inputs: tuple[str, ...]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    prompt_characters: tuple[int, ...] = ()
    max_tokens: int | None = None
    late_chunking: bool = False
    chat: Chat | None = None
    special_tokens: bool = True


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Request for several kinds of output per input, or for one kind that is not dense.

    A request for dense vectors only is an `Embed`. normalize and dimensions apply to the dense vector. The
    other fields are those of `Embed`.
    """

    inputs: tuple[str, ...]
    outputs: frozenset[Output]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    prompt_characters: tuple[int, ...] = ()
    max_tokens: int | None = None
    chat: Chat | None = None
    special_tokens: bool = True


class Image(msgspec.Struct, frozen=True, tag="image"):
    """Encoded picture as it came. media_type: of its content. width, height: pixels, as its header states."""

    data: bytes
    media_type: str
    width: int
    height: int


class Audio(msgspec.Struct, frozen=True, tag="audio"):
    """Encoded recording as it came. media_type: of its content. seconds: its length, None if not known."""

    data: bytes
    media_type: str
    seconds: float | None = None


# One piece of an input that is more than text.
Part: TypeAlias = str | Image | Audio


class EmbedParts(msgspec.Struct, frozen=True, tag="embed_parts"):
    """Request for one vector per input, or one per patch and token, of inputs with pictures or sound.

    inputs: the parts of each in order; one of them all is not a text. output: `DENSE`, answered by an
    `EmbedReply`, or `MULTIVECTOR`, answered by an `EncodeReply`. chat: each input is one message of a user,
    rendered by the chat template of the model. The other fields are those of `Embed`.
    """

    inputs: tuple[tuple[Part, ...], ...]
    output: Output = Output.DENSE
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    max_tokens: int | None = None
    chat: Chat | None = None


class Rerank(msgspec.Struct, frozen=True, tag="rerank"):
    """Request for one score per document against the query; `ScoreKind` defines raw scores.

    instruction: the task for the model, in its template; None selects the template's own. Only a model that
    reports `takes_instruction` accepts one. max_tokens: as in `Embed`, of each pair.
    """

    query: str
    documents: tuple[str, ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    instruction: str | None = None
    max_tokens: int | None = None


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Request for one score per pair of a query and a document, answered by a `RerankReply`.

    instruction, max_tokens: as in `Rerank`.
    """

    pairs: tuple[tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    instruction: str | None = None
    max_tokens: int | None = None


class Classify(msgspec.Struct, frozen=True, tag="classify"):
    """Request for the score of every label for each input, a text or a pair; raw scores are logits.

    max_tokens, chat, special_tokens: as in `Embed`.
    """

    inputs: tuple[str | tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    max_tokens: int | None = None
    chat: Chat | None = None
    special_tokens: bool = True


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Request for the tokens of each input; no input is truncated.

    pieces: the text of a token is the vocabulary's (`##ing`), instead of the part of the input it covers.
    """

    inputs: tuple[str, ...]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    pieces: bool = False


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """Request for the text of each list of token ids."""

    inputs: tuple[tuple[int, ...], ...]
    skip_special_tokens: bool = True


Work: TypeAlias = Embed | Encode | EmbedParts | Rerank | Score | Classify | Tokenize | Detokenize


class EmbedReply(msgspec.Struct, frozen=True, tag="embedded"):
    """Vectors in input order.

    vectors: (n_inputs, dim) float32; each row has length 1 if the work requested normalization.
    tokens: number of tokens after truncation, including special tokens and the prompt.
    truncated: indices of the inputs that were cut; None if the backend does not report them.
    input_tokens: number of tokens of each input; None if the backend reports only their sum.
    """

    vectors: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None


class TermWeights(msgspec.Struct, frozen=True):
    """Term weights of one input.

    indices: (k,) int32, vocabulary ids in ascending order. values: (k,) float32, all different from 0.
    """

    indices: NDArray[np.int32]
    values: Vectors


class PatchGrid(msgspec.Struct, frozen=True):
    """Places of a picture's patches among the vectors of its input.

    first: index of the upper left patch; the others follow it row by row.
    """

    first: int
    rows: int
    columns: int


class EncodeReply(msgspec.Struct, frozen=True, tag="encoded"):
    """Requested outputs of each input, in input order; outputs that were not requested are None.

    dense: (n_inputs, dim). multivector, token_vectors: one array (tokens of the input, dim) per input.
    grids: the patches of each input's picture, None for a text; None if the backend does not report them.
    The other fields are those of `EmbedReply`.
    """

    tokens: int
    dense: Vectors | None = None
    sparse: tuple[TermWeights, ...] | None = None
    multivector: tuple[Vectors, ...] | None = None
    token_vectors: tuple[Vectors, ...] | None = None
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None
    grids: tuple[PatchGrid | None, ...] | None = None


class RerankReply(msgspec.Struct, frozen=True, tag="reranked"):
    """Scores in document order, (n_documents,) float32; the other fields are those of `EmbedReply`.

    logits: of which the scores are the sigmoid, (n_documents,), None if they are not known or are the scores.
    """

    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()
    logits: Vectors | None = None

    @property
    def order(self) -> Vectors:
        """Numbers to sort documents by: above 16.6 the sigmoid of every logit is 1."""
        return self.scores if self.logits is None else self.logits


class ClassifyReply(msgspec.Struct, frozen=True, tag="classified"):
    """Label scores, (n_inputs, n_labels) float32: inputs in order, labels in the model's order."""

    labels: tuple[str, ...]
    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()


class Token(msgspec.Struct, frozen=True):
    """One token of an input.

    text: as `Tokenize` requests it; a special token's is always the vocabulary's.
    start, stop: UTF-8 byte offsets into the text with its prompt. They are None for special tokens, and for
    all tokens if the wire carries no offsets.
    """

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class TokenizeReply(msgspec.Struct, frozen=True, tag="tokenized"):
    """Tokens of each input, in input order. Tokenization is free, therefore `tokens` is always 0."""

    inputs: tuple[tuple[Token, ...], ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()


class DetokenizeReply(msgspec.Struct, frozen=True, tag="detokenized"):
    """One text per list of token ids. Detokenization is free, as tokenization is."""

    texts: tuple[str, ...]
    tokens: int = 0
    truncated: tuple[int, ...] | None = ()


Reply: TypeAlias = EmbedReply | EncodeReply | RerankReply | ClassifyReply | TokenizeReply | DetokenizeReply


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities that a replica reported when it joined; None means that it does not report the value.

    batch_inputs, batch_tokens, batch_bytes: upper bounds on one request to the replica.
    concurrent_inputs: the number of inputs in flight above which the replica refuses requests.
    prompts, default_prompt: prompt texts by name, and the name of the one used if a request specifies none.
    checkpoint: path of the weights and tokenizer, if they are on this machine.
    reports_input_tokens: replies contain `input_tokens`, so that one reply can be shared by several tenants.
    outputs: the kinds that `Encode` may request. labels: a classifier's labels, in the order of its scores.
    score_kind: the scale of a reranker's scores if raw scores are not requested.
    overhead_tokens: the most tokens that a pair has in addition to those of its query and document.
    takes_instruction: a request for scores may bring an instruction, which is applied to every pair.
    typed_inputs: `prompts` are names that a request states once for all its inputs, and the server knows the
    texts. Queries and documents cannot share a request then.
    pools_prompt: the tokens of a prompt take part in pooling. If they do not, a request states the prompts
    that its inputs contain.
    late_chunking: a request for vectors may ask for late chunking.
    norm_before_cut: fewer `dimensions` are not the first components of the full vector.
    notes: further facts for operators, logged when the replica joins.
    truncates: what the server does with an input that is too long if a request does not say it.
    truncation_side: the end that is cut if neither request nor configuration name one.
    media_tokens: the most tokens of a picture or recording, where the model has a bound of its own for them.
    loaded: the model is in memory. If it is not, all values come from the checkpoint's small files.
    metered: each request costs money, so that none is sent that is not needed.
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
    takes_instruction: bool = False
    typed_inputs: bool = False
    pools_prompt: bool = True
    late_chunking: bool = False
    norm_before_cut: bool = False
    notes: tuple[str, ...] = ()
    truncates: bool | None = None
    truncation_side: Truncate = Truncate.RIGHT
    media_tokens: int | None = None
    loaded: bool = True
    metered: bool = False


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files.

    ca: trusted authorities, replacing the system's. certificate, private_key: the gateway's own.
    """

    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None


class QueueDepth(msgspec.Struct, frozen=True):
    """Queue length of a replica. waiting_inputs: texts or pairs in its own queue, not started yet."""

    waiting_inputs: int


ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "failed"]
# room: memory was needed for a different model. idle: no request used the model. out_of_memory: a batch of
# a different model did not fit into memory.
UnloadReason: TypeAlias = Literal["room", "idle", "out_of_memory"]


class Residence(msgspec.Struct, frozen=True):
    """Memory state of a model, with counters since its process started.

    error: the reason that the last load failed. memory_bytes: memory in use. loads: successful loads.
    out_of_memory: batches that did not fit into memory in one piece.
    """

    state: ModelState
    error: str | None = None
    memory_bytes: int = 0
    loads: int = 0
    failed_loads: int = 0
    unloads: dict[UnloadReason, int] = {}
    out_of_memory: int = 0


# stale: a kept-alive connection broke as a request was sent, which was sent again. idle_error: the server
# closed an idle connection with an error reply. unsolicited: the server sent data that no request asked for.
ConnectionFaultKind: TypeAlias = Literal["stale", "idle_error", "unsolicited"]


class ConnectionFault(msgspec.Struct, frozen=True):
    """Fault of one connection that cost no request.

    pause_s: for this long from now no connection to the server is reused; 0 if nothing changes.
    """

    kind: ConnectionFaultKind
    pause_s: float = 0.0


ReportFault: TypeAlias = Callable[[ConnectionFault], None]


def ignore_fault(fault: ConnectionFault) -> None:
    """Ignore the fault of a connection."""


class TokenizerSettings(msgspec.Struct, frozen=True):
    """Tokens around each text; None leaves the choice to the checkpoint's files."""

    add_bos_token: bool | None = None
    add_eos_token: bool | None = None


class TokenizerSource(msgspec.Struct, frozen=True):
    """Location of a checkpoint's tokenizer, a hub id or path, and the settings for it."""

    location: str
    settings: TokenizerSettings = TokenizerSettings()


class ApiSettings(msgspec.Struct, frozen=True):
    """Settings for servers of OpenAI's API and of its relatives; None leaves the choice to the kind.

    embeddings, rerank: paths, from the root of the server with a leading slash, else below the base URL.
    input_type: the server's word for each role, and for `default`. extra_body: fields of every request.
    task: the only operation that the model is asked for.
    """

    kind: ApiKind = "openai"
    embeddings: str | None = None
    rerank: str | None = None
    input_type: Mapping[str, str] | None = None
    extra_body: Mapping[str, Any] = {}
    task: Literal["embed", "rerank"] | None = None


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Address and connection settings of one replica.

    address: a base URL, for TEI also grpc://host:port; for torch, the form that
    `backends.torch.wire.address_of` writes.
    model: name of the served model, if the wire carries one.
    tokenizer: of the model's checkpoint, for wires that report no tokens or no prompts.
    ip: the address to connect to if the host of `address` has several. Host header and SNI keep the name.
    report: called with each fault of its connections. api: for the OpenAI adapter only.
    """

    address: str
    model: str | None = None
    headers: Mapping[str, str] = {}
    tls: TlsFiles = TlsFiles()
    tokenizer: TokenizerSource | None = None
    ip: str | None = None
    report: ReportFault = ignore_fault
    api: ApiSettings = ApiSettings()


class Backend(Protocol):
    """Client of one replica, independent of its wire."""

    async def describe(self, timeout_s: float) -> Capabilities:
        """Query the replica's capabilities, when it joins.

        Raises: BackendError.
        """

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Execute one piece of work within timeout_s.

        Raises: BackendError; its facts are the source of the fault and whether to retry elsewhere.
        """

    async def aclose(self) -> None:
        """Close all connections."""


@runtime_checkable
class ReportsQueueDepth(Protocol):
    """Optional interface of backends whose wire reports the length of the server's own queue."""

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """Return the current queue depth, or None if this server does not report it.

        Raises: BackendError.
        """


@runtime_checkable
class DropsConnections(Protocol):
    """Optional interface of backends whose connections could hold the reply to a different request."""

    def drop_connections(self) -> None:
        """Close the idle connections; the next request opens a new one."""


@runtime_checkable
class ReportsResidence(Protocol):
    """Optional interface of backends whose model can be out of memory."""

    async def residence(self, timeout_s: float) -> Residence:
        """Return the current memory state of the model.

        Raises: BackendError.
        """


# One input of a piece of work. The reply has one vector, score, row of labels or token list for each.
WorkInput: TypeAlias = str | tuple[str, str] | tuple[int, ...] | tuple[Part, ...]


def inputs_of(work: Work) -> Sequence[WorkInput]:
    """Return the inputs of a piece of work: texts, pairs of texts, lists of token ids, or lists of parts."""
    match work:
        case Embed() | Encode() | EmbedParts() | Classify() | Tokenize() | Detokenize():
            return work.inputs
        case Rerank():
            return work.documents
        case Score():
            return work.pairs


def with_prefix(work: Embed | Encode | Tokenize, prompt: str) -> tuple[str, ...]:
    """Return the inputs with a prompt before each; with late chunking they are one text, with one prompt."""
    if isinstance(work, Embed) and work.late_chunking:
        return (prompt + work.inputs[0], *work.inputs[1:])
    return tuple(prompt + text for text in work.inputs)


def operation_of(work: Work) -> Operation:
    """Return the operation of a piece of work."""
    match work:
        case Embed():
            return Operation.EMBED
        case EmbedParts():
            return _operation_of_parts(work)
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


def _operation_of_parts(work: EmbedParts) -> Operation:
    """Return the operation with the rarest ability: sound, then images."""
    has_audio = any(isinstance(part, Audio) for parts in work.inputs for part in parts)
    return Operation.EMBED_AUDIO if has_audio else Operation.EMBED_IMAGE
