"""Places for chunks: a tenant that has none gets one soon, whatever the others do."""

import pytest

from gateway.batches.shares import CHUNKS_LIMIT, CHUNKS_MAX, CHUNKS_PER_TENANT, TURN_S, ChunkPlaces


def begin(places: ChunkPlaces, tenant: str, now_s: float = 0.0, *, is_brief: bool = False) -> bool:
    if not places.may_take(tenant, is_brief=is_brief):
        return False
    places.take(tenant, now_s, is_brief=is_brief)
    return True


def test_a_tenant_takes_a_quarter_of_the_places_at_most() -> None:
    places = ChunkPlaces()

    assert [begin(places, "acme") for _ in range(CHUNKS_PER_TENANT + 1)] == [True] * CHUNKS_PER_TENANT + [
        False
    ]
    assert begin(places, "other")


def test_a_tenant_without_a_place_takes_one_more_and_the_largest_gives_way() -> None:
    places = ChunkPlaces()
    for number in range(CHUNKS_MAX):
        assert begin(places, f"tenant-{number // CHUNKS_PER_TENANT}", now_s=number)
    assert places.ask_back(100.0) == []
    assert begin(places, "new")
    assert not begin(places, "new")

    (place,) = places.ask_back(100.0)

    assert (place.tenant, place.since_s) == ("tenant-0", 0)


def test_tenants_with_one_place_each_take_turns() -> None:
    places = ChunkPlaces()
    now_s = 0.0
    served: set[str] = set()
    for _ in range(12):
        for tenant in sorted((f"tenant-{number}" for number in range(100)), key=places.need):
            begin(places, tenant, now_s)
        assert len(places.taken) <= CHUNKS_LIMIT
        served |= {place.tenant for place in places.taken}
        now_s += TURN_S
        for place in places.ask_back(now_s):
            places.give_back(place)

    assert len(served) == 100


def test_validations_have_places_of_their_own_one_for_each_tenant() -> None:
    places = ChunkPlaces()
    for number in range(CHUNKS_LIMIT):
        begin(places, f"tenant-{number}")

    assert begin(places, "acme", is_brief=True)
    assert not begin(places, "acme", is_brief=True)
    assert begin(places, "other", is_brief=True)
    assert places.need("acme")[0] == 0


@pytest.mark.parametrize("tenants", [1, 3, 5, 40])
def test_places_that_are_given_back_leave_every_tenant_one(tenants: int) -> None:
    places = ChunkPlaces()
    for _ in range(CHUNKS_LIMIT):
        for number in range(tenants):
            begin(places, f"tenant-{number}")
    before = {place.tenant for place in places.taken}
    for place in places.ask_back(TURN_S / 2):
        places.give_back(place)

    assert {place.tenant for place in places.taken} == before
