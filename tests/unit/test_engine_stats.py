"""What an engine counts, and how it becomes TEI's metrics."""

import pytest
from prometheus_client import Metric

from backends.contract import Embed, Rerank, Tokenize, Work
from backends.torch.stats import BOUNDS, Recorder, Stopwatch
from backends.tracing import is_sampled
from gateway.telemetry.engine_metrics import families


def watched(*lengths: int) -> Stopwatch:
    """A piece of work that took 1 s to tokenize, 2 s to wait and 4 s to run."""
    watch = Stopwatch()
    start_s = watch._started_s
    watch.note(start_s + 1, start_s + 3, start_s + 7, list(lengths))
    return watch


def shown(recorder: Recorder, waiting: float = 0.0) -> dict[str, Metric]:
    stats = recorder.snapshot(queue_size=2)
    return {one.name: one for one in families({"up": stats}, {"up": waiting})}


def sample(family: Metric, name: str = "", **labels: str) -> float:
    found = [
        one.value
        for one in family.samples
        if one.name == (name or family.name) and {"upstream": "up", **labels}.items() <= one.labels.items()
    ]
    assert 1 == len(found), (family.name, name, labels)
    return found[0]


def test_inputs_and_pieces_of_work_are_counted_apart() -> None:
    recorder = Recorder()
    for work in (Embed(("a",)), Embed(("a", "b", "c")), Rerank("q", ("d", "e"))):
        recorder.began(work)
        recorder.finished(work, watched(*([3] * 3)))
    told = shown(recorder)

    assert (1, 2) == tuple(sample(told["te_request_success"], method=one) for one in ("single", "batch"))
    assert (4, 2) == (sample(told["te_embed_success"]), sample(told["te_predict_success"]))
    durations = told["te_request_duration"]
    assert 3 == sample(durations, "te_request_duration_count")
    assert 3 * 7 == pytest.approx(sample(durations, "te_request_duration_sum"))
    assert 4 == sample(told["te_embed_queue_duration"], "te_embed_queue_duration_count")
    assert 4 * 2 == pytest.approx(sample(told["te_embed_queue_duration"], "te_embed_queue_duration_sum"))


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
def test_failures_have_teis_names(kind: str, err: str) -> None:
    recorder = Recorder()
    recorder.failed(kind)

    assert 1 == sample(shown(recorder)["te_request_failure"], err=err)


def test_buckets_are_cumulative_and_hold_their_bound() -> None:
    recorder = Recorder()
    for size in (1, 2, 3, 10**9):
        recorder.batch(size, 16)
    told = shown(recorder)["te_batch_next_size"]
    buckets = [one.value for one in told.samples if one.name.endswith("_bucket")]

    assert [1, 2, 3] == [sample(told, "te_batch_next_size_bucket", le=one) for one in ("1", "2", "4")]
    assert sorted(buckets) == buckets
    assert 4 == sample(told, "te_batch_next_size_bucket", le="+Inf")
    assert len(BOUNDS["te_batch_next_size"]) + 1 == len(buckets)


def test_what_waits_in_the_lane_waits_for_the_engine() -> None:
    assert 2 + 40 == sample(shown(Recorder(), waiting=40)["te_queue_size"])


def test_tokenizing_is_a_request_and_nothing_else() -> None:
    recorder, work = Recorder(), Tokenize(("a",))
    assert isinstance(work, Work)
    recorder.began(work)
    recorder.finished(work, Stopwatch())
    told = shown(recorder)

    assert 1 == sample(told["te_request_success"], method="single")
    assert 0 == sample(told["te_request_duration"], "te_request_duration_count")


def test_without_engines_there_is_nothing() -> None:
    assert [] == list(families({}, {}))


@pytest.mark.parametrize(
    ("flags", "recorded"), [("00", False), ("01", True), ("02", False), ("03", True), ("", False)]
)
def test_the_flag_of_a_traceparent_is_read(flags: str, *, recorded: bool) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-{flags}".encode()

    assert recorded is is_sampled(parent)
    assert not is_sampled(b"")
    assert not is_sampled(b"-1")
