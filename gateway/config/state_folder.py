"""The folder of what one gateway keeps on its host."""

from collections.abc import Mapping
from pathlib import Path

# Table of files and batches where there is no Redis.
JOBS_FILE = "batches.sqlite"


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
