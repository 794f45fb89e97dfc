"""A few fixed texts whose vectors tell one vector space from another. Pure.

Rule: the texts never change; others would make other fingerprints, and need another EDITION. They are short,
since some models take little, and differ in length and script, since a wrong tokenizer, pooling, prompt or
normalization shows in some texts and not in others.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract import Backend, Capabilities, Embed, EmbedReply, Vectors
from backends.errors import ReplicaFailed

# Which set of texts it is: vectors of different ones cannot be compared.
EDITION = "1"
CANARIES = (
    "ok",
    "The quick brown fox jumps over the lazy dog near the river.",
    "Où est l'été? Die Größe der Straße, señor: 12,5 %!",
    "向量数据库按语义相似度检索文档，而不是按关键词。日本語の文もあります。",
    "Быстрая лиса прыгает через ленивую собаку. مرحبا بالعالم",
    "def add(a: int, b: int) -> int: return a + b # O(1)",
)
# What one request holds where nobody says more: some servers take few.
REQUEST_INPUTS = 32


async def embed_in_batches(
    backend: Backend, texts: Sequence[str], batch_inputs: int | None, timeout_s: float
) -> EmbedReply:
    """Texts as one replica embeds them, in as many requests as it needs; timeout_s is for each.

    Raises: BackendError.
    """
    replies = []
    for piece in _pieces(texts, batch_inputs or REQUEST_INPUTS):
        reply = await backend.run(Embed(piece), timeout_s)
        if not isinstance(reply, EmbedReply) or len(reply.vectors) != len(piece):
            raise ReplicaFailed("the answer is not one vector for each text")
        replies.append(reply)
    if len({reply.vectors.shape[1] for reply in replies}) > 1:
        raise ReplicaFailed("its vectors differ in length")
    return EmbedReply(np.vstack([one.vectors for one in replies]), sum(one.tokens for one in replies), None)


def max_inputs_per_request(told: Capabilities, configured: int | None) -> int | None:
    """The most that one request may hold, as the replica says and as its operator does."""
    return min(filter(None, (told.batch_inputs, configured)), default=None)


def _pieces(texts: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(texts), most):
        yield tuple(texts[start : start + most])


def min_cosine(one: Vectors, other: Vectors) -> float:
    """The least of the cosines of two sets of vectors (n, dim), row by row; 0 where their shapes differ.

    A row of zeros is like another row of zeros, and like nothing else.
    """
    if one.shape != other.shape:
        return 0.0
    return float(row_cosines(one, other).min(initial=1.0))


def row_cosines(one: Vectors, other: Vectors) -> Vectors:
    """The cosine of each row of one with that row of other, both (n, dim): (n,) float32."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    products = lengths[0] * lengths[1]
    cosines = (a * b).sum(axis=1) / np.where(products > 0, products, 1.0)
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    told: Vectors = np.clip(np.where(both_zero, 1.0, cosines), -1.0, 1.0).astype(np.float32)
    return told


def canary_digest(vectors: Vectors) -> str:
    """16 hex digits for the canaries' vectors (n, dim), the same for vectors that differ by rounding only.

    They name, for each two neighboring canaries, the component in which these differ most, and its sign:
    rounding moves neither, unless two components are almost equal; another model moves most of them.
    Differences, because many models have a component that is the largest in every text.
    """
    steps = vectors - np.roll(vectors, 1, axis=0)
    rows = np.arange(len(steps))
    largest = np.abs(steps).argmax(axis=1)
    signs = steps[rows, largest] < 0
    told = np.stack([largest, signs], axis=1).astype("<i4").tobytes()
    shape = f"{EDITION}:{vectors.shape[1]}:".encode()
    return hashlib.sha256(shape + told).hexdigest()[:16]
