"""Slots for chunks: a tenant that has none gets one soon, whatever the others do."""

import pytest

from gateway.batches.shares import CHUNKS_LIMIT, CHUNKS_MAX, CHUNKS_PER_TENANT, TURN_S, Slots


def begin(slots: Slots, tenant: str, now_s: float = 0.0, *, is_brief: bool = False) -> bool:
    if not slots.may_take(tenant, is_brief=is_brief):
        return False
    slots.take(tenant, now_s, is_brief=is_brief)
    return True


def test_a_tenant_takes_a_quarter_of_the_slots_at_most() -> None:
    slots = Slots()

    assert [begin(slots, "acme") for _ in range(CHUNKS_PER_TENANT + 1)] == [True] * CHUNKS_PER_TENANT + [
        False
    ]
    assert begin(slots, "other")


def test_a_tenant_without_a_slot_takes_one_more_and_the_largest_gives_way() -> None:
    slots = Slots()
    for number in range(CHUNKS_MAX):
        assert begin(slots, f"tenant-{number // CHUNKS_PER_TENANT}", now_s=number)
    assert slots.ask_back(100.0) == []
    assert begin(slots, "new")
    assert not begin(slots, "new")

    (slot,) = slots.ask_back(100.0)

    assert (slot.tenant, slot.since_s) == ("tenant-0", 0)


def test_tenants_with_one_slot_each_take_turns() -> None:
    slots = Slots()
    now_s = 0.0
    served: set[str] = set()
    for _ in range(12):
        for tenant in sorted((f"tenant-{number}" for number in range(100)), key=slots.need):
            begin(slots, tenant, now_s)
        assert len(slots.taken) <= CHUNKS_LIMIT
        served |= {slot.tenant for slot in slots.taken}
        now_s += TURN_S
        for slot in slots.ask_back(now_s):
            slots.give_back(slot)

    assert len(served) == 100


def test_validations_have_slots_of_their_own_one_for_each_tenant() -> None:
    slots = Slots()
    for number in range(CHUNKS_LIMIT):
        begin(slots, f"tenant-{number}")

    assert begin(slots, "acme", is_brief=True)
    assert not begin(slots, "acme", is_brief=True)
    assert begin(slots, "other", is_brief=True)
    assert slots.need("acme")[0] == 0


@pytest.mark.parametrize("tenants", [1, 3, 5, 40])
def test_slots_that_are_given_back_leave_every_tenant_one(tenants: int) -> None:
    slots = Slots()
    for _ in range(CHUNKS_LIMIT):
        for number in range(tenants):
            begin(slots, f"tenant-{number}")
    before = {slot.tenant for slot in slots.taken}
    for slot in slots.ask_back(TURN_S / 2):
        slots.give_back(slot)

    assert {slot.tenant for slot in slots.taken} == before
