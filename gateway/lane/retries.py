"""Retry policy: the consequences of a failed attempt for its batch and for each of its slices. Pure.

To change when the gateway retries, edit this file. It decides only. `outcomes` applies the decisions to
tickets and queue, and `routing.health` decides the consequence for the replica.

- A failure that may help elsewhere is retried, paid from a budget. Waiting for a replica that will return
  costs nothing.
- A joined batch that a replica refuses or fails with an error of its own is split in halves, until the slice
  that causes the error is alone. `outcomes` decides when that is free of charge.
- A batch for which a replica has no permits waits and is sent there again, free of charge. Refused again and
  again, it fails, and the stage `dispatch` cuts it into smaller ones.
- Failures that an input may cause are judged by `outcomes` first.

A retry or a hedge is work that no caller requested, and additional work worsens an overload. Each costs one
unit of a budget that recent first attempts fill.
"""

from collections.abc import Callable

import msgspec

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialRefused,
    InvalidWork,
    ModelNotLoaded,
    PermitsTaken,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from gateway.routing.replica import LoadKind

# Failures that a replica's state or one input of the batch may cause, as may every answer of `is_refusal` and
# `is_unready`.
MAY_BE_INPUT = (ReplicaFailed, ConnectionLost, AttemptTimedOut)
# A slice for which a replica had no permits this often runs alone once more, and then fails. One of several
# inputs is cut in two by the stage `dispatch`, which is sooner of use than more patience.
REFUSALS_MAX = 6
REFUSALS_MAX_OF_SEVERAL = 2
# An input that failed alone gets so many times the shorter timeout before it is refused.
VERDICT_FACTOR = 3
# An attempt gets at least this long, however close the deadline is.
ATTEMPT_MIN_S = 0.05
HALF_LIFE_S = 10.0
# Lets a quiet lane retry its first failures.
FREE_ATTEMPTS = 10.0
MASKED_MESSAGE = "a replica did not do the batch that this call was part of"


class LaneSettings(msgspec.Struct, frozen=True):
    """Bounds and rules of one lane.

    holds: work waits while no replica is usable, because one is expected to return. waits_for_loading: work
    also waits while a model is being loaded. retry_share, hedge_share: added attempts per attempt that
    callers cause. kind: of its batches.
    """

    queue_tokens: int
    attempt_timeout_s: float
    holds: bool
    retry_share: float = 0.2
    hedge_share: float = 0.05
    waits_for_loading: bool = True
    kind: LoadKind = "texts"


class RetryBudget:
    """Decaying counts of first and added attempts. share: added attempts allowed per first attempt."""

    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._first = 0.0
        self._added = 0.0
        self._last_s = now_s

    def add_first_attempt(self, now_s: float) -> None:
        """Count a batch that is tried for the first time."""
        factor: float = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        self._first = self._first * factor + 1
        self._added *= factor
        self._last_s = now_s

    def try_spend(self, now_s: float) -> bool:
        """Return True and count one added attempt if the budget allows it."""
        factor: float = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        self._first *= factor
        added, self._last_s = self._added * factor, now_s
        allowed = added + 1 <= self._first * self._share + FREE_ATTEMPTS
        self._added = added + allowed
        return allowed


class Retry(msgspec.Struct, frozen=True):
    """Queue each slice again. same_replica: the failed replica will return and may have it again."""

    error: BackendError
    same_replica: bool


class Split(msgspec.Struct, frozen=True):
    """Queue each half as a batch of its own.

    error: the result for a slice that never gets another one. It is None after a refusal: as long as the
    refused input is not identified, no caller may see the error of another. avoid_replica: try a different
    replica first.
    """

    error: BackendError | None
    avoid_replica: bool


class Fail(msgspec.Struct, frozen=True):
    """Report the error to each caller. blames_input: the input of the call was refused."""

    error: BackendError
    blames_input: bool


