"""Records of changes of additions and of this host, and of reloads. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.audit.records import Actor, AuditRecord, ChangedField, changed_fields, new_record
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.declared.additions import Additions, Drain, Edit, Put
from gateway.declared.host import Act, ActOnModel, AddModel, Create, HostCommand, HostResult
from gateway.declared.settings import HIDDEN, redact, shown_url

# A value that was set, and may be a secret.
SET = "(set)"


def edit_record(edit: Edit, before: Additions, after: Additions) -> AuditRecord:
    """Return the record of an edit."""
    if isinstance(edit, Drain):
        object_ = f"replica/{edit.name}/{shown_url(edit.replica)}"
        action = "drain" if edit.is_drained else "undrain"
        return new_record(
            edit.by, action, object_, [ChangedField("drained", not edit.is_drained, edit.is_drained)]
        )
    was: Mapping[str, Any] | None = getattr(before, edit.part).get(edit.name)
    now: Mapping[str, Any] | None = getattr(after, edit.part).get(edit.name)
    replaced = "create" if was is None else "change"
    action = replaced if isinstance(edit, Put) else "remove"
    return new_record(
        edit.by, action, f"{edit.part[:-1]}/{edit.name}", changed_fields(redact(was), redact(now))
    )


def reload_record(by: Actor, outcome: ReloadOutcome) -> AuditRecord | None:
    """Return the record of a reload of router.yaml, None if it failed and has changed nothing."""
    if outcome.problems:
        return None
    return new_record(by, "reload", "configuration", [_changed(change) for change in outcome.changes])


def _changed(change: ConfigChange) -> ChangedField:
    match change.how:
        case "added":
            return ChangedField(change.path, None, SET)
        case "removed":
            return ChangedField(change.path, SET, None)
        case "changed" if change.detail:
            return ChangedField(change.path, change.was, change.now)
        case _:
            return ChangedField(change.path, HIDDEN, HIDDEN)


def host_record(command: HostCommand, result: HostResult) -> AuditRecord | None:
    """Return the record of a request about this host, None if it has changed nothing."""
    if result.refusal is not None:
        return None
    match command:
        case Create(settings=settings, by=by):
            return new_record(
                by, "create", f"instance/{settings.name}", changed_fields({}, msgspec.to_builtins(settings))
            )
        case Act(name=name, action=action, by=by) if action != "get":
            return new_record(by, action, f"instance/{name}")
        case AddModel(model_id=model, by=by) if result.is_new:
            return new_record(by, "create", f"checkpoint/{model}")
        case ActOnModel(model_id=model, action=action, by=by) if action != "get":
            return new_record(by, action, f"checkpoint/{model}")
    return None
