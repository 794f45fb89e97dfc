"""Choice and order of the models to evict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.torch.serving.eviction import Resident, idle_models, models_to_evict

RESIDENTS = st.lists(
    st.builds(
        Resident,
        name=st.uuids().map(str),
        memory_bytes=st.integers(0, 50),
        used_s=st.floats(0, 100),
        busy=st.booleans(),
    ),
    unique_by=lambda resident: resident.name,
    max_size=8,
)


def three(*, busy: str = "") -> list[Resident]:
    return [Resident(name, 10, float(i), busy=name in busy) for i, name in enumerate("abc")]


@pytest.mark.parametrize(
    ("busy", "needed", "budget", "evicted"),
    [
        ("", 10, 40, []),
        # The least recently used first, and busy ones last.
        ("", 10, 30, ["a"]),
        ("", 20, 30, ["a", "b"]),
        ("a", 10, 30, ["b"]),
        ("ab", 20, 30, ["c", "a"]),
        # It never fits.
        ("", 31, 30, None),
    ],
)
def test_evicts_what_makes_room(busy: str, needed: int, budget: int, evicted: list[str] | None) -> None:
    assert models_to_evict(three(busy=busy), needed, budget) == evicted
    assert models_to_evict([], budget, budget) == []


@given(RESIDENTS, st.integers(0, 100), st.integers(1, 100))
def test_makes_room_with_no_unnecessary_eviction(residents: list[Resident], needed: int, budget: int) -> None:
    evicted = models_to_evict(residents, needed, budget)

    if evicted is None:
        assert needed > budget
        return
    sizes = {resident.name: resident.memory_bytes for resident in residents}
    remaining = sum(sizes.values()) - sum(sizes[name] for name in evicted)
    assert remaining + needed <= budget or not set(sizes) - set(evicted)
    if evicted:
        # Without the last eviction there would not be enough room.
        assert remaining + sizes[evicted[-1]] + needed > budget


def test_models_without_recent_work_are_idle() -> None:
    assert idle_models(three(busy="a"), now_s=11.0, idle_s=10.0) == ["b"]
