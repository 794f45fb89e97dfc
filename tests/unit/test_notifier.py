"""Webhook: signatures, repetitions, bounds, and the events that it is called on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gateway.config.load import parse_config
from gateway.config.notes import notes
from gateway.config.problems import ConfigError
from gateway.config.schema import NotifySettings
from gateway.events import BudgetAlert, CallFinished, ReplicaSlow, StoreLost
from gateway.processes import notifier
from gateway.processes.messages import Notice, Request
from gateway.processes.notices import notice_of
from gateway.processes.notifier import QUEUE_MAX, REPEAT_AFTER_S, Notifier
from loadtest.processes import free_port
from tests.fakes.hooks import until
from tests.fakes.webhook_receiver import receiving

SECRET = "a secret of the receiver"
BUDGET = BudgetAlert("acme", "budget_per_month", 4.0, 5.0)
SLOW = ReplicaSlow("embedder", "http://tei-1", 12.5, 60.0)
LOST = StoreLost(3, 2, "its keys are gone", "2026-11-28T18:00:00Z")


def notice(event: BudgetAlert | ReplicaSlow | StoreLost) -> Notice:
    found = notice_of(event)
    assert found is not None
    return found


class Clock:
    """Wall clock that a test moves."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def sending(url: str, *, clock: Clock | None = None, tries: int = 3) -> AsyncIterator[Notifier]:
    """Run a sender without pauses."""
    sender = Notifier(NotifySettings(url=url, secret=SECRET), clock or Clock(), (0.0,) * (tries - 1))
    running = asyncio.create_task(sender.run())
    yield sender
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_calls_are_signed_and_say_what_happened() -> None:
    with receiving(SECRET) as receiver:
        async with sending(receiver.url) as sender:
            for event in (BUDGET, SLOW, LOST):
                sender.enqueue(notice(event))
            await until(lambda: len(receiver.calls) == 3)
    budget, slow, lost = (call.body for call in receiver.calls)

    assert all(call.is_signed for call in receiver.calls)
    assert 3 == len({call.id for call in receiver.calls})
    assert {1_000_000} == {call.timestamp for call in receiver.calls}
    assert ["budget", "replica_slow", "store_loss"] == receiver.kinds()
    assert "1970-01-12T13:46:40+00:00" == budget["timestamp"]
    assert budget["gateway"]
    assert {"tenant": "acme", "budget": "budget_per_month", "spent": 4.0, "amount": 5.0} == budget["data"]
    assert "tenant acme: 80% of budget_per_month (5) is spent or reserved" == budget["text"]
    assert ("embedder", "http://tei-1", 12.5) == tuple(list(slow["data"].values())[:3])
    assert (3, 2) == (lost["data"]["keys"], lost["data"]["tenants"])


@pytest.mark.parametrize("failures", [[500], [503, 429], [408, 502]])
async def test_call_that_fails_is_repeated_with_its_id(failures: list[int]) -> None:
    with receiving(SECRET, *failures) as receiver:
        async with sending(receiver.url) as sender:
            sender.enqueue(notice(BUDGET))
            sender.enqueue(notice(SLOW))
            await until(lambda: len(receiver.calls) == len(failures) + 2)

    assert ["budget"] * (len(failures) + 1) + ["replica_slow"] == receiver.kinds()
    assert 2 == len({call.id for call in receiver.calls})


