"""An engine process keeps running until a setting changes that it was started with."""

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
    ("change", "serves"),
    [
        ({"queue_tokens": 9}, True),
        ({"prompts": {"query": "q: "}}, True),
        ({"api_key": "x"}, True),
        ({"hedge_share": 0.0}, True),
        ({"model": "x"}, False),
        ({"dtype": "float16"}, False),
        ({"request_tokens": 9}, False),
        ({"preload": False}, False),
        ({"when_loading": "refuse"}, False),
    ],
    ids=str,
)
async def test_only_load_settings_need_a_new_process(change: dict[str, object], *, serves: bool) -> None:
    changed = msgspec.structs.replace(ONE, **change)

    assert serves is engine(one=ONE, two=TWO).serves({"two": TWO, "one": changed}, BOUNDS)


async def test_members_and_bounds_identify_a_process() -> None:
    running = engine(one=ONE, two=TWO)

    assert not running.serves({"one": ONE}, BOUNDS)
    assert not running.serves({"one": ONE, "two": TWO, "three": TWO}, BOUNDS)
    assert not running.serves({"one": ONE, "two": TWO}, EngineSettings(memory_bytes=9))


async def test_waits_for_every_model_preloaded_or_not() -> None:
    running = engine(one=ONE, two=TWO)
    waiting = asyncio.create_task(load_problems([running], 5))
    running.record_state(wire.State("one", "loading", "weights"))
    running.record_state(wire.State("one", "failed", "no such folder"))
    await asyncio.sleep(0)
    assert not waiting.done()
    running.record_state(wire.State("two", "unloaded"))

    assert {"one": "no such folder"} == await waiting


async def test_reports_a_model_that_does_not_load_in_time() -> None:
    running = engine(one=ONE, two=TWO)
    running.record_state(wire.State("one", "loaded"))
    # A restarted engine reports its models again.
    running.record_state(wire.State("one", "loaded"))

    assert {"two": "its model has not loaded within 0.01 s"} == await load_problems([running], 0.01)
