"""The one error of the shared store, and the classification of its replies."""

from typing import Any

from redis.exceptions import ResponseError

# Beginnings of the errors that any script would meet in the server's present state.
SERVER_ERRORS = (
    "OOM",
    "READONLY",
    "MISCONF",
    "NOREPLICAS",
    "NOPERM",
    "NOAUTH",
    "LOADING",
    "BUSY",
    "MASTERDOWN",
)


class StoreUnavailable(Exception):
    """The store did not reply correctly within its timeout. The message is safe to log.

    batch_number: shared by all calls of one failed batch, so that it is counted once; 0 outside a batch.
    is_script_error: the store works, and only this script call failed.
    """

    def __init__(self, reason: str, batch_number: int = 0, *, is_script_error: bool = False) -> None:
        super().__init__(reason)
        self.batch_number = batch_number
        self.is_script_error = is_script_error


def failure_reason(error: Any) -> str:
    """Return a reason that is safe to log: the kind of error.

    A message of Redis itself may contain an address or a password.
    """
    return str(error) if isinstance(error, StoreUnavailable) else type(error).__name__


def is_script_error(reply: Any) -> bool:
    """Return True if a script failed because of the data in its keys, not the state of the server."""
    # redis-py has classes of their own for server errors such as READONLY and OOM. Older servers wrap the
    # same errors into the script's error, and then their names are inside the text.
    if type(reply) is not ResponseError:
        return False
    text = str(reply)
    raised_by_script = "WRONGTYPE" in text or "user_script" in text
    return raised_by_script and not any(name in text for name in SERVER_ERRORS)
