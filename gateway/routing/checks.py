"""Checks of a replica: that it computes, and that it serves its upstream's model.

A replica that joins shows that it computes what it reports, and is kept out only for what no server of the
right model does. A replica that fails a batch is given a plain text to compute: the batch may have failed
because of one of its inputs, so that the failure counts against the replica only if it fails plain work too,
and against the input only if the replica completes plain work.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from backends.contract import (
    Backend,
    Capabilities,
    Embed,
    Operation,
    Rerank,
    RerankReply,
    Vectors,
    Work,
)
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    UnsupportedWork,
)
from backends.reference_texts import SCORED
from gateway.routing.replica import JoinedModel, Replica
from gateway.vector_spaces.fingerprint import base_name

CHECK_TIMEOUT_S = 5.0
# A replica that failed a check is not asked again for this long.
FAILED_FOR_S = 0.5
PLAIN_TEXT = "A plain sentence shows whether a model server still works."
# Scores of a network differ by more, even if its weights are random.
EQUAL_MAX = 1e-6
# Scores of one model in different precisions differ by less.
SAME_SCORES_MAX = 0.05
# Rerankers whose published weights put the answer first; last part of a hub id, in lower case.
PUBLISHED_RERANKERS = re.compile(
    r"(?:bge-reranker-(?:base|large|v2-m3|v2-gemma|v2-minicpm-layerwise)|ms-marco-(?:minilm|electra|tinybert)-.*"
    r"|gte-(?:multilingual-reranker|reranker-modernbert)-base|jina-reranker-.*|mxbai-rerank-.*"
    r"|qwen3-reranker-(?:0\.6b|4b|8b)|rerank-(?:v3\.5|v4.*|multilingual-v3\.0|english-v3\.0|2|2\.5|2\.5-lite))"
)
# Operations that say what kind of model a server has.
KINDS = frozenset({Operation.EMBED, Operation.ENCODE, Operation.RERANK, Operation.CLASSIFY})


async def read_scores(backend: Backend, capabilities: Capabilities, timeout_s: float) -> tuple[float, ...]:
    """Return a reranker's scores of `SCORED`, () if it refuses the pairs or has no room.

    Raises: ReplicaFailed, if it scores all pairs alike or is a published model with another order.
    """
    try:
        reply = await backend.run(SCORED, timeout_s)
    except (InvalidWork, UnsupportedWork, ReplicaOverloaded):
        return ()
    if not isinstance(reply, RerankReply) or len(reply.scores) != len(SCORED.documents):
        raise ReplicaFailed("the answer is not one score for each pair")
    check_scores(reply.scores, capabilities.model_id)
    return tuple(reply.scores.tolist())


def check_scores(scores: Vectors, model_id: str) -> None:
    """Check the scores of `SCORED`. Raises: ReplicaFailed."""
    if np.ptp(scores) <= EQUAL_MAX:
        raise ReplicaFailed(
            f"it scores an answer and unrelated texts alike ({scores[0]:.4g}): "
            "its weights or the template of its prompts are wrong"
        )
    if not is_ordered(scores) and PUBLISHED_RERANKERS.fullmatch(base_name(model_id)):
        shown = ", ".join(f"{score:.4g}" for score in scores)
        raise ReplicaFailed(
            f"it scores unrelated texts above the answer to a question ({shown}), which {model_id} does not: "
            "its weights or the template of its prompts are wrong"
        )


def is_ordered(scores: Iterable[float]) -> bool:
    """Return whether the answer in `SCORED` has the highest score."""
    first, *others = scores
    return first > max(others)


def other_model(reference: JoinedModel, found: JoinedModel) -> str | None:
    """Return why two replicas do not serve one model, None if they may.

    Embeddings are compared by their vectors elsewhere. Servers may name one model in several ways, so that
    a name alone shows nothing.
    """
    first, second = reference.capabilities, found.capabilities
    first_kinds, second_kinds = first.operations & KINDS, second.operations & KINDS
    names = f"it serves {second.model_id}, and the upstream {first.model_id}"
    if first_kinds and second_kinds and first_kinds.isdisjoint(second_kinds):
        offered = " and ".join(sorted(second_kinds))
        expected = " and ".join(sorted(first_kinds))
        return f"{names}: it offers {offered} instead of {expected}; an upstream has one model"
    if base_name(first.model_id) == base_name(second.model_id):
        return None
    if first.labels and second.labels and set(first.labels) != set(second.labels):
        return f"{names}: their labels differ; an upstream has one model"
    if reference.scores and found.scores:
        distance = max(abs(a - b) for a, b in zip(reference.scores, found.scores, strict=True))
        if distance > SAME_SCORES_MAX:
            return f"{names}: their scores of a pair differ by {distance:.2g}; an upstream has one model"
    return None


class WorkChecks:
    """Checks of the replicas of one lane, at most one of each at a time. clock: the event loop's."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = min(CHECK_TIMEOUT_S, timeout_s)
        self._running: dict[Replica, asyncio.Task[BackendError | None]] = {}
        # The last failure of each replica, and its moment.
        self._failures: WeakKeyDictionary[Replica, tuple[BackendError, float]] = WeakKeyDictionary()

    async def fault_of(self, replica: Replica, since_s: float) -> BackendError | None:
        """Return why a replica does not work; None if it has completed work since a moment, or does now."""
        if replica.answered_s is not None and replica.answered_s >= since_s:
            return None
        failure = self._failures.get(replica)
        if failure is not None and self._clock() - failure[1] < FAILED_FOR_S:
            return failure[0]
        task = self._running.get(replica)
        if task is None:
            task = self._running[replica] = asyncio.create_task(self._check(replica))
        return await asyncio.shield(task)

    async def _check(self, replica: Replica) -> BackendError | None:
        started_s = self._clock()
        try:
            await self._compute(replica)
        except (InvalidWork, UnsupportedWork):
            # A refusal is a response too.
            pass
        except BackendError as error:
            self._failures[replica] = (error, self._clock())
            return error
        finally:
            del self._running[replica]
        self._failures.pop(replica, None)
        now_s = self._clock()
        replica.record_check(now_s - started_s, now_s)
        return None

    async def _compute(self, replica: Replica) -> None:
        work = None if replica.capabilities is None else smallest_work(replica.capabilities, PLAIN_TEXT)
        if work is None:
            await replica.backend.describe(self._timeout_s)
            return
        replica.check_width(work, await replica.backend.run(work, self._timeout_s))


def smallest_work(capabilities: Capabilities, text: str) -> Work | None:
    """Return the work of one text for a replica; None if it embeds and reranks nothing."""
    if Operation.EMBED in capabilities.operations:
        return Embed((text,))
    return Rerank(text, (text,)) if Operation.RERANK in capabilities.operations else None
