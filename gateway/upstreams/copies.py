"""Copies of calls, sent in the background: to compare a canary's vectors, and to a mirror.

Rule: a copy affects no caller. No caller waits for it or pays for it, it is dropped where there is no room,
and its errors are only counted. All that waits or runs is bounded in number and bytes.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import msgspec

from backends.contract import (
    Embed,
    Reply,
    Vectors,
)
from backends.reference_texts import min_cosine
from gateway.calls import Call, Work
from gateway.errors import GatewayError
from gateway.events import CanaryCompared, CopyFinished, CopyPurpose, Observe
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.member import JudgedUpstream

# Bounds on the copies of one worker that wait or run.
COPIES_MAX = 256
BYTES_MAX = 16 * 1024 * 1024
# Copies that run at a time. A comparison uses an upstream that serves callers.
RUNNING_MAX: dict[CopyPurpose, int] = {"compare": 2, "mirror": 8}
# Inputs of one call that are compared: the same texts are computed twice.
COMPARED_INPUTS_MAX = 8

logger = logging.getLogger("gateway")


# Sends a copy of a call for a purpose to an upstream; None if that was removed. Raises: GatewayError.
SendCopy = Callable[[Call, CopyPurpose, str], Awaitable[Reply | None]]


class Copy(msgspec.Struct, frozen=True):
    """One copy. vectors: of the canary, to compare with; None for a mirror. size_bytes: what it holds."""

    group: UpstreamGroup
    purpose: CopyPurpose
    call: Call
    send: SendCopy
    size_bytes: int
    vectors: Vectors | None = None


class Copies:
    """Copies that wait and run. observe: receives what became of them."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._waiting: dict[CopyPurpose, deque[Copy]] = {purpose: deque() for purpose in RUNNING_MAX}
        self._running: Counter[CopyPurpose] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = self._bytes = 0

    def offer(self, group: UpstreamGroup, call: Call, upstream: str, reply: Reply, send: SendCopy) -> None:
        """Take the copies that a call asks for, served by an upstream. It never waits and never raises."""
        work = call.work
        if work.is_free:
            return
        if group.wants_copy():
            self._take(Copy(group, "mirror", call, send, _bytes_of(work)))
        canary = group.judge.canary
        if canary is None or canary.withdrawn or canary.settings.name != upstream:
            return
        if (vectors := _vectors_of(work, reply)) is not None:
            sample = _sample(call)
            vectors = vectors[: len(sample.work.inputs)].copy()
            size = _bytes_of(sample.work) + vectors.nbytes
            self._take(Copy(group, "compare", sample, send, size, vectors))

    async def aclose(self) -> None:
        """Drop what waits, and cancel what runs."""
        for waiting in self._waiting.values():
            waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, copy: Copy) -> None:
        if self._count >= COPIES_MAX or self._bytes + copy.size_bytes > BYTES_MAX:
            self._report(copy, None, "dropped")
            return
        self._count += 1
        self._bytes += copy.size_bytes
        self._waiting[copy.purpose].append(copy)
        self._start_next(copy.purpose)

    def _start_next(self, purpose: CopyPurpose) -> None:
        waiting = self._waiting[purpose]
        while waiting and self._running[purpose] < RUNNING_MAX[purpose]:
            self._running[purpose] += 1
            task = asyncio.create_task(self._run(waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(_log_failure)

    async def _run(self, copy: Copy) -> None:
        try:
            await self._send_one(copy)
        finally:
            self._count -= 1
            self._bytes -= copy.size_bytes
            self._running[copy.purpose] -= 1
            self._start_next(copy.purpose)

    async def _send_one(self, copy: Copy) -> None:
        group = copy.group
        target = group.mirror if copy.purpose == "mirror" else group.witness()
        if target is None:
            self._report(copy, target, "dropped")
            return
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            reply = await copy.send(copy.call, copy.purpose, target.name)
        except GatewayError as error:
            # The lane sends no comparison where callers' work waits.
            is_dropped = copy.purpose == "compare" and error.kind == "overloaded"
            outcome = "dropped" if is_dropped else error.kind
            self._report(copy, target, outcome, loop.time() - started_s)
            return
        self._report(copy, target, "dropped" if reply is None else "ok", loop.time() - started_s)
        if copy.vectors is not None and reply is not None:
            self._compare(copy, copy.vectors, reply)

    def _compare(self, copy: Copy, vectors: Vectors, reply: Reply) -> None:
        """Compare the canary's vectors with those of another upstream, for the same inputs."""
        group, expected = copy.group, _vectors_of(copy.call.work, reply)
        if expected is None or group.judge.canary is None:
            return
        cosine = min_cosine(vectors, expected)
        self._observe(CanaryCompared(group.model, group.judge.canary.settings.name, cosine))
        if group.judge.canary.record(cosine):
            group.wake()

    def _report(
        self, copy: Copy, target: JudgedUpstream | None, outcome: str, duration_s: float = 0.0
    ) -> None:
        upstream = target or (copy.group.mirror if copy.purpose == "mirror" else None) or copy.group.main
        self._observe(CopyFinished(copy.group.model, upstream.name, copy.purpose, outcome, duration_s))


def _sample(call: Call) -> Call:
    """Return the first inputs of a call, if they can be computed without the others."""
    work = call.work
    if not isinstance(work, Embed) or len(work.inputs) <= COMPARED_INPUTS_MAX:
        return call
    return msgspec.structs.replace(call, work=work.part(0, COMPARED_INPUTS_MAX))


def _vectors_of(work: Work, reply: Reply) -> Vectors | None:
    """Return the vectors of a reply, one for each input; None if it has none."""
    vectors = reply.dense_vectors
    return vectors if vectors is not None and len(vectors) == len(work.inputs) else None


def _bytes_of(work: Work) -> int:
    """Return the most bytes that the inputs of a call take in memory."""
    return 4 * work.characters + sum(len(medium.data) for medium in work.media)


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Log why a copy failed otherwise than with an error of its upstream: a fault of the gateway."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("a copy of a call has failed unexpectedly", exc_info=error)
