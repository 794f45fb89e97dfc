"""Which sequences share a forward pass. Pure: lengths and a token budget in, batches out.

Knows nothing of tensors, texts or callers.
"""

from collections.abc import Sequence


def plan(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Group indices so that each batch, padded to its longest member, stays within the budget.

    Longest first, so that neighbours are alike and little is padded. A sequence that is longer than
    the budget travels alone. Every index appears exactly once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first of a batch is its longest: everything after it is padded to that.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
