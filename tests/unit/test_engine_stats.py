"""Statistics of an engine, and their exposition as TEI's metrics."""

import pytest
from prometheus_client import Metric

from backends.contract import Embed, Rerank, Tokenize, Work
from backends.torch.stats import BOUNDS, Recorder, Stopwatch, joined_stats
from backends.tracing import is_sampled
from gateway.telemetry.upstream_metrics import families


def watched(*lengths: int) -> Stopwatch:
    """Return the stopwatch of work that took 1 s to tokenize, 2 s to wait and 4 s to run."""
    watch = Stopwatch()
    start_s = watch._started_s
    watch.note(start_s + 1, start_s + 3, start_s + 7, list(lengths))
    return watch


def shown(recorder: Recorder, waiting: float = 0.0) -> dict[str, Metric]:
    stats = recorder.snapshot(queue_size=2)
    return {family.name: family for family in families({"up": stats}, {"up": waiting})}


def sample(family: Metric, name: str = "", **labels: str) -> float:
    values = [
        found.value
        for found in family.samples
        if found.name == (name or family.name)
        and {"upstream": "up", **labels}.items() <= found.labels.items()
    ]
    assert 1 == len(values), (family.name, name, labels)
    return values[0]


def test_counts_inputs_and_works_separately() -> None:
    recorder = Recorder()
    for work in (Embed(("a",)), Embed(("a", "b", "c")), Rerank("q", ("d", "e"))):
        recorder.began(work)
        recorder.finished(work, watched(*([3] * 3)))
    metrics = shown(recorder)

    assert (1, 2) == tuple(
        sample(metrics["te_request_success"], method=method) for method in ("single", "batch")
    )
    assert (4, 2) == (sample(metrics["te_embed_success"]), sample(metrics["te_predict_success"]))
    durations = metrics["te_request_duration"]
    assert 3 == sample(durations, "te_request_duration_count")
    assert 3 * 7 == pytest.approx(sample(durations, "te_request_duration_sum"))
    assert 4 == sample(metrics["te_embed_queue_duration"], "te_embed_queue_duration_count")
    assert 4 * 2 == pytest.approx(sample(metrics["te_embed_queue_duration"], "te_embed_queue_duration_sum"))


@pytest.mark.parametrize(
    ("kind", "err"),
    [
        ("invalid_input", "validation"),
        ("unsupported", "model_type"),
        ("overloaded", "overloaded"),
        ("timed_out", "dropped"),
        ("failed", "inference"),
    ],
)
def test_failures_have_the_names_of_tei(kind: str, err: str) -> None:
    recorder = Recorder()
    recorder.failed(kind)

    assert 1 == sample(shown(recorder)["te_request_failure"], err=err)


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    recorder = Recorder()
    for size in (1, 2, 3, 10**9):
        recorder.batch(size, 16)
    family = shown(recorder)["te_batch_next_size"]
    buckets = [found.value for found in family.samples if found.name.endswith("_bucket")]

    assert [1, 2, 3] == [sample(family, "te_batch_next_size_bucket", le=bound) for bound in ("1", "2", "4")]
    assert sorted(buckets) == buckets
    assert 4 == sample(family, "te_batch_next_size_bucket", le="+Inf")
    assert len(BOUNDS["te_batch_next_size"]) + 1 == len(buckets)


def test_queue_size_includes_inputs_in_the_lane() -> None:
    assert 2 + 40 == sample(shown(Recorder(), waiting=40)["te_queue_size"])


def test_tokenizing_counts_as_a_request_only() -> None:
    recorder, work = Recorder(), Tokenize(("a",))
    assert isinstance(work, Work)
    recorder.began(work)
    recorder.finished(work, Stopwatch())
    metrics = shown(recorder)

    assert 1 == sample(metrics["te_request_success"], method="single")
    assert 0 == sample(metrics["te_request_duration"], "te_request_duration_count")


def test_exposes_no_metrics_without_engines() -> None:
    assert [] == list(families({}, {}))


@pytest.mark.parametrize(
    ("flags", "recorded"), [("00", False), ("01", True), ("02", False), ("03", True), ("", False)]
)
def test_reads_the_sampled_flag_of_a_traceparent(flags: str, *, recorded: bool) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-{flags}".encode()

    assert recorded is is_sampled(parent)
    assert not is_sampled(b"")
    assert not is_sampled(b"-1")


def test_engines_of_one_upstream_are_counted_together() -> None:
    recorders = [Recorder(), Recorder()]
    for recorder, texts in zip(recorders, (("a",), ("b", "c")), strict=True):
        work = Embed(texts)
        recorder.began(work)
        recorder.finished(work, watched(*([3] * len(texts))))
    parts = [recorder.snapshot(queue_size=size) for recorder, size in zip(recorders, (2, 5), strict=True)]

    joined = joined_stats(parts)

    assert joined is not None
    metrics = {family.name: family for family in families({"up": joined}, {})}
    assert 7 == sample(metrics["te_queue_size"])
    assert 3 == sample(metrics["te_embed_success"])
    assert 2 == sample(metrics["te_request_duration"], "te_request_duration_count")
    # The parts keep their own counts.
    assert parts[0] == recorders[0].snapshot(queue_size=2)
    assert (parts[1], None) == (joined_stats(parts[1:]), joined_stats([]))
