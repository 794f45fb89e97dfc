"""Conversion of the network's rows to the reply: scaling, scores, labels.

Rule: the sigmoid or softmax of a score is applied once, here. Knows nothing of torch, queues or texts.
"""

from collections.abc import Sequence

import numpy as np

from backends.contract import (
    Classify,
    ClassifyReply,
    Embed,
    EmbedChunks,
    EmbedChunksReply,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Vectors,
    Work,
)
from backends.contract.errors import UnsupportedWork
from backends.contract.vectors import max_similarity, shape_vectors, sigmoid, softmax
from backends.recipe.recipe import Recipe
from backends.torch.inputs.sequences import PreparedSequences, Row


def answer(recipe: Recipe, work: Work, prepared: PreparedSequences, rows: Sequence[Row]) -> Reply:
    """Return the reply to a piece of work. rows: of its sequences, in their order."""
    tokens, truncated = sum(prepared.lengths), prepared.truncated
    match work:
        case Embed() | EmbedParts(output=Output.DENSE):
            vectors = _shaped(recipe, _stack_dense(rows), work)
            return EmbedReply(vectors, tokens, truncated, prepared.lengths)
        case EmbedChunks():
            chunks = _without_none([row.dense for row in rows])
            vectors, counts = _shaped(recipe, np.concatenate(chunks), work), tuple(map(len, chunks))
            return EmbedChunksReply(vectors, counts, tokens, prepared.ranges, truncated, prepared.lengths)
        case EmbedParts():
            vectors_of_tokens = _without_none([row.multivector for row in rows])
            features = (sequence.features for sequence in prepared.sequences)
            grids = tuple(None if found is None else found.grid for found in features)
            counts = prepared.lengths
            return EncodeReply(tokens, None, None, vectors_of_tokens, None, truncated, counts, grids)
        case Encode():
            return _encode_reply(recipe, work, prepared, rows)
        case Rerank() | Score():
            return _scores(recipe, work, prepared, rows)
        case Classify():
            logits = _stack_dense(rows)
            scores = logits if work.raw_scores else _label_scores(recipe, logits)
            return ClassifyReply(recipe.labels, scores, tokens, truncated)
    raise UnsupportedWork("this engine does not do that")


def _scores(
    recipe: Recipe, work: Rerank | Score, prepared: PreparedSequences, rows: Sequence[Row]
) -> RerankReply:
    tokens, truncated, raw = sum(prepared.lengths), prepared.truncated, work.raw_scores
    if prepared.compared:
        # Without length 1 a mean is no cosine.
        is_sum = raw or not recipe.late.scaled
        return RerankReply(_late_scores(prepared.compared, rows, raw=is_sum), tokens, truncated)
    logits = np.ascontiguousarray(_stack_dense(rows)[:, 0])
    if raw:
        return RerankReply(logits, tokens, truncated)
    return RerankReply(sigmoid(logits), tokens, truncated, logits)


def _late_scores(compared: Sequence[tuple[int, int]], rows: Sequence[Row], *, raw: bool) -> Vectors:
    vectors = [row.multivector for row in rows if row.multivector is not None]
    scores = np.zeros(len(compared), dtype=np.float32)
    for query in dict.fromkeys(first for first, _ in compared):
        places = [i for i, (first, second) in enumerate(compared) if first == query and len(vectors[second])]
        if places and len(vectors[query]):
            best = max_similarity(vectors[query], [vectors[compared[i][1]] for i in places])
            scores[places] = best if raw else best / len(vectors[query])
    return scores


def _label_scores(recipe: Recipe, logits: Vectors) -> Vectors:
    if recipe.multi_label or len(recipe.labels) == 1:
        return sigmoid(logits)
    return softmax(logits)


def _shaped(recipe: Recipe, vectors: Vectors, work: Embed | EmbedChunks | EmbedParts | Encode) -> Vectors:
    return shape_vectors(
        vectors,
        dimensions=work.dimensions,
        normalize=work.normalize,
        norm_before_cut=recipe.norm_before_cut,
    )


def _encode_reply(
    recipe: Recipe, work: Encode, prepared: PreparedSequences, rows: Sequence[Row]
) -> EncodeReply:
    outputs = work.outputs
    dense = None
    if Output.DENSE in outputs:
        dense = _shaped(recipe, _stack_dense(rows), work)
    return EncodeReply(
        sum(prepared.lengths),
        dense,
        tuple(row.terms for row in rows if row.terms is not None) if Output.SPARSE in outputs else None,
        _without_none([row.multivector for row in rows]) if Output.MULTIVECTOR in outputs else None,
        _without_none([row.token_vectors for row in rows]) if Output.TOKENS in outputs else None,
        prepared.truncated,
        prepared.lengths,
    )


def _without_none(vectors: Sequence[Vectors | None]) -> tuple[Vectors, ...]:
    return tuple(array for array in vectors if array is not None)


def _stack_dense(rows: Sequence[Row]) -> Vectors:
    return np.stack([row.dense for row in rows if row.dense is not None])
