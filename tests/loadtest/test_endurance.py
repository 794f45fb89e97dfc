"""What a run over many calls tells of memory, and that its requests are those it means to send."""

from collections import Counter

import numpy as np
import pytest

from loadtest.endurance import Asking, fit

CALLS = [float(one) for one in range(10_000, 1_010_000, 10_000)]


@pytest.mark.parametrize("growth", [0.0, -3.0, 25.0])
def test_a_growth_is_found_within_its_confidence(growth: float) -> None:
    noise = np.random.default_rng(1).normal(0, 0.5, len(CALLS))

    told = fit(CALLS, [100 + growth * one / 1e6 + by for one, by in zip(CALLS, noise, strict=True)])

    assert abs(told.slope - growth) < 2 * told.within
    assert told.within < 1


def test_steps_that_stay_are_less_sure_than_noise() -> None:
    """Each sample repeats the one before: a hundred of them say as much as a few."""
    steps = np.repeat(np.random.default_rng(2).normal(0, 1, 10), 10)
    mixed = np.random.default_rng(3).permutation(steps)

    assert fit(CALLS, list(steps)).within > 2 * fit(CALLS, list(mixed)).within


def test_requests_are_of_all_kinds_and_none_is_sent_twice() -> None:
    asking = Asking(port=1, seed=1)
    requests = [asking.next() for _ in range(3000)]
    paths = Counter(one.split(b" ")[1] for one in requests)

    assert len(set(requests)) == len(requests)
    assert {b"/v1/embeddings", b"/embed", b"/rerank", b"/models/alias/embed"} < paths.keys()
    assert all(
        len(body) == int(head.rpartition(b"content-length: ")[2])
        for head, _, body in (one.partition(b"\r\n\r\n") for one in requests)
    )
