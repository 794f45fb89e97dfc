"""Record of a call's attempts, and the words of an upstream without inputs."""

import pytest

from backends.contract import Embed, Rerank
from backends.contract.errors import ReplicaFailed
from gateway.telemetry.timeline import REPLICAS_MAX, AttemptRecord, hide_inputs, without_quotations

SECRET = "the quick brown fox of tenant acme jumps over the lazy dog"


def test_record_has_each_replica_once_and_the_last_answer_that_was_no_success() -> None:
    record = AttemptRecord()
    for replica in ("a", "b", "a"):
        record.add(replica)
    record.add_failure(ReplicaFailed("no").with_facts(detail="CUDA error", upstream_status="500"))
    record.add_failure(ReplicaFailed("without an answer"))

    assert (3, ("a", "b")) == (record.attempts, record.replicas)
    assert ("500", "CUDA error") == (record.upstream_status, record.upstream_words)


def test_replicas_of_a_record_are_bounded() -> None:
    record = AttemptRecord()
    for number in range(100):
        record.add(str(number))

    assert (100, REPLICAS_MAX) == (record.attempts, len(record.replicas))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (f"cannot embed '{SECRET}' today", "cannot embed '[input]' today"),
        (f"near '{SECRET[5:48]}'", "near '[input]'"),
        (f"{SECRET} and {SECRET}", "[input] and [input]"),
        ("bad word 'secret1'", "bad word '[input]'"),
        ("CUDA error: device-side assert", "CUDA error: device-side assert"),
        ("", ""),
    ],
)
def test_words_do_not_quote_inputs(words: str, shown: str) -> None:
    assert shown == without_quotations(words, [SECRET, "secret1", "or"])


def test_queries_and_documents_are_hidden_in_an_error() -> None:
    error = ReplicaFailed("no").with_facts(detail=f"query {SECRET!r}, text {SECRET[::-1]!r}")
    hide_inputs(error, Rerank(SECRET, (SECRET[::-1],)))
    other = ReplicaFailed("no").with_facts(detail=f"text {SECRET!r}")
    hide_inputs(other, Embed((SECRET,)))

    assert "query '[input]', text '[input]'" == error.detail
    assert "text '[input]'" == other.detail
