"""Protocol of what runs a line: the gateway's own request path, without HTTP."""

from typing import Protocol

import msgspec

from gateway.batches.records import Job, LineProblem
from gateway.batches.results import LineReply


class LineRequest(msgspec.Struct, frozen=True):
    """A line to run. id: the same for the same try after a kill."""

    id: str
    job: Job
    body: msgspec.Raw


class LineServer(Protocol):
    """Runs lines as calls of class bulk, with the permissions and limits that their key has now."""

    async def serve(self, request: LineRequest) -> LineReply:
        """Return the reply to a line, also one that reports an error.

        Raises: GatewayError if another try might succeed.
        """

    async def settle(self) -> None:
        """Wait until the quota store has what all lines so far have cost. Raises: QuotaUnavailable."""

    def check_model(self, job: Job, model: str | None) -> LineProblem | None:
        """Return why lines of a job with this model cannot be served, None if they can."""

    def calls(self) -> int:
        """Return the number of interactive calls so far."""

    def is_draining(self) -> bool:
        """Return whether the process is about to stop."""
