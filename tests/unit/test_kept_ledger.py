"""Days, months, budgets and usage of a gateway without Redis outlive its process."""

import asyncio
import stat
from pathlib import Path

import pytest

from gateway.errors import QuotaExceeded
from gateway.events import BudgetAlert, Event
from gateway.quotas import kept_ledger
from gateway.quotas.kept_ledger import COUNTS_FILE, USAGE_FOLDER, KeptLedger
from gateway.quotas.ledger import QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost, Limit, parse_limit
from gateway.quotas.usage import TenantUsage, UsageSum
from tests.waiting import PATIENCE_S

START_US = 1_795_773_600 * SECOND_US  # 2026-11-27 10:00 UTC
DAY_US = 24 * 3600 * SECOND_US
LIMITS = (
    parse_limit("tokens_per_day", 100),
    parse_limit("budget_per_month", 1),
    parse_limit("requests_per_hour", 3),
)


class Clock:
    """Wall clock that a test moves."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def call(
    ledger: KeptLedger, tokens: int, limits: tuple[Limit, ...] = LIMITS, tenant: str = "acme"
) -> None:
    number = id(object())
    cost = Cost(tokens=tokens, budget=tokens * 10**6)
    request = QuotaRequest(f"{number}-{tokens}", tenant, limits, cost, 60 * SECOND_US, "m", key="ci")
    ledger.settle(await ledger.reserve(request), cost)


def day(clock: Clock) -> str:
    return kept_ledger.day_of(clock())


async def test_sums_have_the_days_of_earlier_processes(tmp_path: Path, clock: Clock) -> None:
    days = []
    ledger = KeptLedger(tmp_path, clock)
    for number in range(5):
        days.insert(0, day(clock))
        await call(ledger, 10 + number, ())
        await call(ledger, 1, (), "globex")
        await ledger.aclose()
        clock.now_us += DAY_US
        ledger = KeptLedger(tmp_path, clock)
    days.insert(0, day(clock))
    await call(ledger, 7, ())
    for _ in range(2):
        sums = await ledger.usage_sums(["acme", "globex", "none"], days)
        assert UsageSum(1, 7, 7 * 10**6) == sums["acme"].latest
        assert UsageSum(6, 67, 67 * 10**6) == sums["acme"].total
        assert UsageSum(5, 5, 5 * 10**6) == sums["globex"].total
        assert TenantUsage() == sums["none"]
    assert UsageSum(2, 21, 21 * 10**6) == (await ledger.usage_sums(["acme"], days[4:]))["acme"].total
    assert UsageSum(1, 14, 14 * 10**6) == (await ledger.usage_sums(["acme"], days[1:]))["acme"].latest
    await ledger.aclose()


async def test_days_months_and_usage_outlive_the_process(tmp_path: Path, clock: Clock) -> None:
    ledger = KeptLedger(tmp_path, clock)
    await call(ledger, 60)
    await ledger.aclose()

    again = KeptLedger(tmp_path, clock)
    with pytest.raises(QuotaExceeded, match="tokens_per_day"):
        await call(again, 41)
    await call(again, 40)
    [row] = await again.usage("acme", [day(clock)], "key")
    assert (row.requests, row.tokens, row.key, row.cost) == (2, 100, "ci", 0.1)
    assert again.spent_share("acme", LIMITS[1]) == pytest.approx(0.1)
    # Rates start from full: one of three is used.
    assert again.spent_share("acme", LIMITS[2]) == pytest.approx(1 / 3)
    await again.aclose()


async def test_a_new_day_starts_again_and_past_usage_stays(tmp_path: Path, clock: Clock) -> None:
    ledger = KeptLedger(tmp_path, clock)
    await call(ledger, 100)
    await ledger.aclose()
    first = day(clock)
    clock.now_us += 3 * DAY_US

    again = KeptLedger(tmp_path, clock)
    await call(again, 100)
    assert [row.tokens for row in await again.usage("acme", [first, day(clock)])] == [100, 100]
    assert again.spent_share("acme", LIMITS[1]) == pytest.approx(0.2)
    await again.aclose()


async def test_written_while_it_runs(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_ledger, "WRITE_EVERY_S", 0.01)
    ledger = KeptLedger(tmp_path, clock)
    await call(ledger, 60)
    running = asyncio.create_task(ledger.maintain())
    written = (tmp_path / COUNTS_FILE, tmp_path / USAGE_FOLDER / f"{day(clock)}.json")
    async with asyncio.timeout(PATIENCE_S):
        while not all(path.exists() for path in written):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    # As after a kill: the lock goes with the process, and nothing is written at the end.
    ledger._folder.release()
    again = KeptLedger(tmp_path, clock)
    with pytest.raises(QuotaExceeded):
        await call(again, 41)
    await again.aclose()


async def test_unfinished_calls_count_as_spent(tmp_path: Path, clock: Clock) -> None:
    ledger = KeptLedger(tmp_path, clock)
    await ledger.reserve(QuotaRequest("open", "acme", LIMITS, Cost(tokens=90), 60 * SECOND_US, "m"))
    await ledger.aclose()
    again = KeptLedger(tmp_path, clock)
    with pytest.raises(QuotaExceeded):
        await call(again, 11)
    await again.aclose()


async def test_an_alert_is_given_once_in_a_period(tmp_path: Path, clock: Clock) -> None:
    events: list[Event] = []
    ledger = KeptLedger(tmp_path, clock, events.append)
    await call(ledger, 850, LIMITS[1:])
    await ledger.aclose()
    again = KeptLedger(tmp_path, clock, events.append)
    await call(again, 10, LIMITS[1:])
    await again.aclose()
    assert len([event for event in events if isinstance(event, BudgetAlert)]) == 1


async def test_a_second_gateway_keeps_nothing_and_says_so(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_ledger, "WRITE_EVERY_S", 0.01)
    first, second = KeptLedger(tmp_path, clock), KeptLedger(tmp_path, clock)
    [line] = caplog.messages
    assert "another gateway keeps its quotas" in line
    assert "set `state_dir`" in line
    await call(first, 50)
    await call(second, 20)
    await first.aclose()
    # It takes over once the first has ended, and adds what that counted.
    running = asyncio.create_task(second.maintain())
    async with asyncio.timeout(PATIENCE_S):
        while not second._folder.is_held:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(QuotaExceeded):
        await call(second, 31)
    [row] = await second.usage("acme", [day(clock)])
    assert row.tokens == 70
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await second.aclose()


def test_a_folder_that_cannot_be_used_is_reported(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    KeptLedger(tmp_path / "state", clock)
    [line] = caplog.messages
    assert "are lost at the next start" in line


async def test_a_file_that_cannot_be_read_is_set_aside(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / COUNTS_FILE).write_text('[{"tenant": 1}]')
    ledger = KeptLedger(tmp_path, clock)
    await call(ledger, 5)
    await ledger.aclose()
    assert any("counts as empty" in line for line in caplog.messages)
    assert (tmp_path / "quotas.unreadable").read_text() == '[{"tenant": 1}]'


async def test_usage_is_kept_for_400_days_and_leaves_memory(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_ledger, "WRITE_EVERY_S", 0.01)
    ledger = KeptLedger(tmp_path, clock)
    running = asyncio.create_task(ledger.maintain())
    first = day(clock)
    await call(ledger, 1)
    clock.now_us += 2 * DAY_US
    await call(ledger, 2)
    async with asyncio.timeout(PATIENCE_S):
        while ("acme", first) in ledger._usage:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [row.tokens for row in await ledger.usage("acme", [first, day(clock)])] == [1, 2]
    clock.now_us += 399 * DAY_US
    await call(ledger, 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await ledger.aclose()
    kept = sorted(path.stem for path in (tmp_path / USAGE_FOLDER).iterdir())
    assert first not in kept
    assert len(kept) == 2
