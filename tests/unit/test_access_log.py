"""Log lines of calls and of state changes."""

import logging
from typing import Literal

import pytest

from gateway.events import CallFinished, ConnectionFaulted, ReplicaChanged, SpaceChecked, SpaceOutcome
from gateway.telemetry.access_log import EventLine, log_event

CALL = CallFinished("id-1", "POST", "/embed", 200, "ok", 0.01234, "acme", "bge", 3, 57)


def test_logs_one_line_per_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    log_event(CALL)
    log_event(CallFinished("id-2", "GET", "/v1/models", 401, "unauthenticated", 0.0001, address="10.0.0.7"))
    log_event(CallFinished("id-3", "POST", "other", 404, "not_found", 0.0, path="/v1/chat", key_id="acme-0"))

    assert [
        "POST /embed 200  12.3 ms  tenant=acme  model=bge  inputs=3  tokens=57  id=id-1",
        (
            "GET /v1/models 401  unauthenticated  0.1 ms"
            "  tenant=-  model=-  inputs=0  tokens=0  from=10.0.0.7  id=id-2"
        ),
        (
            "POST other 404  not_found  0.0 ms  path=/v1/chat"
            "  tenant=-  key=acme-0  model=-  inputs=0  tokens=0  id=id-3"
        ),
    ] == [record.getMessage() for record in caplog.records]
    assert {("gateway", logging.INFO)} == {(record.name, record.levelno) for record in caplog.records}


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            CallFinished("id", "GET", "/embed", 200, "ok", 0.0, address="a  tenant=x\x1b" + "b" * 100),
            "  from=a%20%20tenant%3Dx%1B" + "b" * 52 + "  id=id",
        ),
        (
            CallFinished("id", "GET", "/embed", 404, "model_not_found", 0.0, reason="org/bge  tenant=x\n"),
            "404  model_not_found (org/bge%20%20tenant%3Dx%0A)",
        ),
        (CallFinished("50%s", "GET", "/embed", 404, "%d", 0.0), "id=50%s"),
    ],
    ids=["address of a proxy", "name of a model", "percent signs"],
)
def test_escapes_what_a_caller_sent(call: CallFinished, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    log_event(call)

    assert shown in caplog.records[0].getMessage()


def test_logs_nothing_below_the_level_or_for_health_probes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    log_event(CallFinished("id", "GET", "/livez", 200, "ok", 0.0))
    caplog.set_level(logging.WARNING, "gateway")
    log_event(CALL)

    assert [] == caplog.records


def test_logs_refused_polls_of_the_status_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    for status, outcome in ((200, "ok"), (401, "unauthenticated")):
        log_event(CallFinished("id", "GET", "/admin/status", status, outcome, 0.0))

    log_event(CallFinished("id", "GET", "/", 200, "ok", 0.0))
    log_event(CallFinished("id", "POST", "/", 200, "ok", 0.0))

    assert ["GET /admin/status 401", "POST / 200"] == [
        " ".join(record.getMessage().split()[:3]) for record in caplog.records
    ]


@pytest.mark.parametrize(
    ("outcome", "level", "message"),
    [
        ("fits", logging.INFO, "upstream up: r0 is in vector space abc"),
        ("differs", logging.ERROR, "upstream up: r0 gives other vectors: abc"),
        ("unchecked", logging.WARNING, "upstream up: the vectors of r0 cannot be checked (abc)"),
    ],
)
def test_logs_a_change_of_a_replicas_vector_space_once(
    caplog: pytest.LogCaptureFixture, outcome: SpaceOutcome, level: int, message: str
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    for changed in (True, False):
        log_event(SpaceChecked("up", "r0", outcome, 0.5, "abc", changed=changed))

    assert [(level, message)] == [(record.levelno, record.getMessage()) for record in caplog.records]


def test_logs_a_pause_of_connection_reuse_and_no_other_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    for fault in (ConnectionFaulted("up", "r0", "stale"), ConnectionFaulted("up", "r0", "unsolicited", 60.0)):
        log_event(fault)

    line = "upstream up: r0 sends data that no request asked for: no connection is reused for 60 s"
    assert [(logging.WARNING, line)] == [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(("state", "text"), [("probation", "is on probation"), ("up", "is up")])
def test_writes_the_state_of_a_replica_as_a_sentence(state: Literal["probation", "up"], text: str) -> None:
    line = EventLine(ReplicaChanged("embedder", "http://a", state, "because"))

    assert f"upstream embedder: http://a {text} (because)" == str(line)
    assert state == line.fields()["state"]
