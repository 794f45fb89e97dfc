"""An attempt in the traces of the calls that it carries; called only where calls are traced."""

from typing import TYPE_CHECKING, TypeGuard

from backends.contract import operation_of
from gateway.batching.ticket import Attempt
from gateway.events import AttemptStarted

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTrace, RecordedCall


def begin_trace(attempt: Attempt, upstream: str) -> None:
    """Give an attempt what goes upstream with it, and a span in each trace that is recorded."""
    recorded: list[RecordedCall] = []
    for ticket in attempt.tickets:
        for trace in filter(_is_recorded, ticket.traces):
            recorded.append(trace)
            if not attempt.hedge:
                trace.waited(attempt.started_s - ticket.waiting_since_s)
    if recorded:
        attempt.trace = recorded[0].begin_attempt(recorded[1:], _started(attempt, upstream))
        attempt.carrier = attempt.trace.carrier
    else:
        attempt.carrier = attempt.tickets[0].traces[0].carrier()
    for ticket in attempt.tickets:
        ticket.tries += 1


def _is_recorded(trace: "CallTrace") -> "TypeGuard[RecordedCall]":
    return trace.recorded


def _started(attempt: Attempt, upstream: str) -> AttemptStarted:
    first, told = attempt.tickets[0], attempt.replica.capabilities
    return AttemptStarted(
        upstream,
        attempt.replica.name,
        told.model_id if told else "",
        operation_of(attempt.piece.work).value,
        attempt.cargo.inputs,
        sum(len(ticket.traces) for ticket in attempt.tickets),
        attempt.hedge,
        first.tries,
    )
