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
    FAULTS_MAX,
    FREE_ATTEMPTS,
    HOLD_MIN_S,
    LOSSES_MAX,
    MASKED_MESSAGE,
    PAUSES_MAX,
    PERMIT_REFUSALS_MAX,
    RETURN_S,
    TOGETHER_S,
    UNREADY_MAX,
    WAITED_S,
    Fail,
    LaneSettings,
    Retry,
    RetryPolicy,
    Split,
    blames_replica,
    counts_for_replica,
    division,
    has_lost_too_many,
    hold_s,
    is_final,
    is_held_past,
    is_input_possible,
    is_last_failure,
    is_overload,
    is_overload_of_all,
    lacks_permits,
    proof_since_s,
    replica_error,
    return_ends_s,
    second_try,
    timed_out_early,
    verdict_on_slice,
    were_unready_too_often,
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
    assert not is_final(refused, 4, lacked_permits=True)
    assert is_final(refused, 1, lacked_permits=True)


def test_slice_of_several_inputs_is_cut_before_one_input_is_refused() -> None:
    assert [False, False, True] == [lacks_permits(refusals, 8) for refusals in range(3)]
    assert [False, True] == [
        lacks_permits(refusals, 1) for refusals in (PERMIT_REFUSALS_MAX - 1, PERMIT_REFUSALS_MAX)
    ]


def test_batch_without_permits_waits_for_the_same_replica() -> None:
    error = PermitsTaken(MESSAGE)

    assert Retry(error, same_replica=True) == decide(error, has_other_replica=False)


def test_refused_size_splits_a_batch_and_blames_no_input() -> None:
    error = RequestTooLarge(MESSAGE)

    assert Split(None, avoid_replica=False) == decide(error, slices=2)
    assert Fail(error, blames_input=False) == decide(error)


@pytest.mark.parametrize(
    ("left_s", "untried_replicas", "expected_s"),
    [(10, 0, 30), (10, 1, 30), (10, 2, 5), (100, 2, 30), (0.01, 3, ATTEMPT_MIN_S), (-1, 2, ATTEMPT_MIN_S)],
)
def test_attempt_leaves_half_of_the_time_to_another_replica(
    left_s: float, untried_replicas: int, expected_s: float
) -> None:
    assert expected_s == RetryPolicy(SETTINGS, 0.0).timeout_s(untried_replicas, lambda: left_s)


