"""Whether an answer is an answer to the work, and what it leaves to be done; the same for every wire. Pure.

Rule: what cannot be true is Failed, never a vector.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from backends.contract import Embed, TermWeights, Truncate, Vectors
from backends.errors import InvalidWork, ReplicaFailed
from backends.texts import ModelWork, clip_texts, model_inputs_of, surely_fits
from backends.vectors import shape_vectors

# No vocabulary is larger; ids travel as int32.
TERMS_MAX = 2**31


@contextmanager
def translate_decode_errors() -> Iterator[None]:
    """Turn what goes wrong in reading a body into Failed."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # ValueError: base64 that is none, rows of unequal length, a length that is no multiple of 4.
        raise ReplicaFailed("the upstream's answer could not be read") from error


def float32(numbers: Sequence[Sequence[float]] | Sequence[float]) -> Vectors:
    """What does not fit becomes infinite, which is refused after; numpy need not warn of it."""
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float32)


def check_vectors(vectors: Vectors, expected: int) -> None:
    """Raises: ReplicaFailed unless there is one finite row for each input."""
    if vectors.ndim != 2 or vectors.shape[0] != expected or vectors.shape[1] == 0:
        raise ReplicaFailed(f"asked for {expected} vectors, got an array of shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise ReplicaFailed("the upstream's vectors hold numbers that are not finite")


def check_tokens(tokens: int, inputs: int, max_input_tokens: int | None) -> None:
    """Tenants pay by this number: one that cannot be true is not believed.

    Raises: ReplicaFailed.
    """
    if tokens < 0 or (max_input_tokens is not None and tokens > inputs * max_input_tokens):
        raise ReplicaFailed(f"the upstream counted {tokens} tokens for {inputs} inputs")


def check_dimensions(work: Embed, width: int | None) -> None:
    """Raises: InvalidWork where more is asked for than the model's vectors have."""
    if work.dimensions is not None and width is not None and work.dimensions > width:
        raise InvalidWork(f"`dimensions` is {work.dimensions}, the model's vectors have {width}")


def fit_vectors(vectors: Vectors, work: Embed) -> Vectors:
    """Cut and normalized as asked, whatever the server did of it.

    Raises: ReplicaFailed where a row is shorter than what was asked for.
    """
    width = vectors.shape[1]
    if work.dimensions is not None and width < work.dimensions:
        raise ReplicaFailed(f"asked for {work.dimensions} dimensions, got {width}")
    return shape_vectors(vectors, dimensions=work.dimensions, normalize=work.normalize)


def order_scores(ranks: Sequence[tuple[int, float]], expected: int) -> Vectors:
    """(index, score) in any order → (expected,) float32 in document order.

    Raises: ReplicaFailed unless there is one finite score for each document.
    """
    ordered = sorted(ranks)
    if [index for index, _ in ordered] != list(range(expected)):
        raise ReplicaFailed(f"asked for {expected} scores, got other indices")
    scores = float32([score for _, score in ordered])
    if not np.isfinite(scores).all():
        raise ReplicaFailed("the upstream's scores hold numbers that are not finite")
    return scores


def term_weights(entries: Iterable[tuple[int, float]]) -> TermWeights:
    """The term weights of one input, in any order; zeros are left out.

    Raises: ReplicaFailed where a term comes twice, or a weight is not finite.
    """
    ordered = sorted((term, weight) for term, weight in entries if weight != 0)
    terms = [term for term, _ in ordered]
    if len(set(terms)) < len(terms) or (terms and not 0 <= terms[0] <= terms[-1] < TERMS_MAX):
        raise ReplicaFailed("the upstream's terms are not ids of a vocabulary, each once")
    weights = float32([weight for _, weight in ordered])
    if not np.isfinite(weights).all():
        raise ReplicaFailed("the upstream's weights hold numbers that are not finite")
    return TermWeights(np.array(terms, dtype=np.int32), weights)


def token_matrices(
    lists: Sequence[Sequence[Sequence[float]]], expected: int, max_input_tokens: int | None
) -> tuple[Vectors, ...]:
    """A row for each token of each input: (its tokens, dim) float32.

    Raises: ReplicaFailed where it is not an answer to so many inputs of at most so many tokens.
    """
    if len(lists) != expected:
        raise ReplicaFailed(f"asked for the token vectors of {expected} inputs, got {len(lists)}")
    matrices = tuple(float32(one) for one in lists)
    for one in matrices:
        check_vectors(one, len(one))
        if not 0 < len(one) <= (max_input_tokens or len(one)):
            raise ReplicaFailed(f"the upstream gave {len(one)} token vectors for one input")
    if len({one.shape[1] for one in matrices}) > 1:
        raise ReplicaFailed("the upstream's token vectors differ in width")
    return matrices


def label_scores(
    predictions: Sequence[Sequence[tuple[str, float]]], labels: Sequence[str], expected: int
) -> Vectors:
    """(label, score) in any order → (expected, n_labels) float32 in the order of `labels`.

    Raises: ReplicaFailed unless every input has one finite score for each label.
    """
    if len(predictions) != expected:
        raise ReplicaFailed(f"asked for the labels of {expected} inputs, got {len(predictions)}")
    rows = []
    for one in predictions:
        by_label = dict(one)
        if len(one) != len(labels) or by_label.keys() != set(labels):
            raise ReplicaFailed("the upstream's labels are not those of its model")
        rows.append([by_label[label] for label in labels])
    return checked_scores(rows, expected, len(labels))


def checked_scores(rows: Sequence[Sequence[float]], expected: int, labels: int) -> Vectors:
    """(expected, labels) float32.

    Raises: ReplicaFailed unless there are so many, all finite.
    """
    if len(rows) != expected or any(len(row) != labels for row in rows):
        raise ReplicaFailed(f"asked for {labels} scores of {expected} inputs, got others")
    scores = float32(rows)
    if not np.isfinite(scores).all():
        raise ReplicaFailed("the upstream's scores hold numbers that are not finite")
    return scores


def truncated_inputs(
    work: ModelWork, tokens: int, max_input_tokens: int | None, *, prompt_known: bool = True
) -> tuple[int, ...] | None:
    """None, unless it is sure that nothing was cut; for servers that cut and do not say.

    prompt_known: whether what is put before the inputs is in them already.
    """
    if work.truncate is Truncate.ERROR:
        return ()
    if max_input_tokens is None or clip_texts(work, max_input_tokens) != work:
        # Cut before it was sent, so that a small count of tokens proves nothing.
        return None
    whole = 0 < tokens < max_input_tokens or (
        prompt_known and surely_fits(model_inputs_of(work), max_input_tokens)
    )
    return () if whole else None


def read_gauge(exposition: bytes, name: str) -> float | None:
    """The sum of a metric's samples in Prometheus' text format; None where there is none to be read."""
    samples = [
        line.rsplit(b" ", 1)[-1]
        for line in exposition.splitlines()
        if line.startswith((f"{name} ".encode(), f"{name}{{".encode()))
    ]
    try:
        total = sum(map(float, samples))
    except ValueError:
        return None
    return total if samples and math.isfinite(total) else None
