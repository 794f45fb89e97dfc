"""Records of requests about instances and checkpoints, and of reloads."""

import pytest

from gateway.audit.records import Actor, ChangedField
from gateway.config.diff import ConfigChange, ReloadOutcome
from gateway.config.problems import Problem
from gateway.declared.audited import host_record, reload_record
from gateway.declared.host import (
    Act,
    ActOnModel,
    AddModel,
    HostCommand,
    HostResult,
    ListInstances,
    ListModels,
    ReadLog,
    Refusal,
)

OPERATOR = Actor("ops", "key")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (ActOnModel("org/m", "download", OPERATOR), ("download", "checkpoint/org/m", "ops")),
        (ActOnModel("org/m", "load", OPERATOR), ("load", "checkpoint/org/m", "ops")),
        (ActOnModel("org/m", "get", OPERATOR), None),
        (AddModel("org/m", OPERATOR), None),
        (Act("i", "get"), None),
        (ReadLog("i"), None),
        (ListInstances(), None),
        (ListModels(), None),
    ],
)
def test_only_what_changes_this_host_is_recorded(
    command: HostCommand, expected: tuple[str, str, str] | None
) -> None:
    record = host_record(command, HostResult())
    assert expected == (None if record is None else (record.action, record.object, record.actor))
    assert host_record(command, HostResult(Refusal("UNAVAILABLE", "no"))) is None


def test_a_reload_is_recorded_with_what_it_changed() -> None:
    changes = (
        ConfigChange("models.bge.deadline_s", "changed", "60.0 → 5.0", 60.0, 5.0),
        ConfigChange("tenants.acme", "added"),
        ConfigChange("tenants.other", "removed"),
        ConfigChange("upstreams.one.api_key", "changed"),
    )
    record = reload_record(OPERATOR, ReloadOutcome(changes))
    assert record is not None
    assert (
        ChangedField("models.bge.deadline_s", 60.0, 5.0),
        ChangedField("tenants.acme", None, "(set)"),
        ChangedField("tenants.other", "(set)", None),
        ChangedField("upstreams.one.api_key", "(hidden)", "(hidden)"),
    ) == record.changes
    assert reload_record(OPERATOR, ReloadOutcome(problems=(Problem("a", "b"),))) is None
