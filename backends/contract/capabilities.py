"""Operations of models, and what a replica offers of them."""

from enum import StrEnum

import msgspec

# Bound on every number that a server reports. Lengths, batches and quotas are computed from them.
NUMBER_MAX = 2**31


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


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities that a replica reported when it joined; None means that it does not report the value.

    request_inputs, request_tokens, request_bytes: upper bounds on one request to the replica.
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
    late_chunking: chunks of documents are embedded, each with its document in view.
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
    request_inputs: int | None = None
    request_tokens: int | None = None
    request_bytes: int | None = None
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
