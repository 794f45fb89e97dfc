"""The memory fit of a long run, and its mix of requests."""

from collections import Counter

import numpy as np
import pytest

from loadtest.endurance import RequestMix, fit

CALLS = [float(calls) for calls in range(10_000, 1_010_000, 10_000)]


@pytest.mark.parametrize("growth", [0.0, -3.0, 25.0])
def test_finds_growth_within_its_confidence_interval(growth: float) -> None:
    noise = np.random.default_rng(1).normal(0, 0.5, len(CALLS))

    line = fit(CALLS, [100 + growth * calls / 1e6 + error for calls, error in zip(CALLS, noise, strict=True)])

    assert abs(line.slope - growth) < 2 * line.margin
    assert line.margin < 1


def test_repeated_samples_widen_the_interval() -> None:
    """A hundred samples in ten runs of equal values carry the information of a few."""
    steps = np.repeat(np.random.default_rng(2).normal(0, 1, 10), 10)
    mixed = np.random.default_rng(3).permutation(steps)

    assert fit(CALLS, list(steps)).margin > 2 * fit(CALLS, list(mixed)).margin


def test_requests_are_of_all_kinds_and_never_repeat() -> None:
    mix = RequestMix(port=1, seed=1)
    requests = [mix.next() for _ in range(3000)]
    paths = Counter(request.split(b" ")[1] for request in requests)

    assert len(set(requests)) == len(requests)
    assert {b"/v1/embeddings", b"/embed", b"/rerank", b"/models/alias/embed"} < paths.keys()
    assert all(
        len(body) == int(head.rpartition(b"content-length: ")[2])
        for head, _, body in (request.partition(b"\r\n\r\n") for request in requests)
    )
