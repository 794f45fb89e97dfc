"""`gateway status` on a small terminal, from a snapshot."""

import io

import msgspec
import pytest
from rich.console import Console
from rich.live import Live

from gateway.cli.status import StatusDisplay, view
from gateway.telemetry.snapshot import (
    CallsStatus,
    CheckpointStatus,
    Durations,
    InstanceStatus,
    LaneStatus,
    LossStatus,
    ModelStatus,
    ModelUpstreamStatus,
    ReplicaStatus,
    Snapshot,
    StoreStatus,
    TenantStatus,
)

REASON = "no connection to the replica: connection refused"
UPSTREAMS = ("minilm", "bge-m3", "reranker")


def replica(upstream: str, number: int, state: str) -> ReplicaStatus:
    name = f"http://{upstream}-{number}:8080"
    reason = REASON if state == "down" else "it answered a probe"
    return ReplicaStatus(upstream, name, state, reason, 40.0, 1, 8, 0.0123, 1234, 5)


def display() -> StatusDisplay:
    """Return the display of three upstreams with two replicas each, one of which is down."""
    shown = StatusDisplay("http://127.0.0.1:8080")
    states = {"reranker": ["down", "up"]}
    names = ("sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-m3", "BAAI/bge-reranker-v2-m3")
    shown.update(
        Snapshot(
            version="0.1.0",
            at_s=100.0,
            uptime_s=3600.0,
            worker=0,
            workers=1,
            calls_in_flight=3,
            in_flight_bytes=100,
            store=StoreStatus("redis", away=True),
            calls=CallsStatus({"ok": 5}, Durations()),
            lanes=tuple(LaneStatus(name, 0, 0, 0.0, 1, 8, Durations()) for name in UPSTREAMS),
            replicas=tuple(
                replica(name, number, state)
                for name in UPSTREAMS
                for number, state in enumerate(states.get(name, ["up", "up"]))
            ),
            models=tuple(
                ModelStatus(name, upstream, "tei", "ready", ("embed", "encode", "tokenize"), "ab" * 8, 384)
                for name, upstream in zip(names, UPSTREAMS, strict=True)
            ),
            tenants=(TenantStatus("acme", 5, 10, 1000, 0),),
            changes=(),
            instances=(
                InstanceStatus("a", "engine", "org/a", "a", "running", 4711, 2, "cpu", None),
                InstanceStatus("b", "tei", "org/b", "b", "failed", None, 0, None, "port 8080 is in use"),
            ),
            registry=(
                CheckpointStatus("org/a", "verified", 88_000_000, None, None, None, ("a",), None),
                CheckpointStatus("org/c", "downloading", 0, 400_000_000, 1_600_000_000, 2e7, (), None),
                CheckpointStatus("org/d", "failed", 0, None, None, None, (), "the Hub has no org/d"),
            ),
        )
    )
    return shown


def snapshot_of(models: tuple[ModelStatus, ...] = (), replicas: tuple[ReplicaStatus, ...] = ()) -> Snapshot:
    """Return a status with these models and replicas only."""
    calls, store = CallsStatus({}, Durations()), StoreStatus("memory", away=False)
    return Snapshot("0.1.0", 100.0, 60.0, 0, 1, 0, 0, store, calls, (), replicas, models, (), ())


