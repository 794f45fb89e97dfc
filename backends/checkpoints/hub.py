"""Client of the Hugging Face Hub: snapshots of its cache, lists of files, downloads.

Only this module imports huggingface_hub.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from backends.contract.errors import ModelUnavailable

# Longest wait for the list of a repository's files.
TIMEOUT_S = 10.0


def cached_snapshot(
    repository: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> Path | None:
    """Return the folder of a repository in the Hub's cache, None if there is none.

    Files whose paths match a pattern are all there if the cache knows the list of the repository's files;
    other files may be missing. Raises: ModelUnavailable if `repository` cannot be the name of one.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise _not_an_id(repository) from error
    return Path(folder)


def knows_all_files(snapshot: Path) -> bool:
    """Return True if the cache has the list of the files of a snapshot's commit."""
    return (snapshot.parent.parent / "trees" / f"{snapshot.name}.json").is_file()


def fetch(
    repository: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = ()
) -> Path:
    """Download the files whose paths match a pattern, as far as the cache lacks them; return their folder.

    The folder's name is the commit. Raises: ModelUnavailable.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
    except HFValidationError as error:
        raise _not_an_id(repository) from error
    except Exception as error:
        # Its transport raises errors of its own, which have no common base with the others.
        raise _fetch_failure(repository, error) from error
    return Path(folder)


def file_sizes(repository: str, revision: str | None, *, are_needed: bool = False) -> dict[str, int]:
    """Return the bytes of a repository's files by path, 0 for a size that the Hub does not report.

    are_needed: refuse that. Raises: ModelUnavailable.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:
        raise _fetch_failure(repository, error) from error
    files = info.siblings or ()
    if are_needed and (unknown := [file.rfilename for file in files if file.size is None]):
        raise ModelUnavailable(f"the Hub reports no size of {unknown[0]!r} in {repository}")
    return {file.rfilename: file.size or 0 for file in files}


class CachedModel(NamedTuple):
    """A repository of models in the Hub's cache.

    commits: of its snapshots, the newest first. stored_bytes: of all its files on the disk. used_s: time of
    the last access to one of them, in seconds since 1970.
    """

    repository: str
    folder: Path
    commits: tuple[str, ...]
    stored_bytes: int
    used_s: float


def cached_models() -> list[CachedModel]:
    """Return the models in the Hub's cache by name; folders that are damaged are left out."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return sorted(
        CachedModel(
            repository.repo_id,
            repository.repo_path,
            tuple(
                revision.commit_hash
                for revision in sorted(
                    repository.revisions, key=lambda found: found.last_modified, reverse=True
                )
            ),
            repository.size_on_disk,
            repository.last_accessed,
        )
        for repository in repositories
        if repository.repo_type == "model" and repository.revisions
    )


def remove_cached(repository: str, commits: Sequence[str]) -> None:
    """Remove snapshots of a model from the Hub's cache, and the files that no other snapshot has."""
    from huggingface_hub import constants, scan_cache_dir

    # A copy of a repository may have the same commits, which are removed wherever they are found.
    found = scan_cache_dir(constants.HF_HUB_CACHE)
    own = (repo for repo in found.repos if repo.repo_type == "model" and repo.repo_id == repository)
    dataclasses.replace(found, repos=frozenset(own)).delete_revisions(*commits).execute()


def cache_folder(repository: str) -> Path:
    """Return the folder of a model in the Hub's cache, whether there is one or not.

    Raises: ModelUnavailable if `repository` cannot be the name of one.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise _not_an_id(repository) from error
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def _not_an_id(repository: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{repository!r} is neither a folder on this machine nor a hub id like 'BAAI/bge-small-en-v1.5'"
    )


def _fetch_failure(repository: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"{repository!r} is not on this machine, or only in part, and could not be fetched from the Hub "
        f"({type(error).__name__}). Check the name and the network; or copy the checkpoint here and "
        "give its folder as `model`; for a gated model set HF_TOKEN"
    )
