"""Rerank API of Cohere, Jina and Voyage, which many servers implement.

Source: the API references of Cohere (v2), Jina and Voyage. Every score is requested, because a call may be
cut into several requests: no request has `top_n` or `top_k`.
"""

import msgspec
import numpy as np

from backends.contract import Rerank, RerankReply, ScoreKind, Vectors
from backends.contract.errors import ReplicaFailed
from backends.contract.vectors import sigmoid
from backends.http.answers import decode_json
from backends.http.client import UpstreamResponse
from backends.http.openai_envelope import ApiMeta, TokenCounts
from backends.http.replies import check_tokens, order_scores, truncated_inputs
from backends.tokens.tokenizer import TokenCount

# Several pairs, because one pair is not enough to determine the scale of the scores.
PROBE = Rerank("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))
# A cosine or a sigmoid of rounded numbers may be slightly above 1.
SCORE_MAX = 1.01


class UpstreamScore(msgspec.Struct, frozen=True):
    """Score of one document."""

    relevance_score: float
    index: int | None = None


class UpstreamScores(msgspec.Struct, frozen=True):
    """Body of a rerank: Cohere's and Jina's `results`, or Voyage's `data`."""

    results: list[UpstreamScore] | None = None
    data: list[UpstreamScore] | None = None
    usage: TokenCounts | None = None
    meta: ApiMeta | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of all pairs; None if they are not reported. Cohere's search units are no tokens."""
        counted = self.usage.tokens if self.usage else None
        return counted if counted is not None or self.meta is None else self.meta.token_count


def decode_scores(response: UpstreamResponse, expected: int) -> tuple[Vectors, int | None]:
    """Decode the scores in document order, (expected,) float32, and the tokens, or None if not reported.

    Raises: ReplicaFailed, if the body does not contain `expected` scores.
    """
    reply = decode_json(response.body, UpstreamScores)
    path, entries = ("data", reply.data) if reply.results is None else ("results", reply.results)
    if entries is None:
        raise ReplicaFailed("the upstream's answer to a rerank has neither `results` nor `data`")
    ranks = [(entry.index, entry.relevance_score) for entry in entries]
    return order_scores(ranks, expected, path), reply.tokens


def scale_of(scores: Vectors) -> ScoreKind:
    """Return the scale of the scores of `PROBE`, (3,) float32: only a logit can be outside −1 to 1."""
    if np.abs(scores).max() > SCORE_MAX:
        return ScoreKind.LOGIT
    return ScoreKind.COSINE if scores.min() < 0 else ScoreKind.SIGMOID


def decode_rerank(
    work: Rerank,
    response: UpstreamResponse,
    scale: ScoreKind,
    count: TokenCount | None,
    max_tokens: int | None = None,
) -> RerankReply:
    """Decode the reply in a response of status 200.

    scale: of the server's scores; logits are converted to 0 to 1 unless the work requests raw scores. count:
    from the model's tokenizer, if available here. max_tokens: longest input of the model, if known.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    scores, tokens = decode_scores(response, len(work.documents))
    if scale is not ScoreKind.LOGIT and np.abs(scores).max() > SCORE_MAX:
        raise ReplicaFailed("the upstream's scores have another scale than when it joined")
    logits = None
    if scale is ScoreKind.LOGIT and not work.raw_scores:
        scores, logits = sigmoid(scores), scores
    if count is not None:
        return RerankReply(scores, count.tokens, count.truncated, logits)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    # A model that embeds the query and the document reads twice the length.
    check_tokens(tokens, len(work.documents), max_tokens and 2 * max_tokens)
    return RerankReply(scores, tokens, truncated_inputs(work, tokens, None), logits)