class RetryPolicy:
    """Decisions about failed attempts, and the budgets that bound added attempts."""

    def __init__(self, settings: LaneSettings, now_s: float) -> None:
        self._retries = RetryBudget(settings.retry_share, now_s)
        self._hedges = RetryBudget(settings.hedge_share, now_s)
        self.attempt_timeout_s = settings.attempt_timeout_s
        # Errors of a replica that will return.
        self._returning_errors: tuple[type[BackendError], ...] = (PermitsTaken,)
        if settings.holds:
            self._returning_errors += (ConnectionLost, ReplicaUnavailable)
        if settings.holds and settings.waits_for_loading:
            self._returning_errors += (ModelNotLoaded,)

    def add_first_attempt(self, now_s: float) -> None:
        """Count a batch that is tried for the first time, which pays for retries and hedges."""
        self._retries.add_first_attempt(now_s)
        self._hedges.add_first_attempt(now_s)

    def try_hedge(self, now_s: float) -> bool:
        """Return True and count one hedge if the budget allows it."""
        return self._hedges.try_spend(now_s)

    def decide(
        self, error: BackendError, *, slices: int, is_wanted: bool, has_other_replica: bool, now_s: float
    ) -> Retry | Split | Fail:
        """Return the consequence of an attempt's error for its whole batch.

        slices: number of slices in the batch. is_wanted: a caller still waits for one of them.
        has_other_replica: more than one replica is usable.
        """
        retries = error.retryable and self._may_retry(error, is_wanted=is_wanted, now_s=now_s)
        has_failed = isinstance(error, ReplicaFailed)
        if slices > 1 and (not error.retryable or (retries and has_failed)):
            # Half a batch is a new batch, which the same replica may complete; a different replica goes
            # first.
            visible = masked(error, slices) if error.retryable else None
            return Split(visible, avoid_replica=has_failed and has_other_replica)
        if retries:
            return Retry(masked(error, slices), same_replica=self.replica_returns(error))
        return Fail(masked(error, slices), blames_input=error.source == "caller")

    def replica_returns(self, error: BackendError) -> bool:
        """Return whether the replica is expected back, so that its work waits for it.

        An engine that died restarts on the same socket and loads its model. Permits are free again soon. A
        server that asked for a pause gets no work during it.
        """
        asks_for_pause = isinstance(error, ReplicaOverloaded) and bool(error.retry_after_s)
        return asks_for_pause or isinstance(error, self._returning_errors)

    def timeout_s(self, untried_replicas: int, time_left_s: Callable[[], float]) -> float:
        """Return the timeout of an attempt.

        At most half of the time left, while a different replica could still be tried. Otherwise no deadline
        limits the attempt: a caller whose deadline expires leaves, and the last one to leave cancels the
        attempt. untried_replicas: including this attempt's own. time_left_s: called only if it matters.
        """
        if untried_replicas < 2:
            return self.attempt_timeout_s
        return max(ATTEMPT_MIN_S, min(time_left_s() / 2, self.attempt_timeout_s))

    def brief_timeout_s(self, expected_s: float, faults: int) -> float | None:
        """Return the timeout for a slice whose batch timed out; None if it gets the usual one.

        expected_s: what the replica needs for such work. faults: failures alone. Too short a timeout harms
        no fine input: only the second, longer one decides.
        """
        timeout_s = expected_s * (VERDICT_FACTOR if faults else 1)
        return timeout_s if timeout_s < self.attempt_timeout_s else None

    def _may_retry(self, error: BackendError, *, is_wanted: bool, now_s: float) -> bool:
        return self.replica_returns(error) or (is_wanted and self._retries.try_spend(now_s))


def is_input_possible(error: BackendError) -> bool:
    """Return whether an input of the batch may have caused a failure."""
    return isinstance(error, MAY_BE_INPUT) or is_refusal(error) or is_unready(error)


def is_refusal(error: BackendError) -> bool:
    """Return whether a server, or a proxy before it, answered work with 429, or with 503 and a pause.

    Permits are a matter of numbers, unless a pause comes with their want.
    """
    if isinstance(error, PermitsTaken) or is_unready(error):
        return bool(error.retry_after_s)
    return isinstance(error, ReplicaOverloaded)


def is_unready(error: BackendError) -> bool:
    """Return whether a server, or a proxy before it, answered work with 503."""
    return isinstance(error, ReplicaUnavailable) and error.upstream_status is not None


def try_elsewhere(error: UnsupportedWork, slices: int) -> Retry:
    """Return the decision on work that one replica does not support, while another offers it.

    Each replica is tried at most once. That needs no budget: an adapter refuses such work without a request.
    """
    return Retry(masked(error, slices), same_replica=False)


def is_final(decision: Retry | Fail, slices: int, *, is_refused: bool = False) -> bool:
    """Return whether a slice of a failed batch fails with it, and is not queued again.

    slices: in the failed batch. is_refused: as `is_refused` returns it; it is tried alone once more.
    """
    return isinstance(decision, Fail) or (is_refused and slices == 1)


def is_refused(refusals: int, inputs: int) -> bool:
    """Return whether a slice of this many inputs was refused too often for want of permits."""
    return refusals >= (REFUSALS_MAX if inputs == 1 else REFUSALS_MAX_OF_SEVERAL)


def timed_out_early(error: BackendError, took_s: float, patience_s: float) -> bool:
    """Return whether an attempt had less time than such work may take.

    Callers' short deadlines are not the replica's fault. patience_s: how long the replica may take.
    """
    return isinstance(error, AttemptTimedOut) and took_s < patience_s


def effect_of(error: BackendError) -> str:
    """Return the words for what a replica does when an input makes it fail."""
    match error:
        case AttemptTimedOut():
            return "does not answer"
        case ConnectionLost():
            return "breaks the connection"
        case _:
            return f"fails ({error.kind})"


def refusal_of(error: BackendError, *, has_index: bool) -> InvalidWork:
    """Return the caller's error for an input that failed alone, while its replica works for others.

    has_index: it is the only input of its slice.
    """
    match error:
        case AttemptTimedOut():
            words = "the upstream answers other inputs and does not answer this one"
        case ConnectionLost():
            words = "the upstream serves other inputs and breaks the connection for this one"
        case CredentialRefused():
            words = "the upstream accepts the gateway's key for other inputs and refuses this one"
            return InvalidWork(words, input_index=0 if has_index else None)
        case _:
            words = "the upstream serves other inputs and fails for this one"
    return InvalidWork(f"{words}: {error.message}", input_index=0 if has_index else None)


def masked(error: BackendError, slices: int) -> BackendError:
    """Return the error as each caller may see it.

    A message about a joined batch may quote another caller's input.
    """
    if slices == 1:
        return error
    return type(error)(MASKED_MESSAGE).with_facts(
        upstream_status=error.upstream_status, retry_after_s=error.retry_after_s
    )
