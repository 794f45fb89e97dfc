"""Scores that the gateway computes from vectors, for models that embed and do not score pairs.

Between prepare and dispatch: the work that embeds the texts or images of a call, and the scores of its pairs.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from backends.contract import (
    Capabilities,
    Embed,
    EmbedParts,
    EmbedReply,
    EncodeReply,
    Operation,
    Output,
    Part,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Vectors,
)
from backends.contract import Work as BackendWork
from backends.vectors import max_similarity, pair_cosines
from gateway.calls import ScoreParts, Similarity, Work
from gateway.errors import InvalidInput

# Whether an input is a query, and its parts.
Side: TypeAlias = tuple[bool, tuple[Part, ...]]


def scores_by_cosine(work: Work, capabilities: Capabilities | None) -> bool:
    """Return whether the scores of this work are computed from vectors, as no replica scores its pairs."""
    if not isinstance(work, Rerank | Score):
        return isinstance(work, Similarity | ScoreParts)
    operations = capabilities.operations if capabilities else frozenset()
    return Operation.RERANK not in operations and Operation.EMBED in operations


def neutral_work(work: Work, capabilities: Capabilities | None, *, by_cosine: bool) -> BackendWork:
    """Return the work for replicas: for scores by cosine, embed each input, a query first.

    Raises: InvalidInput.
    """
    match work:
        case Similarity():
            return Embed((work.source, *work.sentences), prompt_name=work.prompt_name)
        case ScoreParts():
            output = _output_of(capabilities)
            if output is Output.MULTIVECTOR:
                _check_pages(work)
            return EmbedParts(tuple(parts for _, parts in sides_of_pairs(work)), output)
        case Rerank() if by_cosine:
            return Embed((work.query, *work.documents))
        case Score() if by_cosine:
            return Embed(texts_of_pairs(work))
    return work


def _output_of(capabilities: Capabilities | None) -> Output:
    """Return the output of a model of images: one vector for each input, or many."""
    if capabilities is None or Operation.EMBED in capabilities.operations:
        return Output.DENSE
    return Output.MULTIVECTOR if Output.MULTIVECTOR in capabilities.outputs else Output.DENSE


def _check_pages(work: ScoreParts) -> None:
    """Check that no document is a text, which a model of pages reads as a query. Raises: InvalidInput."""
    for index, (_, document) in enumerate(work.pairs):
        if any(isinstance(part, str) for part in document):
            raise InvalidInput(f"this model ranks images: document {index} has a text", param="documents")


def texts_of_pairs(work: Score) -> tuple[str, ...]:
    """Return each text of some pairs once, in the order of first appearance."""
    return tuple(dict.fromkeys(text for pair in work.pairs for text in pair))


def sides_of_pairs(work: ScoreParts) -> tuple[Side, ...]:
    """Return each query and each document of some pairs once, in the order of first appearance."""
    return tuple(
        dict.fromkeys(side for query, document in work.pairs for side in ((True, query), (False, document)))
    )


def _places_of(work: Work, count: int) -> list[tuple[int, int]]:
    """Return the places of each pair's two vectors. count: of the vectors."""
    if isinstance(work, Score):
        place = {text: index for index, text in enumerate(texts_of_pairs(work))}
        return [(place[query], place[document]) for query, document in work.pairs]
    if isinstance(work, ScoreParts):
        place_of = {side: index for index, side in enumerate(sides_of_pairs(work))}
        return [(place_of[True, query], place_of[False, document]) for query, document in work.pairs]
    return [(0, index) for index in range(1, count)]


def place_of_input(work: Work, index: int) -> str:
    """Return the input at fault as its caller counts inputs. index: of the embedded input."""
    if isinstance(work, Score):
        text = texts_of_pairs(work)[index]
        return f"input {next(place for place, pair in enumerate(work.pairs) if text in pair)}: "
    if isinstance(work, ScoreParts):
        side = sides_of_pairs(work)[index]
        if side[0] and len({query for query, _ in work.pairs}) == 1:
            return "the query: "
        return (
            f"input {next(place for place, pair in enumerate(work.pairs) if pair[not side[0]] == side[1])}: "
        )
    # The first of the embedded texts is the query.
    return "the query: " if index == 0 else f"input {index - 1}: "


def vector_scores(work: Work, reply: Reply) -> Reply:
    """Return the score of each pair, or of the first vector with each other vector.

    It is the cosine, or for many vectors of an input what `ScoreKind.COSINE` defines. A score counts as
    truncated if either of its two inputs was cut.
    """
    if isinstance(reply, EncodeReply):
        assert isinstance(work, ScoreParts)
        pairs = _places_of(work, 0)
        return RerankReply(
            _late_scores(pairs, reply.multivector or (), raw=work.raw_scores), *_rest(reply, pairs)
        )
    assert isinstance(reply, EmbedReply)
    pairs = _places_of(work, len(reply.vectors))
    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    scores = pair_cosines(reply.vectors[list(firsts)], reply.vectors[list(seconds)])
    return RerankReply(scores, *_rest(reply, pairs))


def _rest(
    reply: EmbedReply | EncodeReply, pairs: Sequence[tuple[int, int]]
) -> tuple[int, tuple[int, ...] | None]:
    """Return the tokens of a reply, and the pairs of which an input was cut."""
    if reply.truncated is None:
        return reply.tokens, None
    cut = set(reply.truncated)
    return reply.tokens, tuple(index for index, pair in enumerate(pairs) if cut.intersection(pair))


def _late_scores(pairs: Sequence[tuple[int, int]], vectors: Sequence[Vectors], *, raw: bool) -> Vectors:
    """Return the scores of late interaction. vectors: of each input, (its tokens, dim)."""
    scores = np.zeros(len(pairs), dtype=np.float32)
    for index, (query, document) in enumerate(pairs):
        best = max_similarity(vectors[query], [vectors[document]])[0]
        scores[index] = best if raw else best / len(vectors[query])
    return scores
