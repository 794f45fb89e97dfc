"""Isolation of bad texts: a refused call is repeated in smaller ones until the text at fault is alone.

A text that the server does not answer by its own deadline, sent alone, is at fault only if the server answers
other calls meanwhile. Options that the server refuses are no fault of the texts: a harmless text shows it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from gateway.client.calls import Caller
from gateway.client.errors import CallFailed, CallStopped, Refused, TooSlow
from gateway.client.replies import Reply
from gateway.client.request import Request

# Refusals without any success before them, after which a harmless text is sent.
REFUSALS_MAX = 32
HARMLESS = "text"


class Rows(Protocol):
    """Rows of one call, and what takes their vectors. Indices are those of the texts; None is no text."""

    @property
    def texts(self) -> Sequence[str | None]:
        """The texts."""

    def add(self, reply: Reply, indices: Sequence[int]) -> None:
        """Add the vectors of texts. Raises: CallFailed if they are of another space."""

    def refuse(self, index: int, error: Refused) -> None:
        """Leave a row out, or raise what ends the run."""

    def place(self, first: int, last: int | None = None) -> str:
        """Return the words for a row, or for the rows up to a last one."""


class Embedder:
    """Embedder of rows."""

    def __init__(self, caller: Caller, request: Request) -> None:
        self._caller = caller
        self._request = request
        self._successes = self._refusals = 0

    async def embed(self, rows: Rows) -> None:
        """Embed the texts of rows. Raises: CallFailed, CallStopped, and what `rows.refuse` raises."""
        successes = self._successes
        # Indices of texts that the server did not answer by its deadline, alone.
        slow: list[int] = []
        await self._send(rows, [index for index, text in enumerate(rows.texts) if text is not None], slow)
        for index in slow:
            await self._send_again(rows, index, successes)

    async def _send(self, rows: Rows, indices: Sequence[int], slow: list[int]) -> None:
        """Embed some texts in order; refused ones are searched."""
        pending = [indices] if indices else []
        while pending:
            part = pending.pop()
            try:
                await self._call(rows, part, rows.place(part[0], part[-1]), lambda: True)
            except Refused as error:
                if len(part) > 1:
                    pending += reversed(pieces_of(part, error.place, is_first=len(part) == len(indices)))
                elif isinstance(error, TooSlow):
                    slow.append(part[0])
                else:
                    await self._refuse(rows, part[0], error)

    async def _send_again(self, rows: Rows, index: int, successes: int) -> None:
        """Embed a text that the server did not answer by its deadline, sent alone, once more.

        It is at fault if the server answered other calls meanwhile; otherwise the server is busy, and the
        call is repeated. successes: before the first call with it.
        """
        try:
            await self._call(rows, [index], rows.place(index), lambda: self._successes > successes)
        except Refused as error:
            await self._refuse(rows, index, error)

    async def _call(self, rows: Rows, indices: Sequence[int], place: str, ends: Callable[[], bool]) -> None:
        texts = [rows.texts[index] or "" for index in indices]
        try:
            reply = await self._caller.embed(self._request, texts, ends)
        except CallStopped as error:
            # One of these rows may be what the server cannot answer.
            raise CallStopped(f"{place}: {error}") from error
        self._successes += 1
        rows.add(reply, indices)

    async def _refuse(self, rows: Rows, index: int, error: Refused) -> None:
        self._refusals += 1
        rows.refuse(index, error)
        if not self._successes and self._refusals >= REFUSALS_MAX:
            try:
                await self._caller.embed(self._request, [HARMLESS])
            except Refused:
                raise CallFailed(f"{rows.place(index)}: {error}; the server refuses every row") from error
            self._successes += 1


def pieces_of(indices: Sequence[int], place: int | None, *, is_first: bool) -> list[Sequence[int]]:
    """Return the smaller calls of a refused one. place: of the text at fault, if the server reports it.

    A first call is cut around that text only, since most calls have one bad text at most. Later ones are also
    halved: otherwise each of many bad texts has all texts behind it sent again.
    """
    cuts = {0, len(indices)}
    if place is not None:
        cuts |= {place, place + 1}
    if place is None or not is_first:
        cuts.add(len(indices) // 2)
    return [indices[start:end] for start, end in pairwise(sorted(cuts))]
