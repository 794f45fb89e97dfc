"""Records of files and jobs as they are stored, the names of their objects, and the states of a job. Pure.

A job is a record at its creation, and marks that are each created once: its plan, its cancellation, the
results of its chunks, its end. Its current state is computed from them, by any gateway and at any time:
`Job.planned`, `Job.cancelled_at`, `Job.ended`. Gateways of the version before read these records: fields
are only added, with defaults.
"""

import secrets
from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
TERMINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
Endpoint = Literal["/v1/embeddings", "/v2/rerank", "/score"]
# Results of lines: those that succeeded, and all others.
Part = Literal["out", "err"]
PARTS: tuple[Part, ...] = ("out", "err")

# Names of objects. IDENTITY: of the folder or bucket itself.
IDENTITY = "identity.json"
FILES = "files/"
FILE_RECORD = "files/{}.json"
FILE_DATA = "files/{}.data"
JOBS = "jobs/"
JOB_FOLDER = "jobs/{}/"
JOB_CREATED = "jobs/{}/job.json"
JOB_PLAN = "jobs/{}/plan.json"
JOB_CANCELLATION = "jobs/{}/cancel.json"
JOB_FINAL = "jobs/{}/final.json"
# Marks of finished chunks, and their results: by job, number, attempt and part.
CHUNK_MARKS = "jobs/{}/chunks/"
CHUNK_MARK = "jobs/{}/chunks/{:06}.json"
CHUNK_RESULTS = "jobs/{}/results/{:06}-{}.{}"


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a tenant.

    expires_s: seconds since 1970. job: whose results it contains, None for an upload. part: of the results.
    is_ready: it is complete, and listed. key, key_mark: of the key that uploaded it or created its job, empty
    in older records.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_s: float
    expires_s: float
    job: str | None = None
    part: Part | None = None
    is_ready: bool = True
    key: str = ""
    key_mark: str = ""


class LineProblem(msgspec.Struct, frozen=True):
    """Reason why a job cannot begin. line: counted from 1; None if the file as a whole is at fault."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Lines of a job, or of a part of it, that have a result, with the tokens that they cost.

    unexecuted: of those that failed, the ones that were never run.
    """

    completed: int = 0
    failed: int = 0
    unexecuted: int = 0
    tokens: int = 0
    cached_tokens: int = 0


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    columns = zip(*map(msgspec.structs.astuple, counts), strict=True)
    return Counts(*map(sum, columns))


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive lines of the input. first: number of its first line, from 0. offset: of its first byte."""

    first: int
    lines: int
    offset: int
    length: int


class Plan(msgspec.Struct, frozen=True):
    """Result of the validation of an input.

    at_s: seconds since 1970. model: of all lines, if only one. unexecuted_bytes: of the results if no line
    runs.
    """

    at_s: float
    total: int = 0
    chunks: tuple[Chunk, ...] = ()
    model: str | None = None
    problems: tuple[LineProblem, ...] = ()
    unexecuted_bytes: int = 0


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job, with the times at which it reached its states, in seconds since 1970.

    key, key_mark: id of the key that created it, and its mark, which a later key of that id lacks. keep_s:
    time for which its results are kept. unexecuted_bytes: of its results if no line runs, which count until
    its end: it can then be cancelled whatever else is stored.
    """

    id: str
    tenant: str
    key: str
    endpoint: Endpoint
    input_file: str
    created_s: float
    expires_s: float
    keep_s: float
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    total: int = 0
    chunks: int = 0
    counts: Counts = Counts()
    model: str | None = None
    problems: tuple[LineProblem, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    completed_s: float | None = None
    failed_s: float | None = None
    expired_s: float | None = None
    cancelling_s: float | None = None
    cancelled_s: float | None = None
    key_mark: str = ""
    unexecuted_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether no state follows."""
        return self.status in TERMINAL

    @property
    def ended_s(self) -> float | None:
        """Time at which it ended, None before."""
        ends = (self.completed_s, self.failed_s, self.expired_s, self.cancelled_s)
        return next((end for end in ends if end is not None), None)

    def planned(self, plan: Plan) -> "Job":
        """Return the job after its validation."""
        if plan.problems:
            return msgspec.structs.replace(self, status="failed", failed_s=plan.at_s, problems=plan.problems)
        return msgspec.structs.replace(
            self,
            status="in_progress" if self.cancelling_s is None else "cancelling",
            in_progress_s=plan.at_s,
            total=plan.total,
            chunks=len(plan.chunks),
            model=plan.model,
            unexecuted_bytes=plan.unexecuted_bytes,
        )

    def cancelled_at(self, moment: "Moment") -> "Job":
        """Return the job after its owner has cancelled it."""
        return msgspec.structs.replace(self, status="cancelling", cancelling_s=moment.at_s)

    def ended(self, counts: Counts, sizes: dict[Part, int], now_s: float) -> "Job":
        """Return the job after all its chunks have results. sizes: of the files of results."""
        end: Status = "completed"
        if self.cancelling_s is not None:
            end = "cancelled"
        elif counts.unexecuted:
            end = "expired"
        return msgspec.structs.replace(
            self,
            status=end,
            counts=counts,
            output_file=result_file_id(self.id, "out") if sizes["out"] else None,
            error_file=result_file_id(self.id, "err") if sizes["err"] else None,
            finalizing_s=now_s if end == "completed" else None,
            completed_s=now_s if end == "completed" else None,
            expired_s=now_s if end == "expired" else None,
            cancelled_s=now_s if end == "cancelled" else None,
        )


class Owner(msgspec.Struct, frozen=True):
    """Key that uploads files and creates jobs. mark: empty for tokens, whose ids are of one user."""

    key: str
    mark: str

    def owns(self, record: FileRecord | Job) -> bool:
        """Return whether a record of its tenant is of this key."""
        return (record.key, record.key_mark) == (self.key, self.mark)


class ChunkResult(msgspec.Struct, frozen=True):
    """Mark of a chunk whose results are stored. attempt: in the names of its objects. sizes: by part."""

    attempt: str
    counts: Counts
    sizes: dict[Part, int]


class FinalRecord(msgspec.Struct, frozen=True):
    """End of a job. parts: names of the objects of each file, in the order of their lines."""

    job: Job
    parts: dict[Part, tuple[str, ...]] = {}
    sizes: dict[Part, int] = {}


class Moment(msgspec.Struct, frozen=True):
    """Mark of something that happened once. at_s: seconds since 1970."""

    at_s: float


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Return an id that cannot be guessed."""
    return prefix + secrets.token_hex(16)


def result_file_id(job: str, part: Part) -> str:
    """Return the id of a job's file of results: the same for every gateway that ends the job."""
    return f"file-{job.removeprefix('batch_')}-{part}"
