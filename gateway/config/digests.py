"""Digests of a configuration by section, by which gateways that should be equal are compared. Pure."""

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from gateway.config.schema import Config

# What belongs to one host, and may differ between gateways that are otherwise equal.
OF_THE_HOST = frozenset(("listen", "workers", "state_dir", "manager"))
# Short: a digest is to differ, not to prove anything. A section with a secret that can be guessed gives
# thousands of millions of equal digests.
DIGITS = 8


def section_digests(config: Config, ignored: Collection[str] = ()) -> Mapping[str, str]:
    """Return the digest of each section that is not the default.

    ignored: upstreams and models that one host adds. Listeners and other settings of one host are left out.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(Config)}
    shared = msgspec.structs.replace(
        config,
        admin=msgspec.structs.replace(config.admin, listen=None),
        grpc=None if config.grpc is None else msgspec.structs.replace(config.grpc, listen=""),
        upstreams={name: value for name, value in config.upstreams.items() if name not in ignored},
        models={name: value for name, value in config.models.items() if name not in ignored},
    )
    sections = {name: getattr(shared, name) for name in Config.__struct_fields__ if name not in OF_THE_HOST}
    return {name: _digest(value) for name, value in sections.items() if value and value != defaults.get(name)}


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:DIGITS]
