"""Validation and conversion of reply values, shared by all wire formats.

Rule: an implausible value raises ReplicaFailed; it never becomes a vector.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from backends.contract import (
    NUMBER_MAX,
    Embed,
    EmbedChunks,
    ModelWork,
    QueueDepth,
    Rerank,
    RerankReply,
    Score,
    TermWeights,
    Truncate,
    Vectors,
)
from backends.contract.errors import (
    InvalidWork,
    ReplicaFailed,
    UnsupportedWork,
    input_too_long,
)
from backends.contract.texts import surely_fits
from backends.contract.vectors import shape_vectors
from backends.http.answers import in_order
from backends.http.client import UpstreamClient, UpstreamResponse

Item = TypeVar("Item")
Result = TypeVar("Result")
# Indices of the inputs that another gateway cut; absent if it cut none.
CUTS_HEADER = "x-truncated-inputs"
# No vocabulary is larger, and ids are stored as int32.
TERMS_MAX = 2**31


def float32(numbers: Sequence[Sequence[float]] | Sequence[float]) -> Vectors:
    """Convert numbers to a float32 array; numbers out of range become infinite."""
    # Callers refuse infinite numbers, so that numpy's overflow warning is not needed.
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float32)


def check_vectors(vectors: Vectors, expected: int) -> None:
    """Check that there is one finite row per input.

    Raises: ReplicaFailed.
    """
    if vectors.ndim != 2 or vectors.shape[0] != expected or vectors.shape[1] == 0:
        raise ReplicaFailed(f"asked for {expected} vectors, got an array of shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        row, column = np.argwhere(~np.isfinite(vectors))[0].tolist()
        raise ReplicaFailed(
            "the upstream's vectors contain numbers that are not finite", input_index=row
        ).with_facts(detail=f"number {column} of vector {row}: {vectors[row, column]}")


def check_tokens(tokens: int, inputs: int, max_input_tokens: int | None) -> None:
    """Check that a token count is plausible, because tenants are billed by it.

    Raises: ReplicaFailed.
    """
    if not 0 <= tokens <= inputs * (max_input_tokens or NUMBER_MAX):
        raise ReplicaFailed(f"the upstream counted {tokens} tokens for {inputs} inputs")


def check_dimensions(work: Embed | EmbedChunks, width: int | None) -> None:
    """Check that the requested dimensions are not more than the width of the model's vectors.

    Raises: InvalidWork.
    """
    if work.dimensions is not None and width is not None and work.dimensions > width:
        raise InvalidWork(f"`dimensions` is {work.dimensions}, the model's vectors have {width}")


def fit_vectors(vectors: Vectors, work: Embed | EmbedChunks) -> Vectors:
    """Apply the requested dimensions and normalization, even if the server did so already.

    Raises: ReplicaFailed, if the rows have fewer components than requested.
    """
    width = vectors.shape[1]
    if work.dimensions is not None and width < work.dimensions:
        raise ReplicaFailed(f"asked for {work.dimensions} dimensions, got {width}")
    return shape_vectors(vectors, dimensions=work.dimensions, normalize=work.normalize)


def order_scores(ranks: Sequence[tuple[int | None, float]], expected: int, path: str = "results") -> Vectors:
    """Sort (index, score) entries into document order and return the scores, (expected,) float32.

    path: of the entries in the answer, which are sorted by score. Raises: ReplicaFailed, unless there is one
    finite score per document.
    """
    if len(ranks) != expected:
        raise ReplicaFailed(f"asked for {expected} scores, got {len(ranks)}")
    places = in_order([index for index, _ in ranks], path, listed=False)
    scores = float32([ranks[place][1] for place in places])
    if not np.isfinite(scores).all():
        at = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ReplicaFailed(
            "the upstream's scores contain numbers that are not finite", input_index=at
        ).with_facts(detail=f"the score of document {at}: {scores[at]}")
    return scores


def term_weights(entries: Iterable[tuple[int, float]]) -> TermWeights:
    """Build the term weights of one input from (term, weight) entries in any order, without the zeros.

    Raises: ReplicaFailed, if a term occurs twice or a weight is not finite.
    """
    ordered = sorted((term, weight) for term, weight in entries if weight != 0)
    terms = [term for term, _ in ordered]
    if len(set(terms)) < len(terms) or (terms and not 0 <= terms[0] <= terms[-1] < TERMS_MAX):
        raise ReplicaFailed("the upstream's terms are not ids of a vocabulary, each once")
    weights = float32([weight for _, weight in ordered])
    if not np.isfinite(weights).all():
        raise ReplicaFailed("the upstream's weights contain numbers that are not finite")
    return TermWeights(np.array(terms, dtype=np.int32), weights)


def token_matrices(
    lists: Sequence[Sequence[Sequence[float]]], expected: int, max_input_tokens: int | None
) -> tuple[Vectors, ...]:
    """Convert the token vectors of each input to an array (tokens of the input, dim) float32.

    Raises: ReplicaFailed, unless there are `expected` inputs of at most max_input_tokens vectors each.
    """
    if len(lists) != expected:
        raise ReplicaFailed(f"asked for the token vectors of {expected} inputs, got {len(lists)}")
    matrices = tuple(float32(rows) for rows in lists)
    for matrix in matrices:
        check_vectors(matrix, len(matrix))
        if not 0 < len(matrix) <= (max_input_tokens or len(matrix)):
            raise ReplicaFailed(f"the upstream gave {len(matrix)} token vectors for one input")
    if len({matrix.shape[1] for matrix in matrices}) > 1:
        raise ReplicaFailed("the upstream's token vectors differ in width")
    return matrices


def label_scores(
    predictions: Sequence[Sequence[tuple[str, float]]], labels: Sequence[str], expected: int
) -> Vectors:
    """Sort the (label, score) entries of each input into the order of `labels`.

    Returns (expected, n_labels) float32.

    Raises: ReplicaFailed, unless every input has one finite score per label.
    """
    if len(predictions) != expected:
        raise ReplicaFailed(f"asked for the labels of {expected} inputs, got {len(predictions)}")
    rows = []
    for prediction in predictions:
        by_label = dict(prediction)
        if len(prediction) != len(labels) or by_label.keys() != set(labels):
            raise ReplicaFailed("the upstream's labels are not those of its model")
        rows.append([by_label[label] for label in labels])
    return score_matrix(rows, expected, len(labels))


def order_labels(
    predictions: Sequence[Sequence[tuple[str, float]]], checkpoint_labels: tuple[str, ...]
) -> tuple[str, ...]:
    """Return a classifier's labels in the checkpoint's order if it has the same ones, else sorted.

    Raises: ReplicaFailed.
    """
    labels = [label for label, _ in predictions[0]] if predictions else []
    if not labels or len(set(labels)) < len(labels):
        raise ReplicaFailed("the upstream's labels are not one each")
    return checkpoint_labels if set(checkpoint_labels) == set(labels) else tuple(sorted(labels))


def score_matrix(rows: Sequence[Sequence[float]], expected: int, labels: int) -> Vectors:
    """Convert scores to an array (expected, labels) float32.

    Raises: ReplicaFailed, unless there are exactly that many and all are finite.
    """
    if len(rows) != expected or any(len(row) != labels for row in rows):
        raise ReplicaFailed(f"asked for {labels} scores of {expected} inputs, got others")
    scores = float32(rows)
    if not np.isfinite(scores).all():
        raise ReplicaFailed("the upstream's scores contain numbers that are not finite")
    return scores


def truncated_inputs(
    work: ModelWork,
    tokens: int,
    max_input_tokens: int | None,
    *,
    prompt_known: bool = True,
    prompt_tokens: int = 0,
) -> tuple[int, ...] | None:
    """Return () if certainly no input was cut, otherwise None; for servers that do not report truncation.

    prompt_known: the inputs contain their prompt already, but for one of at most `prompt_tokens` that the
    server puts before each.
    """
    if work.truncate is Truncate.ERROR:
        return ()
    is_chat = work.conversation is not None
    if max_input_tokens is None or (not is_chat and work.clip_texts(max_input_tokens) != work):
        # The text was cut before it was sent, therefore a low token count proves nothing.
        return None
    # A conversation's length is only known to the server, which renders it.
    whole = 0 < tokens < max_input_tokens or (
        prompt_known and not is_chat and surely_fits(work.model_inputs, max_input_tokens - prompt_tokens)
    )
    return () if whole else None


def check_reported_cuts(work: ModelWork, response: UpstreamResponse) -> None:
    """Check that a server that reports cuts, as another gateway does, did not cut against the request.

    Its wire has no field to forbid cutting. Raises: InvalidWork; UnsupportedWork if it cut the wrong end.
    """
    cut = response.headers.get(CUTS_HEADER)
    if cut is None or work.truncate is Truncate.RIGHT:
        return
    if work.truncate is Truncate.LEFT:
        raise UnsupportedWork("this upstream cut the right end of an input, and the left end was to be cut")
    index = re.match(r"\d{1,9}", cut)
    if index is not None and int(index[0]) >= len(work.inputs):
        raise ReplicaFailed("the upstream reports a cut of an input that it did not get")
    raise input_too_long(None, input_index=int(index[0]) if index else None)


def read_gauge(exposition: bytes, name: str) -> float | None:
    """Return the sum of a metric's samples in Prometheus' text format, or None if it is no valid number."""
    samples = [
        line.rsplit(b" ", 1)[-1]
        for line in exposition.splitlines()
        if line.startswith((f"{name} ".encode(), f"{name}{{".encode()))
    ]
    try:
        total = sum(map(float, samples))
    except ValueError:
        return None
    return total if samples and 0 <= total <= NUMBER_MAX else None


async def read_queue_depth(http: UpstreamClient, gauge: str, timeout_s: float) -> QueueDepth | None:
    """Read the number of waiting inputs from a gauge of GET /metrics. Raises: BackendError."""
    response = await http.get("/metrics", timeout_s)
    waiting = read_gauge(response.body, gauge) if response.status == 200 else None
    return None if waiting is None else QueueDepth(round(waiting))


async def score_by_query(work: Score, rerank: Callable[[Rerank], Awaitable[RerankReply]]) -> RerankReply:
    """Score pairs with one rerank per query, sequentially, for APIs that have no pairs.

    Raises: BackendError.
    """
    parts = work.by_query()
    replies = [await rerank(part) for _, part in parts]
    starts = accumulate((len(indices) for indices, _ in parts), initial=0)
    joined = RerankReply.join(replies, list(starts)[:-1])
    places = np.argsort([index for indices, _ in parts for index in indices])
    return joined.select(places.tolist())


async def run_some(
    function: Callable[[Item], Awaitable[Result]], items: Sequence[Item], most: int
) -> list[Result]:
    """Call a function with each item, at most so many at a time; the first error cancels the others."""
    free = asyncio.Semaphore(most)

    async def run(item: Item) -> Result:
        async with free:
            return await function(item)

    tasks = [asyncio.create_task(run(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
