"""Vectors of zeros, which only a static model gives, and only for a text without a word that it knows.

A server that gives them for other texts does not compute. They would match every text equally.
"""

import numpy as np

from backends.contract import Backend, Embed, Operation, Reply, Work
from backends.contract.errors import BackendError

# A text without a word of any vocabulary: a network reads its special tokens, and a static model nothing.
WORDLESS = "\ue000\ue001"
KNOWN_WORD = "ok"
TIMEOUT_S = 5.0


def zero_row(work: Work, reply: Reply) -> int | None:
    """Return the first input whose dense vector has only zeros, None if there is none."""
    vectors = reply.dense_vectors
    if vectors is None or work.operation is not Operation.EMBED:
        return None
    # Nearly always, and several times as fast.
    if vectors.size and vectors[:, 0].all():
        return None
    rows = np.flatnonzero(~vectors.any(axis=1))
    return reply.input_of(int(rows[0])) if len(rows) else None


async def gives_zeros(backend: Backend) -> bool | None:
    """Return whether a model gives zeros for a text without a known word, as static models do.

    None if it does not embed the texts that show it, or gives zeros for every text.
    """
    try:
        reply = await backend.run(Embed((KNOWN_WORD, WORDLESS)), TIMEOUT_S)
    except BackendError:
        return None
    vectors = reply.dense_vectors
    if vectors is None or len(vectors) != 2 or not vectors[0].any():
        return None
    return not vectors[1].any()
