"""Slices of comparisons in a lane, which are sent at once or not at all: they must delay no caller's work."""

from gateway.errors import Overloaded
from gateway.lane.fair_queue import FairQueue
from gateway.lane.ticket import Ticket


class Comparisons:
    """Tickets of comparisons that arrived since the last pass over the queue."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """Add a ticket that was queued."""
        self._tickets.append(ticket)

    def drop(self, queue: FairQueue[Ticket]) -> None:
        """Drop those that the pass over the queue has not sent."""
        if not self._tickets:
            return
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            if queue.remove(ticket.entry):
                ticket.resolve(Overloaded("the upstream is busy with callers' work"))
