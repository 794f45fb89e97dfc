"""Digest of a configuration, by which gateways that should serve the same one are compared. Pure.

It covers who may call, the models, their upstreams and all limits. Left out is what may differ between the
hosts of one fleet: addresses of listeners, files, folders, processes, and bounds that depend on the size of a
host. Texts that may be secrets count only by whether they are set, because a reader of the digest could
test guesses of them.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config.schema import Config, Section

# Names of keys, wherever they are.
OF_HOST = frozenset(
    {
        "bytes",
        "dir",
        "gateways",
        "in_flight_batches",
        "in_flight_bytes",
        "listen",
        "logs",
        "manager",
        "queue_tokens",
        "reload",
        "state_dir",
        "tls",
        "workers",
    }
)
SECRET = frozenset(
    {"access_key", "api_key", "client_secret", "endpoint", "headers", "secret", "secret_key", "store", "url"}
)
# A metric is a float, which counts up to 2^53 exactly.
DIGITS = 12


def config_digest(config: Config) -> str:
    """Return twelve hexadecimal digits, which are equal for gateways that serve alike."""
    text = msgspec.json.encode(_counted(config), order="sorted")
    return hashlib.sha256(text).hexdigest()[:DIGITS]


def _counted(value: Any) -> Any:
    """Return the part of a value that the digest covers, as values of JSON."""
    if isinstance(value, Section):
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in OF_HOST}
        return {name: bool(field) if name in SECRET else _counted(field) for name, field in fields.items()}
    if isinstance(value, Mapping):
        return {str(key): _counted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_counted(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value
