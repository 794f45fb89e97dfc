"""Who leaves memory, and in which order."""

from hypothesis import given
from hypothesis import strategies as st

from backends.torch.eviction import Resident, idle_models, models_to_evict

RESIDENTS = st.lists(
    st.builds(
        Resident,
        name=st.uuids().map(str),
        memory_bytes=st.integers(0, 50),
        used_s=st.floats(0, 100),
        busy=st.booleans(),
    ),
    unique_by=lambda one: one.name,
    max_size=8,
)


def three(*, busy: str = "") -> list[Resident]:
    return [Resident(name, 10, float(i), busy=name in busy) for i, name in enumerate("abc")]


def test_nobody_leaves_while_there_is_room() -> None:
    assert models_to_evict(three(), 10, 40) == []


def test_the_least_recently_used_goes_first() -> None:
    assert models_to_evict(three(), 10, 30) == ["a"]
    assert models_to_evict(three(), 20, 30) == ["a", "b"]


def test_who_has_work_goes_after_all_who_have_none() -> None:
    assert models_to_evict(three(busy="a"), 10, 30) == ["b"]
    assert models_to_evict(three(busy="ab"), 20, 30) == ["c", "a"]


def test_for_what_never_fits_nobody_has_to_leave() -> None:
    assert models_to_evict(three(), 31, 30) is None
    assert models_to_evict([], 30, 30) == []


@given(RESIDENTS, st.integers(0, 100), st.integers(1, 100))
def test_there_is_room_afterwards_and_nobody_left_in_vain(
    residents: list[Resident], needed: int, budget: int
) -> None:
    leaving = models_to_evict(residents, needed, budget)

    if leaving is None:
        assert needed > budget
        return
    sizes = {one.name: one.memory_bytes for one in residents}
    left = sum(sizes.values()) - sum(sizes[name] for name in leaving)
    assert left + needed <= budget or not set(sizes) - set(leaving)
    if leaving:
        # Without the last to leave there would have been too little.
        assert left + sizes[leaving[-1]] + needed > budget


def test_who_has_had_no_work_for_so_long_is_idle() -> None:
    assert idle_models(three(busy="a"), now_s=11.0, idle_s=10.0) == ["b"]
