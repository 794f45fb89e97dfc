"""Digests of a configuration, whole and by section, by which gateways of one fleet are compared. Pure.

They cover who may call, the models, their upstreams and all limits. Left out is what may differ between the
hosts of one fleet: addresses of listeners, files, folders, processes, and bounds that depend on the size of a
host. Texts that may be secrets count only by whether they are set, because a reader of the digest could
test guesses of them.
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.config.schema import Config

# Names of keys, wherever they are.
OF_HOST = frozenset(
    {
        "address",
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
    {
        "access_key",
        "api_key",
        "client_secret",
        "endpoint",
        "headers",
        "proxy",
        "secret",
        "secret_key",
        "store",
        "url",
    }
)
# A metric is a float, which counts up to 2^53 exactly.
DIGITS = 12
# A digest of a section only has to differ.
SECTION_DIGITS = 8


def section_digests(config: Config, ignored: Collection[str] = ()) -> Mapping[str, str]:
    """Return the digest of each section that is not the default.

    ignored: upstreams and models that one host adds.
    """
    shared = msgspec.structs.replace(
        config,
        upstreams={name: value for name, value in config.upstreams.items() if name not in ignored},
        models={name: value for name, value in config.models.items() if name not in ignored},
    )
    sections, defaults = _counted(shared), _counted(Config(upstreams={}, models={}))
    return {
        name: _digest(value)[:SECTION_DIGITS]
        for name, value in sections.items()
        if value and value != defaults[name]
    }


def hash_of(sections: Mapping[str, str]) -> str:
    """Return one digest of all sections: twelve hexadecimal digits, equal for gateways that serve alike."""
    return _digest(sections)[:DIGITS]


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _counted(value: Any) -> Any:
    """Return the part of a value that the digest covers, as values of JSON."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in OF_HOST}
        return {name: bool(field) if name in SECRET else _counted(field) for name, field in fields.items()}
    if isinstance(value, Mapping):
        return {str(key): _counted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_counted(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value
