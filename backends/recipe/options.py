"""Values that an operator may set for a checkpoint in place of what its own files declare.

The configuration schema and the engine share them. This module imports nothing of ours, so that the schema
stays light.
"""

from typing import Literal, TypeAlias

import msgspec

# `upstreams.<name>.dtype`: number format of a network's matrix products.
DTypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]
# `upstreams.<name>.runtime`: what computes passes of one text, where it is faster.
Runtime: TypeAlias = Literal["torch", "openvino"]
# `upstreams.<name>.task`, `upstreams.<name>.pooling` and `upstreams.<name>.rerank_template`.
Task: TypeAlias = Literal["embed", "rerank"]
Pooling: TypeAlias = Literal["cls", "max", "mean", "weighted_mean", "last_token", "splade"]

# Templates of published rerankers. "pair": the two texts as the tokenizer joins them, without a prompt.
RerankFamily: TypeAlias = Literal["qwen3", "mxbai-v2", "bge-gemma", "nemotron", "pair"]


class RerankPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Template of a reranker, written out by the operator.

    prompt: text with {query} and {document}, and with {instruction} if the model takes one. instruction: that
    of calls that bring none. positive, negative: tokens whose logits count for and against a document.
    Without `positive` the checkpoint's classifier scores. special_tokens: the tokenizer's own surround the
    prompt.
    """

    prompt: str
    positive: str | None = None
    negative: str | None = None
    instruction: str | None = None
    special_tokens: bool = False


class TaskSettings(msgspec.Struct, frozen=True):
    """Settings that the operator configured; None leaves the choice to the checkpoint's files.

    model: hub id or path, by which published rerankers are known. adapter: name of the adapter that is
    merged into the weights.
    """

    task: Task | None = None
    pooling: Pooling | None = None
    rerank_template: RerankFamily | RerankPrompt | None = None
    model: str = ""
    adapter: str | None = None
