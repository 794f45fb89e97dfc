"""Names of the objects of files and jobs. Pure."""

from gateway.batches.records import Part

# Contains the identity of a folder or bucket.
IDENTITY = "identity.json"
FILES = "files/"
JOBS = "jobs/"


def record_of_file(file: str) -> str:
    """Return the name of a file's record."""
    return f"{FILES}{file}.json"


def data_of_file(file: str) -> str:
    """Return the name of the content of an upload."""
    return f"{FILES}{file}.data"


def folder_of_job(job: str) -> str:
    """Return the prefix of a job's objects."""
    return f"{JOBS}{job}/"


def created(job: str) -> str:
    """Return the name of a job's record at its creation."""
    return f"{JOBS}{job}/job.json"


def plan(job: str) -> str:
    """Return the name of a job's plan."""
    return f"{JOBS}{job}/plan.json"


def cancellation(job: str) -> str:
    """Return the name of the mark of a job that its owner has cancelled."""
    return f"{JOBS}{job}/cancel.json"


def final(job: str) -> str:
    """Return the name of a job's record at its end."""
    return f"{JOBS}{job}/final.json"


def chunks(job: str) -> str:
    """Return the prefix of the marks of finished chunks."""
    return f"{JOBS}{job}/chunks/"


def chunk(job: str, number: int) -> str:
    """Return the name of the mark of a finished chunk."""
    return f"{chunks(job)}{number:06}.json"


def number_of_chunk(mark: str) -> int:
    """Return the number of the chunk that a mark belongs to."""
    return int(mark.rpartition("/")[2].removesuffix(".json"))


def result(job: str, number: int, attempt: str, part: Part) -> str:
    """Return the name of the results of a chunk, as one attempt has stored them."""
    return f"{JOBS}{job}/results/{number:06}-{attempt}.{part}"


def chunk_row(job: str, number: int) -> str:
    """Return the id of the row that counts the bytes of a chunk's results."""
    return f"chunk:{job}:{number}"