@pytest.mark.parametrize("status", [301, 400, 401, 404, 410])
async def test_refusal_ends_a_call_and_is_logged_without_the_address(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving(SECRET, status) as receiver, caplog.at_level(logging.ERROR):
        async with sending(receiver.url) as sender:
            sender.enqueue(notice(BUDGET))
            sender.enqueue(notice(SLOW))
            await until(lambda: len(receiver.calls) == 2)

    assert ["budget", "replica_slow"] == receiver.kinds()
    assert f"it answered with status {status}" in caplog.text
    assert "team=search" not in caplog.text
    assert SECRET not in caplog.text


async def test_call_is_given_up_after_the_last_repetition(caplog: pytest.LogCaptureFixture) -> None:
    with receiving(SECRET, *[500] * 3) as receiver, caplog.at_level(logging.ERROR):
        async with sending(receiver.url, tries=3) as sender:
            sender.enqueue(notice(BUDGET))
            sender.enqueue(notice(SLOW))
            await until(lambda: len(receiver.calls) == 4)

    assert ["budget"] * 3 + ["replica_slow"] == receiver.kinds()
    assert "a notice of budget could not be sent" in caplog.text


async def test_receiver_that_is_down_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with sending(f"http://127.0.0.1:{free_port()}/hook") as sender:
            sender.enqueue(notice(BUDGET))
            await until(lambda: "could not be sent" in caplog.text)

    assert "the receiver" in caplog.text or "connect" in caplog.text.lower()


async def test_same_event_is_sent_once_in_a_while() -> None:
    clock = Clock()
    with receiving(SECRET) as receiver:
        async with sending(receiver.url, clock=clock) as sender:
            for _ in range(3):
                sender.enqueue(notice(LOST))
            clock.now_s += REPEAT_AFTER_S + 1
            sender.enqueue(notice(LOST))
            sender.enqueue(notice(StoreLost(4, 2, "its keys are gone", "later")))
            await until(lambda: len(receiver.calls) == 3)

    assert [3, 3, 4] == [call.body["data"]["keys"] for call in receiver.calls]


async def test_queue_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    sender = Notifier(NotifySettings(url="http://127.0.0.1:9/", secret=SECRET), Clock())
    with caplog.at_level(logging.ERROR):
        for number in range(QUEUE_MAX + 3):
            sender.enqueue(notice(BudgetAlert(f"tenant-{number}", "budget_per_day", 4.0, 5.0)))

    assert 3 == caplog.text.count("is dropped")
    assert notifier.KEYS_MAX > QUEUE_MAX


def test_notices_fit_into_a_pipe_and_other_events_have_none() -> None:
    longest = notice(ReplicaSlow("𝕦" * 3000, "𝕣" * 3000, 3.0, 60.0))
    call = CallFinished("id", "POST", "/embed", 200, "ok", 0.1)

    assert len(msgspec.json.encode(Request(10**9, longest))) < 4096
    assert notice_of(call) is None
    assert notice_of(msgspec.structs.replace(LOST, is_repeated=True)) is None


CONFIG = """
notify: {{url: "{url}", secret: "{secret}"{more}}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei"]}}}}
models: {{bge: {{upstream: one}}}}
"""


@pytest.mark.parametrize(
    ("url", "secret", "more", "path"),
    [
        ("hooks.example/x", SECRET, "", "notify.url"),
        ("ftp://hooks.example/x", SECRET, "", "notify.url"),
        ("https:///x", SECRET, "", "notify.url"),
        ("https://hooks.example/x#part", SECRET, "", "notify.url"),
        ("https://hooks.example/a b", SECRET, "", "notify.url"),
        ("https://user:password@hooks.example/", SECRET, "", "notify.url"),
        ("https://hooks.example/", "short", "", "notify.secret"),
        ("https://hooks.example/", SECRET, ", on: []", "notify.on"),
        ("https://hooks.example/", SECRET, ", on: [fire]", "notify.on[0]"),
        ("https://hooks.example/", SECRET, ", on: [budget, budget]", "notify.on"),
        ("https://hooks.example/", SECRET, ", slow_factor: 1", "notify.slow_factor"),
    ],
)
def test_check_reports_a_webhook_that_cannot_be_called(url: str, secret: str, more: str, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(CONFIG.format(url=url, secret=secret, more=more), {}, Path())

    assert [path] == [problem.path for problem in raised.value.problems]
    assert "password" not in str(raised.value).replace("a user or password", "")


def test_check_notes_what_has_no_effect_or_is_readable_on_the_way() -> None:
    config = parse_config(CONFIG.format(url="http://hooks.example/", secret=SECRET, more=""), {}, Path())

    assert ["notify.url", "notify.on"] == [note.path for note in notes(config)]
