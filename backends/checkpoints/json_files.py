"""JSON files on this machine, decoded to a type."""

from pathlib import Path
from typing import Any

import msgspec

from backends.contract.errors import ModelUnavailable


def read_json_file(path: Path, kind: Any) -> Any:
    """Return the content of a file as a type of msgspec, None if there is no such file.

    Raises: ModelUnavailable.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if there is no such file. Raises: ModelUnavailable."""
    return read_json_file(path, dict[str, Any]) or {}
