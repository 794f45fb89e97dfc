"""Loads are seeded: the same again each time, and every text only once."""

import itertools
import json
import statistics

import pytest

from loadtest import corpora, schedules
from loadtest.corpora import Calls


def test_texts_are_all_different_and_the_same_for_the_same_seed() -> None:
    first, again, other = (list(itertools.islice(corpora.texts("mixed", seed), 5000)) for seed in (1, 1, 2))

    assert len(set(first + other)) == 10_000
    assert first == again


def test_a_passage_is_longer_than_a_query_and_a_mixture_holds_both() -> None:
    queries, passages, mixed = (
        corpora.word_counts(kind, 4000, 3) for kind in ("queries", "passages", "mixed")
    )

    assert statistics.median(queries) == pytest.approx(6, abs=1)
    assert statistics.median(passages) == pytest.approx(90, rel=0.1)
    assert min(queries) >= 1
    assert max(passages) <= 380
    assert 0.15 < sum(count > 30 for count in mixed) / len(mixed) < 0.3


@pytest.mark.parametrize("inputs", [1, 32])
def test_a_call_is_one_whole_request(inputs: int) -> None:
    calls = Calls(corpora.texts("queries", 4), inputs=inputs, form="float", model="m")

    call = calls.next(corpora.head_of("127.0.0.1:1", {"authorization": "Bearer k"}))

    head, _, body = call.request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1:1\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body) == {"input": list(call.inputs), "model": "m", "encoding_format": "float"}
    assert len(call.inputs) == inputs


def test_constant_arrivals_are_evenly_apart() -> None:
    assert schedules.schedule("constant", 4, 1.0, seed=1) == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_and_gaps_as_spread_as_their_mean() -> None:
    moments = schedules.schedule("poisson", 500, 20, seed=5)
    gaps = [after - before for before, after in itertools.pairwise(moments)]

    assert moments == sorted(moments)
    assert moments == schedules.poisson(500, 20, seed=5)
    assert 0 < moments[0] < moments[-1] < 20
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
