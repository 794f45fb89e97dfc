"""An engine's process goes on for as long as nothing changes that it was started with."""

import asyncio

import msgspec
import pytest

from backends.torch import wire
from gateway.config.schema import EngineSettings, UpstreamSettings
from gateway.processes.engine_pool import EngineProcess, load_problems
from gateway.processes.engine_process import EngineGroup

ONE = UpstreamSettings(backend="torch", model="one")
TWO = UpstreamSettings(backend="torch", model="two", preload=False)
BOUNDS = EngineSettings()


def engine(**upstreams: UpstreamSettings) -> EngineProcess:
    return EngineProcess(EngineGroup("engine", "/tmp/engine.sock", upstreams), BOUNDS)


@pytest.mark.parametrize(
    "change", [{"queue_tokens": 9}, {"prompts": {"query": "q: "}}, {"api_key": "x"}, {"hedge_share": 0.0}]
)
async def test_what_concerns_a_lane_needs_no_other_process(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(ONE, **change)

    assert engine(one=ONE, two=TWO).serves({"two": TWO, "one": changed}, BOUNDS)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x"},
        {"dtype": "float16"},
        {"batch_tokens": 9},
        {"preload": False},
        {"when_loading": "refuse"},
    ],
)
async def test_what_a_model_is_loaded_with_needs_another_process(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(ONE, **change)

    assert not engine(one=ONE, two=TWO).serves({"one": changed, "two": TWO}, BOUNDS)


async def test_who_shares_a_process_and_its_bounds_are_part_of_it() -> None:
    running = engine(one=ONE, two=TWO)

    assert not running.serves({"one": ONE}, BOUNDS)
    assert not running.serves({"one": ONE, "two": TWO, "three": TWO}, BOUNDS)
    assert not running.serves({"one": ONE, "two": TWO}, EngineSettings(memory_bytes=9))


async def test_all_models_of_an_engine_are_waited_for_whether_they_are_loaded_at_the_start_or_not() -> None:
    running = engine(one=ONE, two=TWO)
    waiting = asyncio.create_task(load_problems([running], 5))
    running.record_state(wire.State("one", "loading", "weights"))
    running.record_state(wire.State("one", "failed", "no such folder"))
    await asyncio.sleep(0)
    assert not waiting.done()
    running.record_state(wire.State("two", "unloaded"))

    assert {"one": "no such folder"} == await waiting


async def test_a_model_that_does_not_load_in_time_is_a_problem_of_its_own() -> None:
    running = engine(one=ONE, two=TWO)
    running.record_state(wire.State("one", "loaded"))
    # Started again after a crash, it tells once more.
    running.record_state(wire.State("one", "loaded"))

    assert {"two": "its model has not loaded within 0.01 s"} == await load_problems([running], 0.01)
