"""Fixed texts whose vectors identify a vector space.

Rule: the texts never change. Different texts give different fingerprints and need a new EDITION. They are
short because some models accept few tokens. They differ in length and script because a wrong tokenizer,
pooling, prompt or normalization changes the vectors of some texts only.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract import Backend, Capabilities, Embed, EmbedReply, Rerank, Vectors
from backends.contract.errors import (
    BackendError,
    ConnectionLost,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
)

# Version of the set of texts. Vectors of different editions cannot be compared.
EDITION = "1"
REFERENCE_TEXTS = (
    "ok",
    "The quick brown fox jumps over the lazy dog near the river.",
    "Où est l'été? Die Größe der Straße, señor: 12,5 %!",
    "向量数据库按语义相似度检索文档，而不是按关键词。日本語の文もあります。",
    "Быстрая лиса прыгает через ленивую собаку. مرحبا بالعالم",
    "def add(a: int, b: int) -> int: return a + b # O(1)",
)
# A question, its answer, and texts that have nothing to do with it: a reranker puts the answer first.
SCORED = Rerank(
    "how many people live in Berlin?",
    (
        "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
        "New York City is famous for the Metropolitan Museum of Art.",
        "Stir the soup for ten minutes, then add salt.",
        "x",
    ),
)
# Inputs of one request if neither replica nor operator sets a bound; some servers accept few.
REQUEST_INPUTS = 32
# Pause before a busy replica is asked for the same text again; it doubles up to the second.
BUSY_PAUSE_MIN_S = 0.05
BUSY_PAUSE_MAX_S = 1.0


async def embed_in_batches(
    backend: Backend, texts: Sequence[str], request_inputs: int | None, timeout_s: float
) -> EmbedReply:
    """Embed texts with one replica, in requests of at most request_inputs; timeout_s applies to each request.

    A batch for which the replica has no room is sent text by text. Raises: BackendError.
    """
    replies = []
    for batch in _batches(texts, request_inputs or REQUEST_INPUTS):
        try:
            replies.append(await _embed(backend, batch, timeout_s))
        except ReplicaOverloaded:
            # It is alive, and busy with the work of others.
            replies += [await _embed_when_free(backend, text, timeout_s) for text in batch]
    if len({reply.vectors.shape[1] for reply in replies}) > 1:
        raise ReplicaFailed("its vectors differ in length")
    vectors = np.vstack([reply.vectors for reply in replies])
    return EmbedReply(vectors, sum(reply.tokens for reply in replies), None)


async def embed_reference_texts(
    backend: Backend, request_inputs: int | None, timeout_s: float
) -> tuple[EmbedReply, BackendError | None]:
    """Embed the reference texts; a text that fails while others do not has a row of NaN.

    Returns the reply and the error of a text that failed, if one did. Raises: BackendError, if all fail.
    """
    try:
        return await embed_in_batches(backend, REFERENCE_TEXTS, request_inputs, timeout_s), None
    except (ReplicaFailed, ConnectionLost, InvalidWork) as error:
        failure: BackendError = error
    replies: list[EmbedReply | None] = []
    for text in REFERENCE_TEXTS:
        try:
            replies.append(await embed_in_batches(backend, (text,), request_inputs, timeout_s))
        except (ReplicaFailed, ConnectionLost, InvalidWork) as error:
            failure = error
            replies.append(None)
    found = [reply for reply in replies if reply is not None]
    if not found:
        raise failure
    if len({reply.vectors.shape[1] for reply in found}) > 1:
        raise ReplicaFailed("its vectors differ in length")
    unknown = np.full_like(found[0].vectors, np.nan)
    vectors = np.vstack([unknown if reply is None else reply.vectors for reply in replies])
    return EmbedReply(vectors, sum(reply.tokens for reply in found), None), failure


async def _embed(backend: Backend, batch: tuple[str, ...], timeout_s: float) -> EmbedReply:
    reply = await backend.run(Embed(batch), timeout_s)
    if not isinstance(reply, EmbedReply) or len(reply.vectors) != len(batch):
        raise ReplicaFailed("the answer is not one vector for each text")
    return reply


async def _embed_when_free(backend: Backend, text: str, timeout_s: float) -> EmbedReply:
    """Embed one text, as often as the replica has no room for it within timeout_s.

    Raises: BackendError.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, BUSY_PAUSE_MIN_S
    while True:
        try:
            return await _embed(backend, (text,), timeout_s)
        except ReplicaOverloaded:
            if time.monotonic() + pause_s > deadline_s:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, BUSY_PAUSE_MAX_S)


def max_inputs_per_request(capabilities: Capabilities, configured: int | None) -> int | None:
    """Return the lowest of the replica's and the operator's bounds on inputs per request, or None."""
    bounds = (capabilities.request_inputs, capabilities.concurrent_inputs, configured)
    return min(filter(None, bounds), default=None)


def _batches(texts: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(texts), size):
        yield tuple(texts[start : start + size])


def min_cosine(first: Vectors, second: Vectors) -> float:
    """Return the lowest cosine between corresponding rows of two (n, dim) arrays, or 0 if shapes differ.

    Two zero rows have cosine 1; a zero row and a nonzero row have cosine 0. Rows that are not known, which
    contain NaN, are not compared; without any other the cosine is 0.
    """
    if first.shape != second.shape:
        return 0.0
    known = ~(np.isnan(first).any(axis=1) | np.isnan(second).any(axis=1))
    if not known.all():
        if not known.any():
            return 0.0
        first, second = first[known], second[known]
    return float(row_cosines(first, second).min(initial=1.0))


def row_cosines(first: Vectors, second: Vectors) -> Vectors:
    """Return the cosine of each row of first with the same row of second, both (n, dim), as (n,) float32."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    products = lengths[0] * lengths[1]
    cosines = (a * b).sum(axis=1) / np.where(products > 0, products, 1.0)
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    clipped: Vectors = np.clip(np.where(both_zero, 1.0, cosines), -1.0, 1.0).astype(np.float32)
    return clipped


def reference_digest(vectors: Vectors) -> str:
    """Return 16 hex digits that identify the reference texts' vectors (n, dim) and tolerate rounding errors.

    The digest covers, for each pair of neighboring reference texts, the component with the largest difference
    and the sign of that difference. Rounding changes neither unless two components are almost equal, and
    another model changes most of them. Differences are used because many models have one component that is
    the largest in every text.
    """
    vectors = np.nan_to_num(vectors)
    steps = vectors - np.roll(vectors, 1, axis=0)
    rows = np.arange(len(steps))
    largest = np.abs(steps).argmax(axis=1)
    signs = steps[rows, largest] < 0
    components = np.stack([largest, signs], axis=1).astype("<i4").tobytes()
    shape = f"{EDITION}:{vectors.shape[1]}:".encode()
    return hashlib.sha256(shape + components).hexdigest()[:16]
