"""The one error of the shared store, and the classification of its replies."""

import ssl
from collections.abc import Iterator
from typing import Any

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
# Causes of causes that are examined.
CHAIN_MAX = 8


class StoreUnavailable(Exception):
    """The store did not reply correctly within its timeout. The message is safe to log.

    batch_number: shared by all calls of one failed batch, so that it is counted once; 0 outside a batch.
    is_script_error: the store works, and only this script call failed. is_refusal: the store responds, and
    refuses this gateway: its password, its rights, or its TLS.
    """

    def __init__(
        self,
        reason: str,
        batch_number: int = 0,
        *,
        is_script_error: bool = False,
        is_refusal: bool = False,
    ) -> None:
        super().__init__(reason)
        self.batch_number = batch_number
        self.is_script_error = is_script_error
        self.is_refusal = is_refusal


def unavailable(error: Any, batch_number: int = 0) -> StoreUnavailable:
    """Return the error of the store for any other one.

    A message of Redis itself may contain an address or a password: the reason is the kind of error.
    """
    if isinstance(error, StoreUnavailable):
        return StoreUnavailable(str(error), batch_number or error.batch_number, is_refusal=error.is_refusal)
    refusal = _refusal(error)
    reason = f"{type(error).__name__}: {refusal}" if refusal else type(error).__name__
    return StoreUnavailable(
        reason, batch_number, is_script_error=is_script_error(error), is_refusal=bool(refusal)
    )


def is_script_error(reply: Any) -> bool:
    """Return True if a script failed because of the data in its keys, not the state of the server."""
    from redis.exceptions import ResponseError

    # redis-py has classes of their own for server errors such as READONLY and OOM. Older servers wrap the
    # same errors into the script's error, and then their names are inside the text.
    if type(reply) is not ResponseError:
        return False
    text = str(reply)
    raised_by_script = "WRONGTYPE" in text or "user_script" in text
    return raised_by_script and not any(name in text for name in SERVER_ERRORS)


def _refusal(error: Any) -> str:
    """Return why a server that responds refuses this gateway, or nothing if it does not.

    Only a change of settings mends it.
    """
    # A process without a store does not import its client.
    from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

    refusals: tuple[tuple[type[BaseException], str], ...] = (
        (AuthenticationError, "it refuses the user name or password"),
        (NoPermissionError, "its user lacks rights"),
        (ssl.SSLError, "TLS fails"),
    )
    for cause in _chain(error):
        for kind, reason in refusals:
            if isinstance(cause, kind):
                return reason
        # A script's error of an older server wraps the one of its command.
        if isinstance(cause, ResponseError) and "NOPERM" in str(cause):
            return "its user lacks rights"
    return ""


def _chain(error: Any) -> Iterator[BaseException]:
    """Yield an error and its causes: redis-py wraps those of a connection."""
    for _ in range(CHAIN_MAX):
        if not isinstance(error, BaseException):
            return
        yield error
        error = error.__cause__ or error.__context__