def lines_of(width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(display())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_shows_instances_and_why_one_failed() -> None:
    lines = lines_of(160)
    of_problem = lines.index("problems")
    (row,) = [line for line in lines if line.startswith("a ")]

    assert ["a", "engine", "org/a", "a", "running", "4711", "2", "cpu"] == row.split()
    assert "port 8080 is in use" in " ".join(lines[of_problem : lines.index("lanes")])


def test_shows_models_on_the_host_and_why_one_failed() -> None:
    lines = lines_of(160)
    rows = [line.split() for line in lines[lines.index("models on this host") :]]

    assert [
        ["org/d", "failed", "–", "0", "MB", "–"],
        ["org/c", "downloading", "25", "%", "of", "1.6", "GB,", "20", "MB/s", "0", "MB", "–"],
    ] == rows[2:4]
    assert ["org/a", "verified", "–", "88", "MB", "a"] == rows[4]
    assert "the Hub has no org/d" in " ".join(lines[lines.index("problems") : lines.index("lanes")])


def test_shows_what_is_wrong_first() -> None:
    lines = lines_of(80)
    (store,) = [number for number, line in enumerate(lines) if "quotas in redis  " in line]
    down = [number for number, line in enumerate(lines) if "http://reranker-0:8080" in line]
    lanes = lines.index("lanes")

    assert store < lanes
    assert down[0] < lanes
    assert "for 60 s" in " ".join(lines[:lanes])


def test_shows_a_model_whose_canary_is_left_alone() -> None:
    upstreams = (
        ModelUpstreamStatus("a", "member", "serving", "", "unavailable", 7, 1, 0),
        ModelUpstreamStatus("b", "canary", "serving", "", "ready", 5, share=0.5),
    )
    model = ModelStatus("m", "a", "tei", "canary_only", ("embed",), "ab" * 8, 384, upstreams=upstreams)
    out = io.StringIO()
    found = snapshot_of(models=(model,))
    Console(file=out, width=160).print(view("", found, None, "", 160))
    lines = [line.split() for line in out.getvalue().splitlines()]

    assert ["m", "a,", "b", "(canary)", "canary_only"] in [line[:5] for line in lines]
    assert ["m", "a", "member", "serving", "unavailable", "1", "0", "7", "–"] in lines
    (problem,) = [line for line in lines if line[:2] == ["model", "m"]]
    assert "model m canary_only upstream a has no replica in use" in " ".join(problem)


def test_a_replica_on_probation_is_no_problem() -> None:
    replicas = (replica("a", 0, "probation"), replica("a", 1, "down"))
    out = io.StringIO()
    Console(file=out, width=160).print(view("", snapshot_of(replicas=replicas), None, "", 160))
    problems, _, others = out.getvalue().partition("lanes")

    assert "http://a-1:8080" in problems
    assert "http://a-0:8080" not in problems
    assert "probation" in others


def test_breaks_no_name_at_80_columns() -> None:
    lines = lines_of(80)

    for names in (UPSTREAMS, ("sentence-transformers/all-MiniLM-L6-v2", "http://bge-m3-1:8080")):
        for name in names:
            assert any(name in line for line in lines), name
    for header in ("upstream  replica", "state", "attempt p50", "tokens/s"):
        assert any(header in " ".join(line.split(" ")) for line in lines), header


def test_shows_every_column_where_there_is_room() -> None:
    text = "\n".join(lines_of(160))

    for header in ("window", "attempts", "operations", "vector space", "refused/s"):
        assert header in text


@pytest.mark.parametrize("height", [24, 100])
def test_says_that_lines_are_hidden(height: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=height, force_terminal=True, color_system=None)
    with Live(display(), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()

    assert ("more lines: a taller terminal" in out.getvalue()) is (height == 24)


def test_shows_that_the_store_has_lost_keys_and_for_how_long_they_stay_valid() -> None:
    loss = LossStatus(since_s=40.0, until_s=3640.0, reason="their version is missing", keys=20, tenants=3)
    found = msgspec.structs.replace(snapshot_of(), store=StoreStatus("redis", away=False, loss=loss))
    out = io.StringIO()
    Console(file=out, width=200).print(view("", found, None, "", 200))
    lines = out.getvalue().splitlines()
    shown = " ".join(" ".join(lines[lines.index("problems") : lines.index("lanes")]).split())

    assert "tenants in redis lost 3 tenants and 20 keys (their version is missing)" in shown
    assert "refused in 59 min" in shown


def test_shows_why_the_store_is_away_and_numbers_in_words() -> None:
    loss = LossStatus(since_s=40.0, until_s=3640.0, reason="their version is missing", keys=3, tenants=1)
    store = StoreStatus("redis", away=True, loss=loss, reason="it refuses the user name or password")
    found = msgspec.structs.replace(snapshot_of(), store=store)
    out = io.StringIO()
    Console(file=out, width=200).print(view("", found, None, "", 200))
    shown = " ".join(out.getvalue().split())

    assert "it refuses the user name or password: requests are counted without the store" in shown
    assert "lost 1 tenant and 3 keys (" in shown
