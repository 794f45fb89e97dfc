"""Suspects: inputs that failed alone and tenants whose inputs break servers, remembered for a while."""

from backends.contract import Embed, Rerank
from gateway.lane.isolation import (
    CRASHES_KEPT_S,
    CRASHES_MAX,
    INPUTS_MAX,
    KEPT_S,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    Suspects,
)


def test_remembers_an_input_for_some_minutes_by_its_text_query_and_kind() -> None:
    suspects = Suspects()
    suspects.add(Embed(("bad",)), 0.0, is_blamed=False)

    assert [1, 3] == suspects.places_in(Embed(("a", "bad", "b", "bad")), KEPT_S - 1)
    assert [] == suspects.places_in(Rerank("q", ("bad",)), 0.0)
    assert [] == suspects.places_in(Embed(("bad",)), KEPT_S)
    assert 0 == len(suspects)

    suspects.add(Rerank("q", ("bad",)), 0.0, is_blamed=True)
    assert [0] == suspects.places_in(Rerank("q", ("bad", "good")), 0.0)
    assert [] == suspects.places_in(Rerank("another", ("bad",)), 0.0)


def test_an_input_with_other_options_is_another_one() -> None:
    suspects = Suspects()
    suspects.add(Embed(("bad",), dimensions=5000), 0.0, is_blamed=True)

    assert [] == suspects.places_in(Embed(("bad",)), 0.0)
    assert [0] == suspects.places_in(Embed(("bad",), dimensions=5000), 0.0)


def test_a_refusal_is_remembered_until_the_input_is_computed() -> None:
    suspects, work = Suspects(), Embed(("bad",))
    suspects.add(work, 0.0, is_blamed=True)
    suspects.add(work, 1.0, is_blamed=False)
    assert suspects.recall(work) == (True, False, 1.0 + KEPT_S)

    suspects.forget(work)
    assert suspects.recall(work) is None
    assert 0 == len(suspects)


def test_bounds_the_number_of_inputs_and_drops_the_oldest() -> None:
    suspects = Suspects()
    for index in range(INPUTS_MAX + 5):
        suspects.add(Embed((str(index),)), 0.0, is_blamed=False)

    assert INPUTS_MAX == len(suspects)
    assert [1] == suspects.places_in(Embed(("4", "5")), 0.0)


def test_a_tenant_pauses_longer_with_each_server_that_its_inputs_break() -> None:
    suspects = Suspects()
    pauses_s = []
    for _ in range(8):
        suspects.add_crash("breaker", 10.0)
        pauses_s.append(max(0.0, suspects.paused_until_s("breaker") - 10.0))

    assert [0.0, PAUSE_MIN_S, 2 * PAUSE_MIN_S] == pauses_s[:3]
    assert PAUSE_MAX_S == pauses_s[-1]
    assert 0.0 == suspects.paused_until_s("other")


def test_a_tenant_is_trusted_again_after_a_minute() -> None:
    suspects = Suspects()
    states = []
    for _ in range(CRASHES_MAX):
        suspects.add_crash("breaker", 0.0)
        states.append(suspects.breaks_servers("breaker", 1.0))

    assert [False] * (CRASHES_MAX - 1) + [True] == states
    assert not suspects.breaks_servers("breaker", CRASHES_KEPT_S)
    assert not suspects.breaks_servers("other", 1.0)
