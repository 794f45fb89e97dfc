"""One input on its way through the network: what goes in, and what comes out of it.

Knows nothing of torch.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from backends.contract import Output, TermWeights, Vectors

# What a reranker and a classifier are asked for: their logits, which travel as the dense row.
LOGITS = frozenset({Output.DENSE})


class Sequence(msgspec.Struct, frozen=True):
    """Token ids as the network takes them.

    skip: leading prompt tokens that pooling leaves out. seen: how many tokens, from the first, others
    attend to; the rest are a query's fillers. is_query: its role, where a model treats the two otherwise.
    """

    ids: list[int]
    type_ids: list[int]
    skip: int = 0
    seen: int | None = None
    is_query: bool = False

    @property
    def attended(self) -> int:
        """How many tokens others attend to."""
        return len(self.ids) if self.seen is None else self.seen


class Row(msgspec.Struct, frozen=True):
    """What one sequence became; None is what was not asked for.

    dense: (dim,) float32, the pooled vector, or (labels,), the logits. multivector, token_vectors:
    (tokens, dim) float32.
    """

    dense: Vectors | None = None
    terms: TermWeights | None = None
    multivector: Vectors | None = None
    token_vectors: Vectors | None = None

    def is_finite(self) -> bool:
        """Whether every number in it is one."""
        return all(bool(np.isfinite(one).all()) for one in self._arrays())

    def _arrays(self) -> Iterator[Vectors]:
        for one in (self.dense, self.multivector, self.token_vectors):
            if one is not None:
                yield one
        if self.terms is not None:
            yield self.terms.values
