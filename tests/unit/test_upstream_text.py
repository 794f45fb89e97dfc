"""Text of upstreams in errors and reasons: one line, without control characters, and bounded."""

import pytest

from backends.contract import Capabilities, Operation
from backends.contract.errors import MESSAGE_CHARACTERS_MAX, InvalidWork, ReplicaFailed, printable
from gateway.events import Event, ReplicaChanged
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from tests.fakes.replicas import HeldReplica

FORGED = "no\r\n13:00:00 ERROR   FAKE LINE\x1b[2J\u2028\x00" + "x" * 3_000_000


def assert_clean(text: str) -> None:
    assert text.isprintable()
    assert len(text) <= MESSAGE_CHARACTERS_MAX
    assert text.startswith("no  13:00:00 ERROR   FAKE LINE")


@pytest.mark.parametrize("kind", [InvalidWork, ReplicaFailed])
def test_message_of_an_error_is_one_bounded_line(kind: type[InvalidWork | ReplicaFailed]) -> None:
    error = kind(FORGED)
    assert_clean(error.message)
    assert_clean(str(error))


def test_ordinary_text_is_unchanged() -> None:
    text = "`inputs` must have less than 512 tokens. Given: 600; wörld 🌍"
    assert text is printable(text)


def test_reason_of_a_change_is_one_bounded_line() -> None:
    events: list[Event] = []
    pool = Pool("up", [Replica("r", HeldReplica())], "least_tokens", events.append)
    capabilities = Capabilities(FORGED, frozenset({Operation.EMBED}))
    pool.transition(pool.replicas[0], ReplicaEvent.JOINED, FORGED, capabilities)

    [change] = events
    assert isinstance(change, ReplicaChanged)
    assert_clean(change.reason)
