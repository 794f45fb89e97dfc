"""From the rows that the network gave to the reply: scaling, scores, labels.

Rule: a score is squeezed once, here. Knows nothing of torch, queues or texts.
"""

from collections.abc import Sequence as Many

import numpy as np

from backends.contract import (
    Classify,
    ClassifyReply,
    Embed,
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
from backends.errors import UnsupportedWork
from backends.torch.checkpoint import Recipe
from backends.torch.preparing import Prepared
from backends.torch.sequences import Row
from backends.vectors import shape_vectors, sigmoid, softmax


def answer(recipe: Recipe, work: Work, prepared: Prepared, rows: Many[Row]) -> Reply:
    """The reply to a piece of work; rows are those of its sequences, in their order."""
    tokens, cut = sum(prepared.lengths), prepared.truncated
    match work:
        case Embed():
            vectors = shape_vectors(_dense(rows), dimensions=work.dimensions, normalize=work.normalize)
            return EmbedReply(vectors, tokens, cut, prepared.lengths)
        case Encode():
            return _encoded(work, prepared, rows)
        case Rerank() | Score():
            raw = work.raw_scores
            if prepared.compared:
                return RerankReply(_late_scores(prepared.compared, rows, raw=raw), tokens, cut)
            logits = np.ascontiguousarray(_dense(rows)[:, 0])
            return RerankReply(logits if raw else sigmoid(logits), tokens, cut)
        case Classify():
            logits = _dense(rows)
            scores = logits if work.raw_scores else _label_scores(recipe, logits)
            return ClassifyReply(recipe.labels, scores, tokens, cut)
    raise UnsupportedWork("this engine does not do that")


def max_similarity(query: Vectors, documents: Many[Vectors]) -> Vectors:
    """For each document the sum, over the query's vectors, of the best product with one of the document's.

    query: (its tokens, dim), documents: each (its tokens, dim), at least one. Returns (n_documents,) float32.
    Source: ColBERT (Khattab and Zaharia, 2020), MaxSim.
    """
    products = query @ np.concatenate(documents).T
    starts = np.cumsum([0, *(len(one) for one in documents[:-1])])
    best: Vectors = np.maximum.reduceat(products, starts, axis=1).sum(axis=0, dtype=np.float32)
    return best


def _late_scores(compared: Many[tuple[int, int]], rows: Many[Row], *, raw: bool) -> Vectors:
    vectors = [one.multivector for one in rows if one.multivector is not None]
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


def _encoded(work: Encode, prepared: Prepared, rows: Many[Row]) -> EncodeReply:
    wanted = work.outputs
    dense = None
    if Output.DENSE in wanted:
        dense = shape_vectors(_dense(rows), dimensions=work.dimensions, normalize=work.normalize)
    return EncodeReply(
        sum(prepared.lengths),
        dense,
        tuple(one.terms for one in rows if one.terms is not None) if Output.SPARSE in wanted else None,
        _each([one.multivector for one in rows]) if Output.MULTIVECTOR in wanted else None,
        _each([one.token_vectors for one in rows]) if Output.TOKENS in wanted else None,
        prepared.truncated,
        prepared.lengths,
    )


def _each(vectors: Many[Vectors | None]) -> tuple[Vectors, ...]:
    return tuple(one for one in vectors if one is not None)


def _dense(rows: Many[Row]) -> Vectors:
    return np.stack([one.dense for one in rows if one.dense is not None])
