"""Retry policy: the consequences of a failed attempt for its batch and for each of its slices. Pure.

To change when the gateway retries, edit this file: it has every limit and every verdict, as functions of
plain values. `outcomes` finds out what they need and carries them out on tickets and queue; its docstring
describes the whole course of a failure. `routing.health` decides the consequence for the replica.

- A failure that may help elsewhere is retried, paid from a budget. Waiting for a replica that will return
  costs nothing.
- A joined batch that a replica refuses or fails with an error of its own is split in halves, until the slice
  that causes the error is alone. It is free of charge if the replica works for others (`division`).
- A batch for which a replica has no permits waits and is sent there again, free of charge. Refused again and
  again, it fails, and the stage `dispatch` cuts it into smaller ones.
- A failure that an input may cause is judged first (`verdict_on_slice`): the input or the replica is at
  fault.

A retry or a hedge is work that no caller requested, and additional work worsens an overload. Each costs one
unit of a budget that recent first attempts fill.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

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

# Failures that a replica's state or one input of the batch may cause, as may every answer of `is_overload`
# and `is_unready`.
MAY_BE_INPUT = (ReplicaFailed, ConnectionLost, AttemptTimedOut)
# A slice for which a replica had no permits this often runs alone once more, and then fails. One of several
# inputs is cut in two by the stage `dispatch`, which is sooner of use than more patience.
PERMIT_REFUSALS_MAX = 6
PERMIT_REFUSALS_MAX_OF_SEVERAL = 2
# Failures alone after which an input is refused.
FAULTS_MAX = 2
# Servers that broke under a slice while they broke under others too; the slice fails then.
LOSSES_MAX = 5
# Servers that were unready since they had a slice, after which no other one gets it.
UNREADY_MAX = 2
# Refusals with a pause, at replicas that work for others, after which a slice's caller gets the refusal.
PAUSES_MAX = 2
# A slice waits for the end of a pause up to this long, if no other replica is usable.
WAITED_S = 5.0
# A server that asks for a shorter pause would be asked all the time.
HOLD_MIN_S = 0.1
# Refusals of different inputs within this time are of all.
TOGETHER_S = 10.0
# How long calls wait for a replica that broke its connections, and how often it is checked meanwhile.
RETURN_S = 3.0
LOOK_EVERY_S = 0.25
# Failures after which a server may have to restart.
BREAKING = (ConnectionLost, ReplicaUnavailable)
# Failures of a check that leave open whether there is a server at all.
UNANSWERED = (ConnectionLost, ReplicaUnavailable, AttemptTimedOut)
# An input that failed alone gets so many times the shorter timeout before it is refused.
VERDICT_FACTOR = 3
# An attempt gets at least this long, however close the deadline is.
ATTEMPT_MIN_S = 0.05
HALF_LIFE_S = 10.0
# Lets a quiet lane retry its first failures.
FREE_ATTEMPTS = 10.0
MASKED_MESSAGE = "a replica did not do the batch that this call was part of"

# Consequence for a batch of several slices that an input may have failed. alone: each slice by itself.
# halves: each half as a batch. policy: as `RetryPolicy.decide` returns.
Division: TypeAlias = Literal["alone", "halves", "policy"]
# Consequence for a slice that failed alone. replica: the replica is at fault, and the policy decides. again:
# it is tried once more, and the failure does not count. cut: into smaller slices. once_more: it is tried once
# more, and the failure counts. refuse: its input is at fault.
SliceVerdict: TypeAlias = Literal["replica", "again", "cut", "once_more", "refuse"]
# Consequence for a slice that was refused alone with a pause. elsewhere: it goes to a different replica.
# wait: until the pause ends.
SecondTry: TypeAlias = Literal["fail", "elsewhere", "wait"]


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
        self,
        error: BackendError,
        *,
        slices: int,
        is_wanted: bool,
        has_other_replica: bool,
        now_s: float,
        has_untried_replica: bool = False,
    ) -> Retry | Split | Fail:
        """Return the consequence of an attempt's error for its whole batch.

        slices: number of slices in the batch. is_wanted: a caller still waits for one of them.
        has_other_replica: more than one replica is usable. has_untried_replica: one that offers the work has
        tried none of its slices; matters only for work that this replica does not support.
        """
        if isinstance(error, UnsupportedWork) and is_wanted and has_untried_replica:
            # Each replica is tried at most once. That needs no budget: an adapter refuses such work without
            # a request.
            return Retry(masked(error, slices), same_replica=False)
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
    return isinstance(error, MAY_BE_INPUT) or is_overload(error) or is_unready(error)


def is_overload(error: BackendError) -> bool:
    """Return whether a server, or a proxy before it, answered work with 429, or with 503 and a pause.

    Permits are a matter of numbers, unless a pause comes with their want.
    """
    if isinstance(error, PermitsTaken) or is_unready(error):
        return bool(error.retry_after_s)
    return isinstance(error, ReplicaOverloaded)


def is_unready(error: BackendError) -> bool:
    """Return whether a server, or a proxy before it, answered work with 503."""
    return isinstance(error, ReplicaUnavailable) and error.upstream_status is not None


# --- slices of a failed batch


def is_final(decision: Retry | Fail, slices: int, *, lacked_permits: bool = False) -> bool:
    """Return whether a slice of a failed batch fails with it, and is not queued again.

    slices: in the failed batch. lacked_permits: as `lacks_permits` returns it; it is tried alone once more.
    """
    return isinstance(decision, Fail) or (lacked_permits and slices == 1)


def lacks_permits(permit_refusals: int, inputs: int) -> bool:
    """Return whether a slice of this many inputs was refused too often for want of permits."""
    return permit_refusals >= (PERMIT_REFUSALS_MAX if inputs == 1 else PERMIT_REFUSALS_MAX_OF_SEVERAL)


def is_held_past(wait_s: float | None, deadline_s: float, now_s: float) -> bool:
    """Return whether every replica asked for a pause that ends after a deadline.

    wait_s: until one of them may get work; None if one may already.
    """
    return wait_s is not None and now_s + wait_s > deadline_s


# --- failures that an input may have caused


def division(error: BackendError, fault: BackendError | None) -> Division:
    """Return how a batch of several slices is divided, so that none meets the same neighbours again.

    error: no timeout, after which each slice goes alone at once. fault: why its replica fails plain work,
    None if it works.
    """
    if isinstance(error, ConnectionLost):
        return "alone"
    if fault is None:
        return "halves"
    return "alone" if isinstance(error, ReplicaUnavailable) else "policy"


def is_last_failure(
    error: BackendError, faults: int, *, is_indivisible: bool, has_other_replica: bool, is_brief: bool
) -> bool:
    """Return whether a failure alone is the last one of its input, if the replica works.

    faults: failures alone before it. has_other_replica: one is usable that did not fail it. is_brief: it had
    a shorter timeout than usual. A timeout of the usual length costs too much time to be repeated in vain.
    """
    is_last_try = isinstance(error, AttemptTimedOut) and not has_other_replica and not is_brief
    return is_indivisible and (faults + 1 >= FAULTS_MAX or is_last_try)


def proof_since_s(error: BackendError, started_s: float, failed_s: float, *, is_last: bool) -> float:
    """Return the moment since which an answer of a replica shows that it works.

    What it answered before the failure shows little of a replica that hangs now, or of the last failure.
    """
    return failed_s if is_last or isinstance(error, AttemptTimedOut) else started_s


def verdict_on_slice(
    error: BackendError,
    fault: BackendError | None,
    *,
    is_indivisible: bool,
    is_last: bool,
    broke_with_others: bool,
) -> SliceVerdict:
    """Return the consequence for a slice that failed alone.

    fault: why the replica fails plain work, None if it works. is_last: as `is_last_failure` returns it.
    broke_with_others: other connections of the replica broke together with its own.
    """
    if fault is not None and not isinstance(error, ConnectionLost):
        return "replica"
    if fault is not None and broke_with_others:
        # Any of the slices that were in flight there may have broken it.
        return "again"
    if not is_indivisible:
        return "cut"
    return "refuse" if is_last else "once_more"


def blames_replica(error: BackendError, *, is_brief: bool) -> bool:
    """Return whether a failure alone is the replica's if another one computes the input.

    is_brief: it had less time than usual, and is not at fault then.
    """
    has_hung = isinstance(error, AttemptTimedOut) and not is_brief
    return has_hung or isinstance(error, ReplicaFailed | ReplicaUnavailable)


def has_lost_too_many(losses: int) -> bool:
    """Return whether so many servers broke under a slice that no other one gets it."""
    return losses >= LOSSES_MAX


def were_unready_too_often(losses: int, *, holds: bool) -> bool:
    """Return whether so many servers were unready since they had a slice that no other one gets it.

    holds: work waits for replicas that are expected to return.
    """
    return losses >= (LOSSES_MAX if holds else UNREADY_MAX)


def return_ends_s(deadline_s: float, now_s: float, *, holds: bool) -> float:
    """Return the moment until which a slice waits for a replica that it may have broken."""
    return deadline_s if holds else now_s + RETURN_S


# --- failures as they count for the replica


def counts_for_replica(error: BackendError) -> bool:
    """Return whether a failure that no input causes is recorded at its replica."""
    return error.retryable or isinstance(error, UnsupportedWork)


def replica_error(error: BackendError, fault: BackendError) -> BackendError:
    """Return the error to record at a replica that failed an attempt, and plain work after it.

    fault: that of the plain work.
    """
    if isinstance(error, ConnectionLost) and not isinstance(fault, UNANSWERED):
        return ReplicaFailed(fault.message)
    return fault if isinstance(error, ReplicaUnavailable | CredentialRefused) else error


def hold_s(pause_s: float) -> float:
    """Return how long a replica gets no work that asked for a pause."""
    return max(HOLD_MIN_S, pause_s)


# --- overload: 429, and 503 with a pause


def is_overload_of_all(passed_s: float, *, is_same_input: bool) -> bool:
    """Return whether two refusals of a server whose requests cost money are of all inputs.

    passed_s: between them. is_same_input: of the first inputs of both.
    """
    return not is_same_input and passed_s < TOGETHER_S


def second_try(pauses: int, pause_s: float, time_left_s: float, *, has_other_replica: bool) -> SecondTry:
    """Return the consequence for a slice that a replica refused alone for a while, and works for others.

    pauses: such refusals of the slice, with this one. has_other_replica: one is usable that did not refuse
    it.
    """
    if pauses >= PAUSES_MAX:
        return "fail"
    if has_other_replica:
        return "elsewhere"
    return "wait" if pause_s <= WAITED_S and pause_s < time_left_s else "fail"


# --- timeouts, and words for errors


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


def input_error(error: BackendError, *, has_index: bool) -> InvalidWork:
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
