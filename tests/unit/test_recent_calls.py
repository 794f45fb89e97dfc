"""The last calls: what is kept, the bound, and the files that workers share."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from gateway.events import AttemptFinished, CallFinished
from gateway.telemetry.history import CALLS_MAX, FAILED_OF_TENANT, FAILED_TENANTS, FORGOTTEN_MAX, RecentCalls


def call(request_id: str, route: str = "/v1/embeddings") -> CallFinished:
    return CallFinished(
        request_id,
        "POST",
        route,
        200,
        "ok",
        0.02,
        "acme",
        "bge",
        1,
        7,
        stages={"queue": 0.001},
        key_id="acme-1",
    )


def ticking() -> Callable[[], float]:
    ticks = count(1000)
    return lambda: float(next(ticks))


def test_calls_are_listed_from_the_newest() -> None:
    recent = RecentCalls(clock=ticking())
    recent.observe(call("first"))
    recent.observe(AttemptFinished("u", "r", "ok", 0.1))
    recent.observe(call("poll", "/admin/status"))
    recent.observe(call("second"))

    second, first = recent.calls()
    assert (second.request_id, second.at_s) == ("second", 1001)
    assert (first.tenant, first.key_id, first.model, first.tokens) == ("acme", "acme-1", "bge", 7)
    assert first.stages == {"queue": 0.001}


def test_the_number_of_calls_is_bounded() -> None:
    recent = RecentCalls(clock=ticking())
    for number in range(CALLS_MAX * 2):
        recent.observe(call(str(number)))
    found = recent.calls()
    assert len(found) == CALLS_MAX
    assert found[0].request_id == str(CALLS_MAX * 2 - 1)


def test_workers_see_each_others_calls(tmp_path: Path) -> None:
    clock = ticking()
    workers = [RecentCalls(tmp_path, worker, clock) for worker in range(2)]
    for number in range(4):
        workers[number % 2].observe(call(str(number)))
    for worker in workers:
        worker.write()

    listed = [[found.request_id for found in worker.calls()] for worker in workers]
    assert listed == [["3", "2", "1", "0"]] * 2
    # A file that cannot be read is left out.
    (tmp_path / "recent-calls-1.json").write_bytes(b"[{")
    assert [found.request_id for found in workers[0].calls()] == ["2", "0"]


def failed_call(request_id: str, tenant: str) -> CallFinished:
    return msgspec.structs.replace(call(request_id), tenant=tenant, status=502, outcome="upstream_failed")


def test_the_failures_of_a_tenant_outlast_the_calls_of_others(tmp_path: Path) -> None:
    clock = ticking()
    workers = [RecentCalls(tmp_path, worker, clock) for worker in range(2)]
    workers[0].observe(failed_call("quiet", "small"))
    for number in range(CALLS_MAX * 2):
        workers[number % 2].observe(call(str(number)))
        workers[1].observe(failed_call(f"failed-{number}", "noisy"))
    for worker in workers:
        worker.write()

    for worker in workers:
        found = [found.request_id for found in worker.calls()]
        assert found[-1] == "quiet"
        assert len(found) == len(set(found)) < CALLS_MAX * 2


def test_the_number_of_kept_failures_is_bounded() -> None:
    recent = RecentCalls(clock=ticking())
    for number in range(FAILED_TENANTS * 3):
        for _ in range(FAILED_OF_TENANT * 2):
            recent.observe(failed_call("failed", f"tenant-{number}"))
    for number in range(CALLS_MAX):
        recent.observe(call(str(number)))
    assert len(recent.calls()) == CALLS_MAX + FAILED_TENANTS * FAILED_OF_TENANT


def test_calls_of_a_removed_tenant_are_forgotten_by_all_workers(tmp_path: Path) -> None:
    clock = ticking()
    workers = [RecentCalls(tmp_path, worker, clock) for worker in range(2)]
    for worker in workers:
        worker.observe(call("of its predecessor"))
        worker.observe(failed_call("failed", "acme"))
        worker.observe(failed_call("of another", "globex"))
        worker.write()
    workers[0].forget({"acme"})
    # The other one has not noticed yet.
    assert {"of another"} == {found.request_id for found in workers[0].calls()}
    assert not workers[0].calls("acme")
    workers[0].write()
    assert 4 == len(workers[1].calls()), "its own, and what the first one has left"
    workers[1].forget({"acme"})
    workers[1].write()
    workers[0].observe(call("new"))
    workers[0].write()
    assert ["new"] == [found.request_id for found in workers[1].calls("acme")]
    assert ["new"] == [found.request_id for found in RecentCalls(tmp_path, 2, clock).calls("acme")]
    workers[0].forget({"acme"})
    workers[1].forget({"globex", "acme"})
    for worker in workers:
        worker.write()
    assert ["of another"] == [found.request_id for found in workers[0].calls()]


def test_calls_that_end_at_the_same_time_are_in_order() -> None:
    recent = RecentCalls(clock=lambda: 1.0)
    for name in ("first", "second"):
        recent.observe(call(name))
    assert ["second", "first"] == [found.request_id for found in recent.calls()]


def test_the_number_of_forgotten_tenants_is_bounded() -> None:
    recent = RecentCalls(clock=ticking())
    recent.forget([f"tenant-{number}" for number in range(FORGOTTEN_MAX * 2)])
    assert FORGOTTEN_MAX == len(recent._forgotten)
