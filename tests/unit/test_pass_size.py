"""Size of a forward pass on a processor, chosen by the time that passes take."""

from collections.abc import Callable

import pytest

from backends.torch.loaded_model import CPU_BATCH_TOKENS
from backends.torch.pass_size import PASS_S_MAX, PASS_TOKENS_MAX, best_size

FIXED_S = 0.005


def linear(token_us: float) -> Callable[[int], float]:
    """Return durations of passes: a fixed cost and a cost per token."""
    return lambda tokens: FIXED_S + tokens * token_us * 1e-6


def test_a_fast_network_gets_the_largest_pass() -> None:
    assert best_size(linear(20)) == PASS_TOKENS_MAX


def test_a_pass_stays_below_the_longest_wait() -> None:
    size = best_size(linear(60))
    assert CPU_BATCH_TOKENS < size < PASS_TOKENS_MAX
    assert linear(60)(size) <= PASS_S_MAX < linear(60)(size * 2)


def test_a_slow_network_is_measured_by_one_short_pass() -> None:
    measured: list[int] = []

    def seconds(tokens: int) -> float:
        measured.append(tokens)
        return linear(1000)(tokens)

    assert best_size(seconds) == CPU_BATCH_TOKENS
    assert len(measured) == 1
    assert measured[0] < CPU_BATCH_TOKENS


@pytest.mark.parametrize("full", [1024, 2048])
def test_larger_passes_that_are_slower_per_token_are_not_chosen(full: int) -> None:
    def seconds(tokens: int) -> float:
        # What no longer fits into a cache is read from memory.
        return linear(10)(tokens) + (0 if tokens <= full else tokens * 20e-6)

    assert best_size(seconds) == full
