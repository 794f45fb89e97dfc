"""Directory of all tenants and keys that this gateway knows, whatever defines them. Pure."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from gateway.config.schema import OPERATORS, TenantConfig
from gateway.tenants.keyring import StoredKey
from gateway.tenants.snapshot import Stored

# operators: keys of `admin.keys`, which belong to no tenant.
Source: TypeAlias = Literal["store", "file", "operators"]


class KeyEntry(msgspec.Struct, frozen=True):
    """A key and the place that defines it.

    has_tenant: its tenant is defined. searched: its id and its tenant, as `folded` writes them.
    """

    key: StoredKey
    source: Source
    has_tenant: bool
    searched: str


class TenantEntry(msgspec.Struct, frozen=True):
    """A tenant with its keys.

    settings: those that apply. stored: in the store, None if it is not there. in_file: router.yaml defines
    it, and wins. is_lost: the store has lost it, and it is still valid. searched: its name and the ids of its
    keys, as `folded` writes them.
    """

    name: str
    settings: TenantConfig
    stored: TenantConfig | None
    in_file: bool
    is_lost: bool
    keys: tuple[StoredKey, ...]
    searched: str


class Directory(msgspec.Struct, frozen=True):
    """All tenants by name, in the order of the names without case, and all keys in that of their ids."""

    tenants: Mapping[str, TenantEntry]
    keys: Sequence[KeyEntry]


def folded(text: str) -> str:
    """Return a text in the form in which names are compared: without case, and composed."""
    return text.casefold() if text.isascii() else unicodedata.normalize("NFC", text).casefold()


def directory_of(
    of_file: Mapping[str, TenantConfig], configured: Iterable[StoredKey], stored: Stored, kept: Stored
) -> Directory:
    """Return the directory.

    of_file: tenants of router.yaml. configured: its keys, those of operators, and a valid first key, whose
    tenant may have no settings. stored: in the store. kept: what the store has lost, and is still valid.
    """
    in_store = {**kept.tenants, **stored.tenants}
    settings: dict[str, TenantConfig] = {**in_store, **of_file}
    sources: list[tuple[StoredKey, Source]] = [
        (key, "operators" if key.tenant == OPERATORS and key.tenant not in of_file else "file")
        for key in configured
    ]
    # The first key, and only it, belongs to a tenant that need not be defined.
    for key, source in sources:
        if source == "file":
            settings.setdefault(key.tenant, TenantConfig())
    sources += [(key, "store") for key in (*stored.keys, *kept.keys)]
    owned: defaultdict[str, list[StoredKey]] = defaultdict(list)
    keys: list[KeyEntry] = []
    for key, source in sources:
        owned[key.tenant].append(key)
        has_tenant = key.tenant in settings or source == "operators"
        keys.append(KeyEntry(key, source, has_tenant, folded(f"{key.id}\n{key.tenant}")))
    tenants = {
        name: TenantEntry(
            name,
            own,
            stored.tenants.get(name),
            name in of_file,
            name in kept.tenants and name not in stored.tenants,
            tuple(owned.get(name, ())),
            "\n".join([name_folded, *(folded(key.id) for key in owned.get(name, ()))]),
        )
        for name_folded, name, own in sorted(
            ((folded(name), name, own) for name, own in settings.items()), key=lambda found: found[:2]
        )
    }
    keys.sort(key=lambda entry: (entry.searched, entry.key.id))
    return Directory(tenants, keys)
