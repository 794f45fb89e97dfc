"""The folder of what one gateway keeps on its host, and files in it that no other user can read or lock."""

import fcntl
import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

# Table of files and batches where there is no Redis.
JOBS_FILE = "batches.sqlite"
NO_HOME = "/"
# Rights of the group and of all others.
OTHERS, EVERYONE = 0o077, 0o007


def home_for_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """Return HOME and USER where libraries find none: for a user without an entry in the system's list.

    Docker sets the same HOME. Libraries that look for a cache there find none, rather than fail.
    """
    if environment.get("HOME"):
        return {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return {"HOME": NO_HOME, "USER": environment.get("USER") or str(os.getuid())}
    return {}


def state_folder(state_dir: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the folder for a gateway's own files, or None if none is known. state_dir: as configured."""
    if state_dir is not None:
        # Commands that the gateway prints must work in any folder.
        return Path(state_dir).absolute()
    # Set by systemd for a unit with StateDirectory=; it may list several.
    if listed := environment.get("STATE_DIRECTORY"):
        return Path(listed.partition(":")[0])
    if state_home := environment.get("XDG_STATE_HOME"):
        return Path(state_home) / "embedding-gateway"
    if home := environment.get("HOME"):
        return Path(home) / ".local" / "state" / "embedding-gateway"
    return None


def make_private_folder(folder: Path) -> None:
    """Create a folder, and the missing ones above it, that no other user can enter.

    A folder that exists stays as it is. Raises: OSError.
    """
    # `parents=True` would give those above it the usual rights.
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path) -> IO[str]:
    """Open or create a file that no other user can read or lock. Raises: OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with suppress(PermissionError):
        # An earlier release may have made it readable for others.
        if os.fstat(descriptor).st_mode & OTHERS:
            os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+", encoding="ascii")


def lock_private(path: Path, *, wait: bool = True, shared: bool = False) -> IO[str]:
    """Return a file that keeps a lock until it is closed; its folder is made if it is missing.

    shared: with others that share it. Raises: OSError; BlockingIOError if another process has the lock, and
    this one does not wait.
    """
    make_private_folder(path.parent)
    lock = open_private(path)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(lock, kind | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        lock.close()
        raise
    return lock


def create_private(path: Path, content: bytes) -> None:
    """Create a file that no other user can read, with its content on the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def replace_private(path: Path, content: bytes) -> None:
    """Write a file that no other user can read, in one step: a reader finds the old content or the new one.

    Raises: OSError.
    """
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        create_private(draft, content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def make_private(path: Path) -> None:
    """Create a file, or take the rights of other users to it away, without opening one that exists.

    The target of a link, which may lie outside of the folder, keeps its rights.
    Closing a database that another connection of this process has open would end the locks of that one.
    Raises: OSError.
    """
    try:
        create_private(path, b"")
    except FileExistsError:
        with suppress(PermissionError):
            mode = path.lstat().st_mode
            if mode & OTHERS and not stat.S_ISLNK(mode):
                path.chmod(0o600)


def folder_warning(folder: Path) -> str | None:
    """Return a warning if other users can list a folder that exists."""
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError:
        return None
    # A volume of Kubernetes is the group's.
    if not mode & EVERYONE:
        return None
    return f"other users can enter {folder} (mode {mode:04o}); its files are private; run: chmod 700 {folder}"
