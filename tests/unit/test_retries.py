"""Retry policy: each kind of failure, and its consequence for a batch and for a slice."""

import msgspec
import pytest

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
    RequestTooLarge,
    UnsupportedWork,
)
from gateway.lane.retries import (
    ATTEMPT_MIN_S,
    FREE_ATTEMPTS,
    MASKED_MESSAGE,
    REFUSALS_MAX,
    Fail,
    LaneSettings,
    Retry,
    RetryPolicy,
    Split,
    is_final,
    is_input_possible,
    is_refusal,
    is_refused,
    timed_out_early,
)

MESSAGE = "no room for 'a text'"
SETTINGS = LaneSettings(1000, 30, holds=False)
HOLDING = LaneSettings(1000, 30, holds=True)
NOT_WAITING = LaneSettings(1000, 30, holds=True, waits_for_loading=False)
REPLICA_ERRORS = [
    AttemptTimedOut,
    ConnectionLost,
    ModelNotLoaded,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
]


def decide(
    error: BackendError,
    slices: int = 1,
    *,
    settings: LaneSettings = SETTINGS,
    is_wanted: bool = True,
    has_other_replica: bool = True,
) -> Retry | Split | Fail:
    """Decide with a fresh budget."""
    return RetryPolicy(settings, 0.0).decide(
        error, slices=slices, is_wanted=is_wanted, has_other_replica=has_other_replica, now_s=0.0
    )


@pytest.mark.parametrize("kind", [InvalidWork, UnsupportedWork])
def test_refused_input_fails_alone_and_splits_a_joined_batch(kind: type[BackendError]) -> None:
    error = kind(MESSAGE)

    assert Fail(error, blames_input=True) == decide(error)
    assert Split(None, avoid_replica=False) == decide(error, slices=4)


@pytest.mark.parametrize("kind", REPLICA_ERRORS)
def test_replica_failure_is_retried_at_another_replica_while_it_is_wanted(kind: type[BackendError]) -> None:
    error = kind(MESSAGE)

    assert Retry(error, same_replica=False) == decide(error)
    assert Fail(error, blames_input=False) == decide(error, is_wanted=False)


@pytest.mark.parametrize(
    ("settings", "returning"),
    [
        (SETTINGS, set()),
        (HOLDING, {ConnectionLost, ReplicaUnavailable, ModelNotLoaded}),
        (NOT_WAITING, {ConnectionLost, ReplicaUnavailable}),
    ],
)
def test_work_waits_for_a_replica_that_returns(
    settings: LaneSettings, returning: set[type[BackendError]]
) -> None:
    policy = RetryPolicy(settings, 0.0)

    assert returning == {kind for kind in REPLICA_ERRORS if policy.replica_returns(kind(MESSAGE))}
    for kind in returning:
        # Even if no caller waits any more: the replica drops work that nobody wants by itself.
        assert Retry(error := kind(MESSAGE), same_replica=True) == decide(
            error, settings=settings, is_wanted=False
        )


def test_only_a_replicas_own_error_splits_a_joined_batch() -> None:
    splitting = {kind for kind in REPLICA_ERRORS if isinstance(decide(kind(MESSAGE), slices=2), Split)}

    assert {ReplicaFailed} == splitting


@pytest.mark.parametrize("has_other_replica", [True, False])
def test_halves_avoid_the_failed_replica_if_there_is_another(*, has_other_replica: bool) -> None:
    decision = decide(ReplicaFailed(MESSAGE), slices=2, has_other_replica=has_other_replica)

    assert isinstance(decision, Split)
    assert has_other_replica is decision.avoid_replica


@pytest.mark.parametrize("kind", REPLICA_ERRORS)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_error_of_a_joined_batch_hides_other_callers_input(
    kind: type[BackendError], *, is_wanted: bool
) -> None:
    decision = decide(kind(MESSAGE), slices=2, is_wanted=is_wanted)

    assert decision.error is not None
    assert (kind, MASKED_MESSAGE) == (type(decision.error), decision.error.message)


