"""Turns of connections: clients with a key first, then a bounded number of calls without one."""

import asyncio

from gateway.api.grpc.connection import CALLS_IN_TURN, Turns


class Waiting:
    """Connection with calls that wait. begun: name of each connection whose call began, in order."""

    def __init__(self, name: str, calls: int, turns: Turns, begun: list[str], *, verified: bool) -> None:
        self._name = name
        self._left = calls
        self._turns = turns
        self._begun = begun
        self._verified = verified

    def resume(self) -> None:
        """Begin one call."""
        if not self._verified and not self._turns.take():
            self._turns.wait(self, verified=False)
            return
        self._begun.append(self._name)
        self._left -= 1
        if self._left:
            self._turns.wait(self, verified=self._verified)


async def test_calls_without_a_key_share_each_turn() -> None:
    turns, begun = Turns(), list[str]()
    for number in range(CALLS_IN_TURN * 2):
        turns.wait(Waiting(f"u{number}", 3, turns, begun, verified=False), verified=False)
    turns.wait(Waiting("known", 4, turns, begun, verified=True), verified=True)
    await asyncio.sleep(0)
    # One turn: the client with a key first, and no more of the others than a turn has.
    assert ["known", *[f"u{number}" for number in range(CALLS_IN_TURN)]] == begun
    await asyncio.sleep(0)
    assert ["known", *[f"u{number}" for number in range(CALLS_IN_TURN, CALLS_IN_TURN * 2)]] == begun[
        CALLS_IN_TURN + 1 :
    ]
    for _ in range(10):
        await asyncio.sleep(0)
    assert CALLS_IN_TURN * 2 * 3 + 4 == len(begun)


async def test_a_turn_has_a_bounded_number_of_calls() -> None:
    turns = Turns()
    assert CALLS_IN_TURN == sum(turns.take() for _ in range(CALLS_IN_TURN * 3))
    await asyncio.sleep(0)
    assert turns.take()
