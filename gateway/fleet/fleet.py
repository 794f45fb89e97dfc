"""Part of one gateway in a fleet: it renews its record, lists the others, and asks for their recent calls.

One process of a gateway renews the record and answers questions; any of them may list and ask. Without a
Redis the fleet is this gateway.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from gateway.config.identity import Identity
from gateway.errors import Overloaded
from gateway.fleet.members import FleetReport, Member, SeenMember, report_of
from gateway.fleet.store import ANSWERS_BYTES_MAX, CallFilter, FleetStore, Question
from gateway.store.errors import StoreUnavailable
from gateway.telemetry.history import RecentCall

BEAT_EVERY_S = 2.0
# Time in which members answer: they read a question with their next renewal.
ANSWER_PATIENCE_S = 5.0
ANSWER_POLL_S = 0.1
ANSWER_BYTES_MIN = 8 * 1024
# Calls of all gateways that one reply lists.
FLEET_CALLS_MAX = 1000
ANSWERED_REMEMBERED = 16


class FleetCalls(msgspec.Struct, frozen=True):
    """Recent calls of all gateways, the newest first. missing: names of those that did not answer in time.

    problem: why the others are not known, nothing if they are.
    """

    calls: list[RecentCall]
    missing: tuple[str, ...] = ()
    problem: str = ""


class Fleet:
    """Part of one gateway in the fleet.

    store: None without a Redis. describe: returns this gateway's record now. recent: returns its last calls.
    """

    def __init__(
        self,
        identity: Identity,
        store: FleetStore | None,
        describe: Callable[[], Member],
        recent: Callable[[], Sequence[RecentCall]],
    ) -> None:
        self.identity = identity
        self._store = store
        self._describe = describe
        self._recent = recent
        self._renewal = asyncio.Event()
        self._answered: deque[str] = deque(maxlen=ANSWERED_REMEMBERED)

    def renew(self) -> None:
        """Renew the record now, because it has changed."""
        self._renewal.set()

    async def run(self) -> None:
        """Renew the record and answer questions, until cancelled."""
        store = self._store
        if store is None:
            return
        try:
            while True:
                # An outage is reported by those that need the store for calls.
                with suppress(StoreUnavailable):
                    for question in await store.beat(self._describe()):
                        await self._answer(store, question)
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_EVERY_S):
                        await self._renewal.wait()
                self._renewal.clear()
        finally:
            with suppress(StoreUnavailable):
                await store.leave(self.identity.id)

    async def report(self) -> FleetReport:
        """Return all members, this gateway as it is now."""
        seen, problem = await self._members()
        return report_of(seen, self.identity.id, time.time(), problem, shared=self._store is not None)

    async def calls(self, filter_: CallFilter, *, asker: str = "") -> FleetCalls:
        """Return the recent calls of all members. Raises: Overloaded.

        asker: the tenant that asks, empty for an operator.
        """
        own = [
            msgspec.structs.replace(call, gateway=self.identity.name)
            for call in chosen(self._recent(), filter_)
        ]
        seen, problem = await self._members()
        others = {each.member.gateway.id: each.member.gateway.name for each in seen}
        del others[self.identity.id]
        if self._store is None or problem or not others:
            return FleetCalls(own, problem=problem)
        try:
            answers = await self._ask(self._store, filter_, others, asker)
        except StoreUnavailable as error:
            return FleetCalls(own, problem=_unavailable(error))
        calls, missing = own, []
        for id_, name in others.items():
            found = _decode(answers.get(id_))
            if found is None:
                missing.append(name)
            else:
                # Another release may not know each part of the filter.
                calls += [msgspec.structs.replace(call, gateway=name) for call in chosen(found, filter_)]
        calls.sort(key=lambda call: call.at_s, reverse=True)
        return FleetCalls(calls[:FLEET_CALLS_MAX], tuple(sorted(missing)))

    async def _members(self) -> tuple[list[SeenMember], str]:
        """Return the members, and why others are missing. This gateway is among them in any case."""
        others: list[SeenMember] = []
        stored: list[Member] = []
        problem = ""
        if self._store is not None:
            try:
                found = await self._store.members()
            except StoreUnavailable as error:
                problem = _unavailable(error)
            else:
                others = [each for each in found if each.member.gateway.id != self.identity.id]
                stored += [each.member for each in found if each.member.gateway.id == self.identity.id]
        own = self._describe()
        if stored and own.load.calls_per_s is None:
            # Only the process that renews the record measures a rate.
            own = msgspec.structs.replace(own, load=stored[0].load)
        return [SeenMember(own, 0.0), *others], problem

    async def _ask(
        self, store: FleetStore, filter_: CallFilter, others: Mapping[str, str], asker: str
    ) -> Mapping[str, bytes]:
        """Return the answers that arrive in time. Raises: StoreUnavailable, Overloaded."""
        bytes_max = max(ANSWER_BYTES_MIN, ANSWERS_BYTES_MAX // len(others))
        question = Question(secrets.token_hex(8), self.identity.id, filter_, bytes_max, asker)
        # Tenants wait for each other, also those of other gateways.
        until_s = time.monotonic() + (ANSWER_PATIENCE_S if asker else 0.0)
        while not await store.ask(question):
            if time.monotonic() >= until_s:
                raise Overloaded("others are asking all gateways for their calls; try again", retry_after_s=2)
            await asyncio.sleep(ANSWER_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_PATIENCE_S):
                while await store.count_answers(question) < len(others):  # noqa: ASYNC110 - nothing to wait for
                    await asyncio.sleep(ANSWER_POLL_S)
        return await store.take_answers(question)

    async def _answer(self, store: FleetStore, question: Question) -> None:
        """Answer a question once. Raises: StoreUnavailable."""
        if question.by == self.identity.id or question.id in self._answered:
            return
        self._answered.append(question.id)
        content = _encode(chosen(self._recent(), question.filter), question.bytes_max)
        await store.answer(question, self.identity.id, content)


def chosen(calls: Sequence[RecentCall], filter_: CallFilter) -> list[RecentCall]:
    """Return the calls that a filter selects."""
    return [
        call
        for call in calls
        if filter_.tenant in {None, call.tenant}
        and filter_.key in {None, call.key_id}
        and filter_.model in {None, call.model}
        and not (filter_.failed and call.outcome == "ok")
        and call.at_s >= filter_.since_s
        and filter_.request_id in call.request_id
    ]


def _encode(calls: Sequence[RecentCall], bytes_max: int) -> bytes:
    """Encode as many of the newest calls as fit."""
    parts: list[bytes] = []
    left = min(bytes_max, ANSWERS_BYTES_MAX) - len(b"[]")
    for call in calls:
        part = msgspec.json.encode(call)
        left -= len(part) + len(b",")
        if left < 0:
            break
        parts.append(part)
    return b"[" + b",".join(parts) + b"]"


def _decode(answer: bytes | None) -> list[RecentCall] | None:
    """Return the calls of an answer; None without one, or if another release wrote it in another form."""
    if answer is None:
        return None
    try:
        return msgspec.json.decode(answer, type=list[RecentCall])
    except msgspec.MsgspecError:
        return None


def _unavailable(error: StoreUnavailable) -> str:
    return f"the other gateways are not known: Redis is unavailable ({error})"
