"""Scores that the gateway computes from vectors, for models that embed and do not score pairs."""

from collections.abc import Sequence

import numpy as np

from backends.contract import EncodeReply, Reply, RerankReply, Vectors
from backends.contract.vectors import max_similarity, pair_cosines
from backends.contract.work import VectorScores


def vector_scores(plan: VectorScores, reply: Reply) -> RerankReply:
    """Return the score of each pair. reply: to the work of the plan.

    It is the cosine, or for many vectors of an input what `ScoreKind.COSINE` defines. A score counts as
    truncated if either of its two inputs was cut.
    """
    pairs = plan.places
    truncated = reply.truncated
    if truncated is not None:
        cut = set(truncated)
        truncated = tuple([index for index, pair in enumerate(pairs) if cut.intersection(pair)])
    if isinstance(reply, EncodeReply):
        scores = _late_scores(pairs, reply.multivector or (), raw=plan.raw)
    else:
        vectors = reply.dense_vectors
        assert vectors is not None
        firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
        scores = pair_cosines(vectors[list(firsts)], vectors[list(seconds)])
    return RerankReply(scores, reply.tokens, truncated)


def _late_scores(pairs: Sequence[tuple[int, int]], vectors: Sequence[Vectors], *, raw: bool) -> Vectors:
    """Return the scores of late interaction. vectors: of each input, (its tokens, dim)."""
    scores = np.zeros(len(pairs), dtype=np.float32)
    for index, (query, document) in enumerate(pairs):
        best = max_similarity(vectors[query], [vectors[document]])[0]
        scores[index] = best if raw else best / len(vectors[query])
    return scores
