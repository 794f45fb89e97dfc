"""Grouping of sequences into forward passes. Pure: lengths and a token budget in, batches out.

Knows nothing of tensors, texts or callers.
"""

from collections.abc import Sequence

# A packed batch is still a rectangle at its edges. Where one long sequence would leave that mostly empty, the
# short ones get batches of their own.
RECTANGLE_BUDGETS = 2


def plan(lengths: Sequence[int], budget_tokens: int, *, packed: bool) -> list[list[int]]:
    """Group indices into batches within the budget.

    A packed batch counts its own tokens, any other those of its padding too. Longest first: sequences of
    similar length are computed together, with little padding. A sequence above the budget is a batch of its
    own. Every index appears exactly once.
    """
    rectangle = budget_tokens * RECTANGLE_BUDGETS if packed else budget_tokens
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[index]
        # The first sequence of a batch is its longest, and all others are padded to its length.
        if batches and (
            tokens <= budget_tokens and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= rectangle
        ):
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches
