"""Client of a gateway for bulk work: Arrow tables of texts to Arrow tables with vectors.

    from gateway.client import Client

    with Client("https://gateway.example", key, "bge-m3") as client:
        done = client.embed_table(table, column="text", key="id")
    done.table  # the rows with a column `embedding`
    done.bad  # `id`, `error_kind` and `error_message` of the rows that cannot be embedded

`AsyncClient` has the same methods as coroutines. It imports nothing of the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gateway.client.errors import CallFailed, CallStopped

if TYPE_CHECKING:
    from gateway.client.clients import AsyncClient, Client
    from gateway.client.tables import Embedded, remaining, split

__all__ = ["AsyncClient", "CallFailed", "CallStopped", "Client", "Embedded", "remaining", "split"]

# Names whose modules import pyarrow, which the command line does not load before it needs it.
_LATE = {
    "AsyncClient": "clients",
    "Client": "clients",
    "Embedded": "tables",
    "remaining": "tables",
    "split": "tables",
}


def __getattr__(name: str) -> Any:
    """Return a name of a module that is loaded late. Raises: AttributeError, ImportError without pyarrow."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