@pytest.mark.parametrize(
    ("error", "took_s", "expected"),
    [(AttemptTimedOut(""), 2.9, True), (AttemptTimedOut(""), 3.0, False), (ReplicaFailed(""), 0.1, False)],
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
    assert expected == (is_input_possible(error), is_overload(error))


@pytest.mark.parametrize(
    ("error", "fault", "expected"),
    [
        (ReplicaFailed(MESSAGE), None, "halves"),
        (ReplicaFailed(MESSAGE), ReplicaFailed(MESSAGE), "policy"),
        (ANSWERED_503, None, "halves"),
        (ANSWERED_503, ANSWERED_503, "alone"),
        (ConnectionLost(MESSAGE), None, "alone"),
        (ConnectionLost(MESSAGE), ConnectionLost(MESSAGE), "alone"),
    ],
)
def test_a_failed_batch_is_divided_if_an_input_may_be_the_cause(
    error: BackendError, fault: BackendError | None, expected: str
) -> None:
    assert expected == division(error, fault)


@pytest.mark.parametrize(
    ("error", "faults", "is_indivisible", "has_other_replica", "is_brief", "expected"),
    [
        (ReplicaFailed(MESSAGE), 0, True, True, False, False),
        (ReplicaFailed(MESSAGE), FAULTS_MAX - 1, True, True, False, True),
        (ReplicaFailed(MESSAGE), FAULTS_MAX - 1, False, True, False, False),
        (AttemptTimedOut(MESSAGE), 0, True, False, False, True),
        (AttemptTimedOut(MESSAGE), 0, True, True, False, False),
        (AttemptTimedOut(MESSAGE), 0, True, False, True, False),
    ],
)
def test_an_input_fails_alone_twice_before_it_is_refused(
    error: BackendError,
    faults: int,
    *,
    is_indivisible: bool,
    has_other_replica: bool,
    is_brief: bool,
    expected: bool,
) -> None:
    assert expected is is_last_failure(
        error,
        faults,
        is_indivisible=is_indivisible,
        has_other_replica=has_other_replica,
        is_brief=is_brief,
    )


@pytest.mark.parametrize(
    ("error", "is_last", "expected_s"),
    [
        (ReplicaFailed(MESSAGE), False, 1.0),
        (ReplicaFailed(MESSAGE), True, 2.0),
        (AttemptTimedOut(MESSAGE), False, 2.0),
    ],
)
def test_proof_that_a_replica_works_is_newer_than_a_timeout_and_a_last_failure(
    error: BackendError, expected_s: float, *, is_last: bool
) -> None:
    assert expected_s == proof_since_s(error, 1.0, 2.0, is_last=is_last)


@pytest.mark.parametrize(
    ("error", "fault", "is_indivisible", "is_last", "broke_with_others", "expected"),
    [
        (ReplicaFailed(MESSAGE), ReplicaFailed(MESSAGE), True, True, False, "replica"),
        (ReplicaFailed(MESSAGE), None, False, False, False, "cut"),
        (ReplicaFailed(MESSAGE), None, True, False, False, "once_more"),
        (ReplicaFailed(MESSAGE), None, True, True, False, "refuse"),
        (ConnectionLost(MESSAGE), ConnectionLost(MESSAGE), True, True, True, "again"),
        (ConnectionLost(MESSAGE), ConnectionLost(MESSAGE), True, True, False, "refuse"),
        (ConnectionLost(MESSAGE), ConnectionLost(MESSAGE), False, False, False, "cut"),
        (ConnectionLost(MESSAGE), None, True, False, True, "once_more"),
    ],
)
def test_verdict_on_a_slice_that_failed_alone(
    error: BackendError,
    fault: BackendError | None,
    *,
    is_indivisible: bool,
    is_last: bool,
    broke_with_others: bool,
    expected: str,
) -> None:
    assert expected == verdict_on_slice(
        error, fault, is_indivisible=is_indivisible, is_last=is_last, broke_with_others=broke_with_others
    )


@pytest.mark.parametrize(
    ("error", "is_brief", "expected"),
    [
        (ReplicaFailed(MESSAGE), True, True),
        (ANSWERED_503, True, True),
        (AttemptTimedOut(MESSAGE), False, True),
        (AttemptTimedOut(MESSAGE), True, False),
        (ConnectionLost(MESSAGE), False, False),
    ],
)
def test_a_replica_is_blamed_only_for_what_another_one_computes(
    error: BackendError, *, is_brief: bool, expected: bool
) -> None:
    assert expected is blames_replica(error, is_brief=is_brief)


@pytest.mark.parametrize(
    ("error", "fault", "expected"),
    [
        (ConnectionLost("a"), ConnectionLost("b"), ConnectionLost("a")),
        (ConnectionLost("a"), ReplicaFailed("b"), ReplicaFailed("b")),
        (ConnectionLost("a"), CredentialRefused("b"), ReplicaFailed("b")),
        (ReplicaUnavailable("a"), ReplicaFailed("b"), ReplicaFailed("b")),
        (CredentialRefused("a"), AttemptTimedOut("b"), AttemptTimedOut("b")),
        (AttemptTimedOut("a"), ReplicaFailed("b"), AttemptTimedOut("a")),
    ],
)
def test_a_replica_that_fails_plain_work_gets_the_error_that_describes_it(
    error: BackendError, fault: BackendError, expected: BackendError
) -> None:
    recorded = replica_error(error, fault)

    assert (type(expected), expected.message) == (type(recorded), recorded.message)


def test_a_slice_has_had_enough_broken_servers() -> None:
    assert [False, True] == [has_lost_too_many(losses) for losses in (LOSSES_MAX - 1, LOSSES_MAX)]
    for holds, most in ((True, LOSSES_MAX), (False, UNREADY_MAX)):
        assert [False, True] == [were_unready_too_often(losses, holds=holds) for losses in (most - 1, most)]
    assert (9.0, 1.0 + RETURN_S) == tuple(return_ends_s(9.0, 1.0, holds=holds) for holds in (True, False))


@pytest.mark.parametrize(
    ("pauses", "pause_s", "time_left_s", "has_other_replica", "expected"),
    [
        (PAUSES_MAX, 1.0, 9.0, True, "fail"),
        (1, 99.0, 0.5, True, "elsewhere"),
        (1, WAITED_S, 9.0, False, "wait"),
        (1, WAITED_S + 1, 9.0, False, "fail"),
        (1, 2.0, 2.0, False, "fail"),
    ],
)
def test_a_slice_that_was_refused_for_a_while_is_tried_once_more(
    pauses: int, pause_s: float, time_left_s: float, *, has_other_replica: bool, expected: str
) -> None:
    assert expected == second_try(pauses, pause_s, time_left_s, has_other_replica=has_other_replica)


def test_pauses_of_replicas_have_a_least_length_and_end_before_a_deadline() -> None:
    assert [HOLD_MIN_S, 3.0] == [hold_s(pause_s) for pause_s in (0.0, 3.0)]
    assert [False, False, True] == [is_held_past(wait_s, 9.0, 5.0) for wait_s in (None, 4.0, 4.5)]


def test_two_refusals_of_different_inputs_within_a_while_are_of_all() -> None:
    assert is_overload_of_all(TOGETHER_S - 1, is_same_input=False)
    assert not is_overload_of_all(TOGETHER_S - 1, is_same_input=True)
    assert not is_overload_of_all(TOGETHER_S, is_same_input=False)


def test_unsupported_work_goes_to_each_untried_replica_without_budget() -> None:
    error, policy = UnsupportedWork(MESSAGE), RetryPolicy(SETTINGS, 0.0)
    decisions = [
        policy.decide(
            error,
            slices=1,
            is_wanted=is_wanted,
            has_other_replica=True,
            now_s=0.0,
            has_untried_replica=has_untried,
        )
        for is_wanted, has_untried in [(True, True)] * 20 + [(True, False), (False, True)]
    ]

    assert [Retry(error, same_replica=False)] * 20 == decisions[:20]
    assert [Fail(error, blames_input=True)] * 2 == decisions[20:]
    assert policy.try_hedge(0.0)
    assert [True, True, False] == [
        counts_for_replica(failure) for failure in (error, ReplicaFailed(""), InvalidWork(""))
    ]
