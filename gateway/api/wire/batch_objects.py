"""OpenAI's objects of files and batches.

Source: OpenAI OpenAPI document 2.3.0, `OpenAIFile` and `Batch`; openai-python 3.52.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from backends.contract import Operation
from gateway.batches.jobs import JobState
from gateway.batches.records import Endpoint, FileRecord, Job

# Times for which files and results are kept: from an hour to 30 days.
EXPIRES_MIN_S = 3600
EXPIRES_MAX_S = 2_592_000
# Operation that the lines of an endpoint need.
OPERATIONS: Mapping[Endpoint, Operation] = {
    "/v1/embeddings": Operation.EMBED,
    "/v2/rerank": Operation.RERANK,
    "/score": Operation.RERANK,
}


class FileObject(msgspec.Struct):
    """A file. Times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    object: str = "file"


class FileList(msgspec.Struct):
    """Files of the tenant."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    """A file that was deleted."""

    id: str
    deleted: bool = True
    object: str = "file"


class BatchProblem(msgspec.Struct):
    """Reason why a batch failed. line: of the input, from 1; null if the file as a whole is at fault."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(msgspec.Struct):
    """Reasons why a batch failed, at most a hundred."""

    data: list[BatchProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct, omit_defaults=True):
    """Lines of a batch: all, those that succeeded, and all others that have a result.

    unexecuted: of those that failed, the ones that were never run; absent if there are none.
    """

    total: int
    completed: int
    failed: int
    unexecuted: int = 0


class InputTokensDetails(msgspec.Struct):
    """Tokens that were in the cache."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Always 0: embedding models produce no tokens."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens that the lines of a batch have cost so far."""

    input_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class BatchObject(msgspec.Struct):
    """A batch. Times are in seconds since 1970, null for states that it has not reached.

    wait_reason: why its lines wait, null if they do not; OpenAI has no such field.
    """

    id: str
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    model: str | None
    wait_reason: str | None
    completion_window: Literal["24h"] = "24h"
    object: str = "batch"


class BatchList(msgspec.Struct):
    """Batches, newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


def file_object(record: FileRecord) -> FileObject:
    """Return a file as OpenAI shows it."""
    return FileObject(
        record.id,
        record.bytes,
        int(record.created_s),
        int(record.expires_s),
        record.filename,
        record.purpose,
    )


def batch_object(job: Job, wait_reason: str | None = None) -> BatchObject:
    """Return a job as OpenAI shows it."""
    problems = [BatchProblem(item.code, item.message, item.param, item.line) for item in job.problems]
    counts = job.counts
    return BatchObject(
        job.id,
        job.endpoint,
        BatchProblems(problems) if problems else None,
        job.input_file,
        job.status,
        job.output_file,
        job.error_file,
        int(job.created_s),
        _whole(job.in_progress_s),
        int(job.expires_s),
        _whole(job.finalizing_s),
        _whole(job.completed_s),
        _whole(job.failed_s),
        _whole(job.expired_s),
        _whole(job.cancelling_s),
        _whole(job.cancelled_s),
        RequestCounts(job.total, counts.completed, counts.failed, counts.unexecuted),
        BatchUsage(counts.tokens, counts.tokens, InputTokensDetails(counts.cached_tokens)),
        job.metadata,
        job.model,
        wait_reason,
    )


def batch_list(states: list[JobState], *, has_more: bool) -> BatchList:
    """Return a list of jobs as OpenAI shows it."""
    data = [batch_object(state.job, state.wait_reason) for state in states]
    return BatchList(data, has_more, data[0].id if data else None, data[-1].id if data else None)


def _whole(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
