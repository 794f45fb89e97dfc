"""What can go wrong at a backend, as facts: kind, whose fault, whether another replica may help.

BackendError
 ├─ InvalidWork        the caller's input was refused            source caller, final
 ├─ UnsupportedWork    this backend cannot express what is asked source caller, final
 ├─ Overloaded         the replica is full right now             retry elsewhere
 ├─ Loading            its model is on its way into memory       retry elsewhere
 ├─ Unavailable        never reached, or not ready               retry elsewhere
 ├─ Lost               the connection broke with work in flight  retry elsewhere
 ├─ TimedOut           no answer within the attempt's timeout    retry elsewhere
 ├─ Failed             it answered with a failure of its own     retry elsewhere, once
 └─ ModelUnavailable   the checkpoint cannot be had or loaded    final
"""

from typing import ClassVar, Literal

ErrorSource = Literal["caller", "gateway", "upstream"]


class BackendError(Exception):
    """A backend's failure; the message is safe to show to a caller."""

    kind: ClassVar[str] = "failed"
    source: ClassVar[ErrorSource] = "upstream"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, empty: bool = False) -> None:
        super().__init__(message)
        self.message = message
        # TEI tells "nothing was given" (400) from "what was given is wrong" (422).
        self.empty = empty


class InvalidWork(BackendError):
    """The input itself was refused: too long, an unknown prompt, a bad number."""

    kind = "invalid_input"
    source = "caller"
    retryable = False


class UnsupportedWork(BackendError):
    """The model or the wire behind it cannot do what is asked."""

    kind = "unsupported"
    source = "caller"
    retryable = False


class ReplicaOverloaded(BackendError):
    """The replica has no room; it did not start the work."""

    kind = "overloaded"


class ModelNotLoaded(BackendError):
    """The model is not in memory yet, and whoever asked is not to wait, or has waited; it did not start."""

    kind = "loading"


class ReplicaUnavailable(BackendError):
    """The replica was not reached, or says it is not ready; it did not start the work."""

    kind = "unavailable"


class ConnectionLost(BackendError):
    """The connection broke while the replica may have been working."""

    kind = "lost"


class AttemptTimedOut(BackendError):
    """No answer came in time; the replica may still be working."""

    kind = "timed_out"


class ReplicaFailed(BackendError):
    """The replica answered with an error of its own, or with something that is not an answer."""

    kind = "failed"


class ModelUnavailable(BackendError):
    """The checkpoint cannot be found, fetched or loaded; the message says what to do."""

    kind = "model_unavailable"
    source = "gateway"
    retryable = False
