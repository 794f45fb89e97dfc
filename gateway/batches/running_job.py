"""State of the jobs in this process: what waits until when, and how often it was tried."""

import asyncio
import logging
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.batches.job_store import LEASE_S, WaitReasons
from gateway.batches.records import Job
from gateway.batches.results import CANCELLED, EXPIRED

PAUSE_MIN_S = 0.5
# Limits may be raised meanwhile.
PAUSE_MAX_S = 60.0
# For so long after the end of a wait its reason is shown: until lines have run, or wait again.
SHOWN_S = 3.0
# Of a result, for each input of its line, until the job has had results: a vector of 1,024 numbers as text.
ITEM_BYTES = 16 * 1024
# The estimate follows larger results at once, and smaller ones by this much.
ITEM_BYTES_DECAY = 0.75


NO_INPUTS = msgspec.Raw(b"null")
DIGITS = frozenset(bytes([digit]) for digit in b"0123456789")


@dataclass(slots=True)
class Tries:
    """Attempts of this process at one chunk.

    attempt: names its journal and its results. begun: number of tries. fruitless: in a row, without a new
    result. failures: tries that ended for an unexpected reason. gives_way: set when another tenant
    needs its slot.
    """

    attempt: str = field(default_factory=lambda: secrets.token_hex(8))
    begun: int = 0
    fruitless: int = 0
    failures: int = 0
    gives_way: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pause_s(self) -> float:
        """Time until the next try. The queue can hold a chunk back for a lease."""
        pause_s: float = min(LEASE_S, PAUSE_MIN_S * 2 ** min(self.fruitless + self.failures, 10))
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads the tries


logger = logging.getLogger("gateway")


class Wait(msgspec.Struct, frozen=True):
    """Reason for which a job waits, safe to show to its owner, and the time for which it is shown."""

    reason: str
    for_s: float


@dataclass(slots=True)
class RunningJob:
    """State of a job in this process.

    blocked_until_s: on the event loop's clock; no line begins before. wait: not stored yet. is_logged: its
    reason is in the log. refusals: in a row. item_bytes: of a result, for each item of its line. resting:
    chunks that were given back, and the time until which. stop: set when no line may begin. stopped_as: the
    reason then, whatever later states of the job say. is_woken: its resting chunks were released after that.
    """

    job: Job
    blocked_until_s: float = 0.0
    wait: Wait | None = None
    is_logged: bool = False
    refusals: int = 0
    item_bytes: float = ITEM_BYTES
    open_chunks: set[int] = field(default_factory=set)
    tries: dict[int, Tries] = field(default_factory=dict)
    resting: dict[int, float] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_as: str | None = None
    is_woken: bool = False

    @property
    def blocked_s(self) -> float:
        """Time until lines may begin again; 0 or less if they may."""
        return self.blocked_until_s - asyncio.get_running_loop().time()

    def explain(self, reason: str, wait_s: float) -> None:
        """Note why the job waits, for its owner; and in the log, once until a line runs again."""
        self.wait = Wait(reason, wait_s + SHOWN_S)
        if not self.is_logged:
            self.is_logged = True
            logger.warning("batch %s of tenant %s waits: %s", self.job.id, self.job.tenant, reason)

    def resume(self) -> None:
        """Note that a line has run."""
        self.refusals, self.is_logged = 0, False

    def block(self, reason: str, retry_after_s: float = PAUSE_MAX_S) -> None:
        """Let all lines wait after one could not run for a reason that others share."""
        if self.blocked_s > 0:
            return
        # What lines that run have reserved, but do not use, comes back soon.
        wait_s = min(PAUSE_MAX_S, PAUSE_MIN_S * 2 ** min(self.refusals, 10), max(retry_after_s, 0.1))
        self.refusals += 1
        self.blocked_until_s = asyncio.get_running_loop().time() + wait_s
        self.explain(reason, wait_s)

    def stop_code(self, now_s: float) -> str | None:
        """Return why no line may begin any more, None if lines may."""
        if self.stopped_as is not None:
            return self.stopped_as
        if self.job.cancelling_s is not None:
            return CANCELLED
        return EXPIRED if now_s >= self.job.expires_s else None

    def estimate(self, body: bytes) -> int:
        """Return how many bytes the result of a line may have."""
        return round(_items(body) * self.item_bytes)

    def learn(self, body: bytes, result_bytes: int) -> None:
        """Note the size of a result."""
        self.item_bytes = max(result_bytes / _items(body), ITEM_BYTES_DECAY * self.item_bytes)


async def store_waits(jobs: Iterable[RunningJob], waits: WaitReasons) -> None:
    """Store why jobs wait, where all processes read it. Raises: JobStoreUnavailable."""
    for running in jobs:
        wait, running.wait = running.wait, None
        if wait is not None:
            await waits.put(running.job.id, wait.reason, wait.for_s)


class _Inputs(msgspec.Struct):
    """Fields of a line that may have several inputs, in any of the endpoints."""

    input: msgspec.Raw = NO_INPUTS
    documents: msgspec.Raw = NO_INPUTS
    items: msgspec.Raw = NO_INPUTS
    queries: msgspec.Raw = NO_INPUTS
    data_1: msgspec.Raw = NO_INPUTS
    data_2: msgspec.Raw = NO_INPUTS
    text_1: msgspec.Raw = NO_INPUTS
    text_2: msgspec.Raw = NO_INPUTS


def _items(body: bytes) -> int:
    """Return at least the number of inputs in a line: each has a vector or a score."""
    try:
        inputs = _decode_inputs(body)
        fields = (getattr(inputs, name) for name in _Inputs.__struct_fields__)
        return 1 + sum(_count(field) for field in fields)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return 1 + body.count(b",")


def _count(field: msgspec.Raw) -> int:
    """Return the number of inputs in a field: a text and a list of token ids are one."""
    text = bytes(field)
    if not text.startswith(b"["):
        return 0
    parts = _decode_list(text)
    is_ids = bool(parts) and bytes(parts[0])[:1] in DIGITS
    return 0 if is_ids else len(parts)


_decode_inputs = msgspec.json.Decoder(_Inputs).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
