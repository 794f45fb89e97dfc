"""Engine of this process whose vectors depend on the text, the options and the revision of its model."""

import numpy as np

from backends.contract import Capabilities, Embed, EmbedReply, Operation, Reply, Truncate, Vectors, Work
from backends.contract.errors import InvalidWork
from backends.contract.vectors import shape_vectors
from tests.fakes.tei import DIMENSIONS, vector_of

# Longer texts are cut, or refused.
LONGEST = 12


def tokens_of(text: str) -> int:
    """Return the tokens of a text, which is cut at the model's length."""
    return min(len(text), LONGEST) + 2


class FakeEngine:
    """Embedding model. texts: all texts that it has computed, reference texts included."""

    def __init__(self, revision: str = "1", request_inputs: int = 4) -> None:
        self.revision = revision
        self.texts: list[str] = []
        self.capabilities = Capabilities(
            "org/model",
            frozenset({Operation.EMBED}),
            request_inputs=request_inputs,
            dimensions=DIMENSIONS,
            dtype="float32",
            reports_input_tokens=True,
        )

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        """Return the capabilities, which do not include the revision."""
        return self.capabilities

    async def run(self, work: Work, timeout_s: float) -> Reply:  # noqa: ARG002
        """Return the vectors. Raises: InvalidWork."""
        assert isinstance(work, Embed)
        self._check(work)
        self.texts += work.inputs
        full = np.stack([self.vector(text, work) for text in work.inputs])
        vectors = shape_vectors(full, dimensions=work.dimensions, normalize=work.normalize)
        counts = tuple(tokens_of(text) for text in work.inputs)
        cut = tuple(index for index, text in enumerate(work.inputs) if len(text) > LONGEST)
        return EmbedReply(vectors, sum(counts), cut, counts)

    def vector(self, text: str, work: Embed) -> Vectors:
        """Return the full vector of a text, which is not of length 1."""
        read = text[-LONGEST:] if work.truncate is Truncate.LEFT else text[:LONGEST]
        length = np.float32(1 + len(read) % 3)
        return vector_of(f"{self.revision} {work.prompt_name} {read}") * length

    async def aclose(self) -> None:
        """Do nothing."""

    def _check(self, work: Embed) -> None:
        if work.dimensions is not None and work.dimensions > DIMENSIONS:
            raise InvalidWork(f"`dimensions` must be between 1 and {DIMENSIONS}, not {work.dimensions}")
        for index, text in enumerate(work.inputs):
            if work.truncate is Truncate.ERROR and len(text) > LONGEST:
                raise InvalidWork("the text is too long", input_index=index)
