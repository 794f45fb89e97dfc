"""Watch over replicas that stay slow: after how long, and how often they are reported."""

from gateway.routing.choice import SAMPLES_MIN, Pace, relative_slowness
from gateway.routing.slowness import SlowWatch

ONE, TWO = ("up", "one"), ("up", "two")


def test_replica_is_reported_once_after_it_was_slow_for_long_enough() -> None:
    watch = SlowWatch(3.0, 60.0)

    assert [] == watch.look({ONE: 1.0, TWO: 3.0}, 0.0)
    assert [] == watch.look({ONE: 1.0, TWO: 50.0}, 59.0)
    assert [TWO] == watch.look({ONE: 1.0, TWO: 3.0}, 60.0)
    assert [] == watch.look({ONE: 1.0, TWO: 3.0}, 600.0)


def test_faster_moment_begins_a_new_spell() -> None:
    watch = SlowWatch(3.0, 60.0)
    watch.look({TWO: 9.0}, 0.0)
    watch.look({TWO: 2.9}, 50.0)

    assert [] == watch.look({TWO: 9.0}, 61.0)
    assert [TWO] == watch.look({TWO: 9.0}, 121.0)


def test_replica_that_is_removed_or_recovers_is_forgotten() -> None:
    watch = SlowWatch(3.0, 60.0)
    watch.look({TWO: 9.0}, 0.0)
    assert [TWO] == watch.look({TWO: 9.0}, 60.0)
    watch.look({}, 61.0)
    watch.look({TWO: 9.0}, 62.0)

    assert [TWO] == watch.look({TWO: 9.0}, 122.0)


def test_slowness_is_against_the_fastest_and_1_without_a_record() -> None:
    fast, slow, unknown = Pace(), Pace(), Pace()
    for _ in range(SAMPLES_MIN):
        fast.add(0.5)
        slow.add(2.0)
    unknown.add(100.0)

    assert [1.0, 4.0, 1.0] == relative_slowness([fast, slow, unknown])
    assert [1.0] == relative_slowness([unknown])
    assert [] == relative_slowness([])