@pytest.mark.parametrize(
    ("settings", "firsts", "retries", "hedges"),
    [
        (SETTINGS, 0, FREE_ATTEMPTS, FREE_ATTEMPTS),
        (
            msgspec.structs.replace(SETTINGS, retry_share=0.2, hedge_share=0.05),
            100,
            FREE_ATTEMPTS + 20,
            FREE_ATTEMPTS + 5,
        ),
    ],
    ids=["free", "paid by first attempts"],
)
def test_retries_and_hedges_have_their_own_budgets(
    settings: LaneSettings, firsts: int, retries: int, hedges: int
) -> None:
    policy = RetryPolicy(settings, 0.0)
    for _ in range(firsts):
        policy.add_first_attempt(0.0)
    error = ReplicaOverloaded(MESSAGE)
    decisions = [
        policy.decide(error, slices=1, is_wanted=True, has_other_replica=True, now_s=0.0) for _ in range(99)
    ]

    assert retries == sum(isinstance(decision, Retry) for decision in decisions)
    assert hedges == sum(policy.try_hedge(0.0) for _ in range(99))


def test_slice_without_permits_runs_alone_then_fails() -> None:
    refused = Retry(PermitsTaken(MASKED_MESSAGE), same_replica=True)

    assert not is_final(refused, 1)
    assert not is_final(refused, 4, is_refused=True)
    assert is_final(refused, 1, is_refused=True)


def test_slice_of_several_inputs_is_cut_before_one_input_is_refused() -> None:
    assert [False, False, True] == [is_refused(refusals, 8) for refusals in range(3)]
    assert [False, True] == [is_refused(refusals, 1) for refusals in (REFUSALS_MAX - 1, REFUSALS_MAX)]


def test_batch_without_permits_waits_for_the_same_replica() -> None:
    error = PermitsTaken(MESSAGE)

    assert Retry(error, same_replica=True) == decide(error, has_other_replica=False)


def test_refused_size_splits_a_batch_and_blames_no_input() -> None:
    error = RequestTooLarge(MESSAGE)

    assert Split(None, avoid_replica=False) == decide(error, slices=2)
    assert Fail(error, blames_input=False) == decide(error)


@pytest.mark.parametrize(
    ("left_s", "untried_replicas", "expected_s"),
    [
        (10, 0, 30),
        (10, 1, 30),
        (10, 2, 5),
        (100, 2, 30),
        (0.01, 3, ATTEMPT_MIN_S),
        (-1, 2, ATTEMPT_MIN_S),
    ],
)
def test_attempt_leaves_half_of_the_time_to_another_replica(
    left_s: float, untried_replicas: int, expected_s: float
) -> None:
    assert expected_s == RetryPolicy(SETTINGS, 0.0).timeout_s(untried_replicas, lambda: left_s)


@pytest.mark.parametrize(
    ("error", "took_s", "expected"),
    [
        (AttemptTimedOut(""), 2.9, True),
        (AttemptTimedOut(""), 3.0, False),
        (ReplicaFailed(""), 0.1, False),
    ],
)
def test_only_a_timeout_before_the_replicas_usual_time_is_early(
    error: BackendError, took_s: float, *, expected: bool
) -> None:
    assert expected is timed_out_early(error, took_s, patience_s=3.0)


ANSWERED_503 = ReplicaUnavailable(MESSAGE).with_facts(upstream_status="503")
PAUSED_503 = ReplicaUnavailable(MESSAGE).with_facts(upstream_status="503", retry_after_s=1.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReplicaUnavailable(MESSAGE), (False, False)),
        (ReplicaUnavailable(MESSAGE).with_facts(retry_after_s=1.0), (False, False)),
        (ANSWERED_503, (True, False)),
        (PAUSED_503, (True, True)),
        (ReplicaOverloaded(MESSAGE), (True, True)),
        (PermitsTaken(MESSAGE), (False, False)),
        (PermitsTaken(MESSAGE).with_facts(retry_after_s=1.0), (True, True)),
        (CredentialRefused(MESSAGE), (True, False)),
        (ModelNotLoaded(MESSAGE).with_facts(upstream_status="503"), (False, False)),
        (InvalidWork(MESSAGE).with_facts(retry_after_s=1.0), (False, False)),
    ],
)
def test_an_input_may_cause_what_a_server_answers(error: BackendError, expected: tuple[bool, bool]) -> None:
    assert expected == (is_input_possible(error), is_refusal(error))
