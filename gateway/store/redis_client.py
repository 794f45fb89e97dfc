"""Client of the shared Redis: plain commands, and script calls in batches.

It knows nothing of quotas. Everything it returns is bytes, or raises StoreUnavailable.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from gateway.store.errors import StoreUnavailable, unavailable
from gateway.store.scripts import Script, ScriptCall, ScriptCommand, SingleCall

# A timer that fires this many timeouts after its start shows that the event loop was stalled.
LATE_TIMER = 1.5
# Turns of the event loop that a reply needs to be read once it has arrived.
TURNS_TO_READ = 2


class BoundedTask:
    """Work on the store with a timeout. It calls on_result once, with the result or a StoreUnavailable.

    The timeout does not cancel the task: it may be opening the connection that the next batch needs.
    """

    def __init__(
        self, work: Coroutine[Any, Any, Any], timeout_s: float, on_result: Callable[[Any], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] = loop.create_task(work)
        self._timeout_s = timeout_s
        self._on_result: Callable[[Any], None] | None = on_result
        self._due_s = loop.time() + timeout_s
        self._timer = loop.call_later(timeout_s, self._on_timer)
        self.task.add_done_callback(self._on_done)

    def detach(self) -> None:
        """Stop the timer and drop the callback; the task itself goes on."""
        self._on_result = None
        self._timer.cancel()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._report(StoreUnavailable("the connection was closed"))
        elif (error := task.exception()) is not None:
            self._report(unavailable(error))
        else:
            self._report(task.result())

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        late_s, self._due_s = loop.time() - self._due_s, loop.time() + self._timeout_s
        if late_s > self._timeout_s * (LATE_TIMER - 1):
            # The event loop was stalled: the silence is not the store's.
            self._timer = loop.call_later(self._timeout_s, self._on_timer)
        else:
            self._time_out_after(TURNS_TO_READ)

    def _time_out_after(self, turns: int) -> None:
        """Time out some turns later: a busy loop may not have read a reply that has arrived."""
        if turns:
            asyncio.get_running_loop().call_soon(self._time_out_after, turns - 1)
        else:
            self._report(StoreUnavailable(f"no answer within {self._timeout_s * 1000:.0f} ms"))

    def _report(self, result: Any) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            self._timer.cancel()
            on_result(result)


# This many calls keep a round trip short; the rest goes into the next batch.
BATCH_MAX = 128
# More batches on the way at a time would each carry fewer calls.
BATCHES_MAX = 2
# A task past its timeout may be opening a connection, which takes several round trips with TLS. So many of
# them may go on for so long.
OVERDUE_S = 2.0
OVERDUE_MAX = 8


class RedisClient:
    """Client of one store. timeout_s bounds each batch and each command."""

    def __init__(self, url: str, timeout_s: float) -> None:
        # redis-py takes 0.1 s to import, which a gateway without a store does not need.
        from gateway.store.connections import ScriptPipeline, is_cluster, open_clients

        self._timeout_s = timeout_s
        self._client, *self._sentinels = open_clients(url, timeout_s)
        self._is_cluster = is_cluster(url)
        self._pipeline = ScriptPipeline(self._client, is_cluster=self._is_cluster, idle_max=BATCHES_MAX)
        self._queue: list[ScriptCall] = []
        # Calls that may wait for others, and the timer at which they are enqueued at the latest.
        self._delayed: dict[ScriptCall, None] = {}
        self._delay_timer: asyncio.TimerHandle | None = None
        self._sent: dict[int, BoundedTask] = {}
        self._overdue: set[asyncio.Future[Any]] = set()
        self._batch_numbers = count(1)

    @property
    def is_cluster(self) -> bool:
        """True if the keys of one call must be under one hash tag."""
        return self._is_cluster

    def enqueue(self, call: ScriptCall) -> None:
        """Send a call with all others of this turn of the loop, or when one of two batches is back."""
        if not self._queue and len(self._sent) < BATCHES_MAX:
            asyncio.get_running_loop().call_soon(self._send_queue)
        self._queue.append(call)

    def enqueue_within(self, call: ScriptCall, seconds: float) -> None:
        """Enqueue a call within that time, together with all other delayed calls."""
        self._delayed[call] = None
        if self._delay_timer is None:
            self._delay_timer = asyncio.get_running_loop().call_later(seconds, self._enqueue_delayed)

    async def run_script(self, script: Script, keys: Sequence[str], argument: bytes) -> bytes:
        """Run a script and return its reply. Raises: StoreUnavailable."""
        call = SingleCall(script, keys, argument)
        self.enqueue(call)
        return await call.reply

    async def execute(self, *command: Any) -> Any:
        """Run one plain command and return its reply. Raises: StoreUnavailable."""
        return await self._bounded(self._client.execute_command(*command))

    async def memory(self) -> list[Mapping[str, Any]]:
        """Return what each server that holds data reports of its memory. Raises: StoreUnavailable."""
        options = {"target_nodes": "primaries"} if self._is_cluster else {}
        reply = await self._bounded(self._client.execute_command("INFO", "memory", **options))
        # A cluster of several servers replies by server.
        is_one = "used_memory" in reply
        return [reply] if is_one else list(reply.values())

    async def _bounded(self, work: Coroutine[Any, Any, Any]) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = BoundedTask(work, self._timeout_s, reply.set_result)
        try:
            result = await reply
        finally:
            self._release(task)
        if isinstance(result, StoreUnavailable):
            raise result
        return result

    async def aclose(self) -> None:
        """Close all connections."""
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        self._fail_pending(StoreUnavailable("the connection was closed"))
        for task in (*(sent.task for sent in self._sent.values()), *self._overdue):
            task.cancel()
        await asyncio.gather(*self._overdue, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _enqueue_delayed(self) -> None:
        delayed, self._delayed, self._delay_timer = self._delayed, {}, None
        for call in delayed:
            call.enqueue()

    def _send_queue(self) -> None:
        queue, self._queue = self._queue, []
        for start in range(0, len(queue), BATCH_MAX):
            calls = queue[start : start + BATCH_MAX]
            batch = [ScriptCommand(call.script, *call.pack()) for call in calls]
            number = next(self._batch_numbers)
            on_result = partial(self._on_replies, number, calls)
            self._sent[number] = BoundedTask(self._pipeline.send(batch), self._timeout_s, on_result)

    def _on_replies(self, number: int, calls: Sequence[ScriptCall], result: Any) -> None:
        """Give every call of a batch its reply, or the error that all of them share."""
        self._release(self._sent.pop(number))
        replies: Sequence[Any] = result
        if isinstance(result, StoreUnavailable):
            replies = [result] * len(calls)
            self._fail_pending(unavailable(result, number))
        for call, reply in zip(calls, replies, strict=True):
            call.on_reply(reply if isinstance(reply, bytes) else unavailable(reply, number))
        if self._queue and len(self._sent) < BATCHES_MAX:
            self._send_queue()

    def _fail_pending(self, error: StoreUnavailable) -> None:
        """Fail every queued call: after waiting for a batch that failed, none has time for another."""
        queue, self._queue = self._queue, []
        for call in queue:
            call.on_reply(error)

    def _release(self, bounded: BoundedTask) -> None:
        """Stop waiting for a task.

        An overdue task goes on for a while: it may be opening the connection that the next one needs.
        """
        task = bounded.task
        bounded.detach()
        if task.done():
            return
        if len(self._overdue) >= OVERDUE_MAX:
            task.cancel()
            return
        self._overdue.add(task)
        timer = asyncio.get_running_loop().call_later(OVERDUE_S, task.cancel)

        def on_done(_: asyncio.Future[Any]) -> None:
            timer.cancel()
            self._overdue.discard(task)
            if not task.cancelled():
                task.exception()  # Marks it as retrieved; the caller has had a timeout error already.

        task.add_done_callback(on_done)
