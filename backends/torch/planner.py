"""Which sequences share a forward pass. Pure: lengths and a token budget in, batches out.

Knows nothing of tensors, texts or callers.
"""

from collections.abc import Sequence

# A packed batch is a rectangle at its edges. Where one long sequence would make that mostly empty, the short
# ones travel by themselves.
RECTANGLE_BUDGETS = 2


def plan(lengths: Sequence[int], budget_tokens: int, *, packed: bool) -> list[list[int]]:
    """Group indices so that each batch stays within the budget: of its own tokens where it is packed, else
    padded to its longest member.

    Longest first, so that neighbours are alike: equal lengths are computed together, and little is padded.
    A sequence that is longer than the budget travels alone. Every index appears exactly once.
    """
    rectangle = budget_tokens * RECTANGLE_BUDGETS if packed else budget_tokens
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[index]
        # The first of a batch is its longest: everything after it is padded to that.
        if batches and (
            tokens <= budget_tokens and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= rectangle
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches
