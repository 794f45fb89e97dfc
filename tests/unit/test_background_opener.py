"""Files that take long to open, or cannot be opened."""

import asyncio
import threading

import pytest

from backends.contract.errors import ModelUnavailable
from gateway.upstreams import background_opener
from gateway.upstreams.background_opener import BackgroundOpener
from tests.waiting import PATIENCE_S


def fail() -> int:
    raise ModelUnavailable("no such file")


async def test_all_callers_share_one_opening() -> None:
    opened, gate = list[int](), threading.Event()

    def open_once() -> int:
        gate.wait(PATIENCE_S)
        opened.append(1)
        return 7

    opener: BackgroundOpener[int] = BackgroundOpener()
    first, second = [asyncio.create_task(opener.get(open_once)) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    gate.set()

    assert 7 == await second == await opener.get(open_once) == opener.resource
    assert [1] == opened


async def test_callers_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_opener, "OPEN_TIMEOUT_S", 0.05)
    gate, opener = threading.Event(), BackgroundOpener[int]()
    with pytest.raises(ModelUnavailable, match="within"):
        await opener.get(lambda: int(gate.wait(PATIENCE_S)))
    monkeypatch.setattr(background_opener, "OPEN_TIMEOUT_S", 10)
    gate.set()

    # The opening went on.
    assert 1 == await opener.get(fail)


async def test_failure_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    opener: BackgroundOpener[int] = BackgroundOpener()
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="no such file"):
            await opener.get(fail)
    with pytest.raises(ModelUnavailable):
        await opener.get(lambda: 1)
    monkeypatch.setattr(background_opener, "RETRY_S", 0)

    assert 1 == await opener.get(lambda: 1)


async def test_unexpected_error_is_reported_too() -> None:
    opener: BackgroundOpener[int] = BackgroundOpener()
    with pytest.raises(ModelUnavailable, match="ZeroDivisionError"):
        await opener.get(lambda: 1 // 0)
