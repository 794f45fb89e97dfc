"""Refusals by the last known state of limits: they equal what the ledger itself would decide."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import QuotaExceeded
from gateway.quotas.ledger import MemoryLedger, QuotaRequest, Reservation
from gateway.quotas.limits import SECOND_US, Cost, Limit, parse_limit

NAMES = (
    "requests_per_second",
    "requests_per_minute",
    "tokens_per_minute",
    "inputs_per_hour",
    "tokens_per_day",
)
AMOUNTS = st.dictionaries(st.sampled_from(NAMES), st.integers(20, 50), min_size=1)
COSTS = st.builds(Cost, st.just(1), st.integers(0, 20), st.integers(1, 5))
# The time that passes, and the cost of a request; or None to settle the oldest one at nothing.
STEPS = st.lists(st.tuples(st.integers(0, SECOND_US - 1), COSTS | st.none()), max_size=30)


class Tenant:
    """A tenant whose clock the test moves, and its ledger."""

    def __init__(self, limits: tuple[Limit, ...]) -> None:
        self.now_us = 1_700_000_000 * SECOND_US
        self.ledger = MemoryLedger(lambda: self.now_us)
        self.open: list[Reservation] = []
        self._limits = limits
        self._number = 0

    def refuse_early(self, cost: Cost) -> QuotaExceeded | None:
        """Return the refusal without a reserve, None if there is none."""
        try:
            self.ledger.refuse_if_spent("acme", self._limits, cost)
        except QuotaExceeded as error:
            return error
        return None

    def reserve(self, cost: Cost) -> QuotaExceeded | None:
        """Reserve a cost and return the refusal, None if it was admitted."""
        self._number += 1
        request = QuotaRequest(str(self._number), "acme", self._limits, cost, 60 * SECOND_US, "m")
        try:
            # The ledger in memory never waits.
            self.ledger.reserve(request).send(None)  # type: ignore[attr-defined]
        except StopIteration as reserved:
            self.open.append(reserved.value)
        except QuotaExceeded as error:
            return error
        return None


@settings(max_examples=500)
@given(AMOUNTS, STEPS)
def test_an_early_refusal_is_the_ledgers_own(
    amounts: dict[str, int], steps: list[tuple[int, Cost | None]]
) -> None:
    tenant = Tenant(tuple(parse_limit(name, amount) for name, amount in amounts.items()))
    for elapsed_us, cost in steps:
        tenant.now_us += elapsed_us
        if cost is None:
            if tenant.open:
                tenant.ledger.settle(tenant.open.pop(0), Cost(0))
            continue
        early, late = tenant.refuse_early(cost), tenant.reserve(cost)
        if early is not None:
            assert late is not None
            assert (early.retry_after_s, early.unit) == (late.retry_after_s, late.unit)
            assert early.headers.keys() == late.headers.keys()


def test_a_refusal_is_repeated_early_with_the_rest_of_its_wait() -> None:
    tenant = Tenant((parse_limit("inputs_per_minute", 6),))
    tenant.reserve(Cost(inputs=6))
    late = tenant.reserve(Cost(inputs=2))
    tenant.now_us += SECOND_US // 2
    early = tenant.refuse_early(Cost(inputs=1))
    tenant.now_us += SECOND_US // 2

    assert late is not None
    assert early is not None
    assert (20, 10) == (late.retry_after_s, early.retry_after_s)
    assert "nothing is left, and this call costs at least 1 input; try again in 10s" in early.message
    assert tenant.refuse_early(Cost(inputs=1)) is None


def test_one_request_a_second_passes_to_renew_an_old_report() -> None:
    tenant = Tenant((parse_limit("inputs_per_minute", 6),))
    tenant.reserve(Cost(inputs=6))
    tenant.reserve(Cost(inputs=1))
    passed = []
    for _ in range(9):
        tenant.now_us += SECOND_US // 2
        passed += [tenant.refuse_early(Cost(inputs=1)) is None for _ in range(3)]

    # The report is half a second old at first, and one input is refilled in ten seconds.
    assert [3, 9, 15, 21] == [index for index, has_passed in enumerate(passed) if has_passed]
