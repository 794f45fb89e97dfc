"""State of the shared store: down after a few failures in a row, up after one success. Pure."""

FAILURES_MAX = 3


class Availability:
    """Failure counter that decides between the shared store and the local share.

    is_down: True while the gateway does not use the store.
    """

    def __init__(self) -> None:
        self._failures = 0
        # An attribute, because each request reads it several times.
        self.is_down = False

    @property
    def is_failing(self) -> bool:
        """True after a failure, until the next success."""
        return self._failures > 0

    def record_failure(self) -> bool:
        """Count a failure and return True if this one took the store down."""
        self._failures += 1
        self.is_down = self._failures >= FAILURES_MAX
        return self._failures == FAILURES_MAX

    def record_success(self) -> bool:
        """Reset the count and return True if the store was down."""
        was_down = self.is_down
        self._failures = 0
        self.is_down = False
        return was_down
