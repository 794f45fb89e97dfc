"""Records of changes of tenants and keys, which both stores write together with the change. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.audit.records import (
    MORE,
    Actor,
    AuditRecord,
    ChangedField,
    changed_fields,
    is_cut,
    new_record,
)
from gateway.config.schema import TenantConfig
from gateway.tenants.keyring import StoredKey

# In place of a digest that was replaced by another one.
REPLACED = "(another key)"


def tenant_fields(settings: TenantConfig) -> dict[str, Any]:
    """Return the settings by name, with each limit by its own; without keys, which are stored apart."""
    fields = msgspec.to_builtins(settings)
    fields.pop("keys")
    # None is shown as not set.
    fields["certificates"] = fields["certificates"] or None
    limits = {f"limits.{name}": amount for name, amount in fields.pop("limits").items()}
    of_models = {
        f"model_limits.{model}.{name}": amount
        for model, found in fields.pop("model_limits").items()
        for name, amount in found.items()
    }
    own = fields.pop("end_user_limits").items()
    of_users = {f"end_user_limits.{name}": amount for name, amount in own}
    return {"models": fields.pop("models"), **limits, **of_models, **of_users, **fields}


def restoring_patch(record: AuditRecord) -> dict[str, Any] | None:
    """Return the settings that a changed or removed tenant had before, as a patch for PATCH or PUT.

    Fields that the record does not name are not in it, and null stands for one that was not set. None if the
    record is of something else, or has not all of its values.
    """
    if not record.object.startswith("tenant/") or record.action not in ("change", "remove"):
        return None
    patch: dict[str, Any] = {}
    for change in record.changes:
        kind, _, rest = change.field.partition(".")
        # Of a record that was cut to its bounds, lists are texts.
        is_text = kind in ("models", "certificates") and isinstance(change.was, str)
        if is_text or is_cut(change.was) or is_cut(change.field) or change.field.startswith(MORE):
            return None
        if kind == "model_limits":
            # The name of a model may contain dots, and that of a limit none.
            model, _, limit = rest.rpartition(".")
            patch.setdefault(kind, {}).setdefault(model, {})[limit] = change.was
        elif rest:
            patch.setdefault(kind, {})[rest] = change.was
        elif kind != "keys":
            patch[kind] = change.was
    return patch


def key_fields(key: StoredKey) -> dict[str, Any]:
    """Return what operators have set of a key, by name; without its digest."""
    expires = None if key.expires_s is None else datetime.fromtimestamp(key.expires_s, UTC)
    return {
        "tenant": key.tenant,
        "expires": None if expires is None else f"{expires:%Y-%m-%dT%H:%M:%SZ}",
        "scopes": key.scopes,
        "models": key.models,
        **{f"defaults.{operation}": model for operation, model in key.defaults.items()},
        **{f"limits.{name}": amount for name, amount in key.limits.items()},
    }


def tenant_put(
    name: str, before: TenantConfig | None, changes: Sequence[ChangedField], by: Actor
) -> list[AuditRecord]:
    """Return the record of new settings; none if they are those before."""
    if before is not None and not changes:
        return []
    return [new_record(by, "create" if before is None else "change", f"tenant/{name}", changes)]


def tenant_removed(
    name: str, settings: TenantConfig | None, keys: Sequence[str], by: Actor
) -> list[AuditRecord]:
    """Return the record of a removed tenant. settings: None if only keys of it are known, or nothing."""
    was = {} if settings is None else tenant_fields(settings)
    new = tenant_fields(TenantConfig())
    changes = changed_fields({field: value for field, value in was.items() if value != new.get(field)}, {})
    if keys:
        changes.insert(0, ChangedField("keys", list(keys)))
    return [new_record(by, "remove", f"tenant/{name}", changes)]


def key_created(key: StoredKey, by: Actor) -> list[AuditRecord]:
    """Return the record of a new key."""
    return [new_record(by, "create", f"key/{key.id}", changed_fields({}, key_fields(key)))]


def key_put(before: StoredKey | None, key: StoredKey, by: Actor) -> list[AuditRecord]:
    """Return the record of a key that was created, or takes the place of another one of its id."""
    if before is None:
        return key_created(key, by)
    changes = changed_fields(key_fields(before), key_fields(key))
    if before.digest != key.digest:
        changes.insert(0, ChangedField("key", REPLACED, REPLACED))
    return [new_record(by, "change", f"key/{key.id}", changes)]


def key_revoked(id_: str, key: StoredKey | None, by: Actor) -> list[AuditRecord]:
    """Return the record of a revoked key. key: None if it could not be read, or had been lost before."""
    changes = [] if key is None else changed_fields(key_fields(key), {})
    return [new_record(by, "revoke", f"key/{id_}", changes)]


def key_rotated(before: StoredKey, after: StoredKey, successor: StoredKey, by: Actor) -> list[AuditRecord]:
    """Return the records of a key that ends, and of its successor."""
    ended = changed_fields(
        {**key_fields(before), "successor": before.successor or None},
        {**key_fields(after), "successor": after.successor},
    )
    return [new_record(by, "rotate", f"key/{before.id}", ended), *key_created(successor, by)]
