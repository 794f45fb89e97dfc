"""Loads are seeded: the same in each run, and every text occurs once."""

import itertools
import json
import statistics

import pytest

from loadtest import corpora
from loadtest.corpora import CallFactory, CallShape
from loadtest.generator import schedule


def test_texts_differ_and_repeat_with_the_seed() -> None:
    first, again, other = (list(itertools.islice(corpora.texts("mixed", seed), 5000)) for seed in (1, 1, 2))

    assert len(set(first + other)) == 10_000
    assert first == again


def test_passages_are_longer_than_queries_and_a_mixture_holds_both() -> None:
    queries, passages, mixed = (
        corpora.word_counts(kind, 4000, 3) for kind in ("queries", "passages", "mixed")
    )

    assert statistics.median(queries) == pytest.approx(6, abs=1)
    assert statistics.median(passages) == pytest.approx(90, rel=0.1)
    assert min(queries) >= 1
    assert max(passages) <= 380
    assert 0.15 < sum(count > 30 for count in mixed) / len(mixed) < 0.3


@pytest.mark.parametrize("inputs", [1, 32])
def test_a_call_is_one_complete_request(inputs: int) -> None:
    shape = CallShape(inputs, "float", model="m")
    calls = CallFactory(corpora.texts("queries", 4), shape)

    call = calls.next(corpora.request_head("127.0.0.1:1", {"authorization": "Bearer k"}))

    head, _, body = call.request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1:1\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body) == {"input": list(call.inputs), "model": "m", "encoding_format": "float"}
    assert len(call.inputs) == inputs


def test_rerank_calls_escape_their_texts() -> None:
    shape = CallShape(model="a", query='what "is" it?')
    calls = CallFactory(iter(['one "two"\\', "three"]), shape)

    bodies = [json.loads(calls.next(b"%d\n").request.partition(b"\n")[2]) for _ in range(2)]

    assert bodies == [
        {"documents": ['one "two"\\'], "model": "a", "query": 'what "is" it?'},
        {"documents": ["three"], "model": "a", "query": 'what "is" it?'},
    ]


def test_even_arrivals_have_equal_gaps() -> None:
    assert schedule("even", 4, 1.0, seed=1) == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    arrivals_s = schedule("poisson", 500, 20, seed=5)
    gaps = [after - before for before, after in itertools.pairwise(arrivals_s)]

    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s == schedule("poisson", 500, 20, seed=5)
    assert 0 < arrivals_s[0] < arrivals_s[-1] < 20
    assert len(arrivals_s) == pytest.approx(10_000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
