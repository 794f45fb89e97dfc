"""Changes of the settings of a stored tenant: what is not named stays as it is. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from gateway.config.schema import TenantConfig

# Settings of a tenant, None before there is one, to its new settings. Raises: ValueError.
SettingsChange: TypeAlias = Callable[[TenantConfig | None], TenantConfig]


class ChangedField(msgspec.Struct, frozen=True):
    """A field that was changed. field: with the names of limits, as in `limits.tokens_per_day`.

    was, is: None for a field that is not set.
    """

    field: str
    was: Any = None
    now: Any = msgspec.field(default=None, name="is")


class TenantChange(msgspec.Struct, frozen=True):
    """Outcome of a change. is_first: there was no tenant before."""

    before: TenantConfig | None
    after: TenantConfig
    is_first: bool

    @property
    def changes(self) -> list[ChangedField]:
        """Fields that differ, in the order of the settings."""
        was, now = _fields(self.before or TenantConfig()), _fields(self.after)
        names = dict.fromkeys((*was, *now))
        return [
            ChangedField(name, was.get(name), now.get(name))
            for name in names
            if was.get(name) != now.get(name)
        ]


def merged(before: TenantConfig | None, patch: Mapping[str, Any]) -> TenantConfig:
    """Return settings with those of a patch, in which null removes a setting or a limit (RFC 7396).

    Raises: msgspec.ValidationError.
    """
    known = msgspec.to_builtins(before or TenantConfig())
    fields = _merged(known, patch)
    # A model without limits is not listed.
    fields["model_limits"] = {
        model: limits for model, limits in fields.get("model_limits", {}).items() if limits
    }
    return msgspec.convert(fields, TenantConfig)


def _merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(before)
    for name, value in patch.items():
        if value is None:
            fields.pop(name, None)
        elif isinstance(value, Mapping):
            inner = fields.get(name)
            fields[name] = _merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            fields[name] = value
    return fields


def _fields(settings: TenantConfig) -> dict[str, Any]:
    """Return the settings by name, with each limit by its own; without keys, which are stored apart."""
    fields = msgspec.to_builtins(settings)
    fields.pop("keys")
    limits = {f"limits.{name}": amount for name, amount in fields.pop("limits").items()}
    of_models = {
        f"model_limits.{model}.{name}": amount
        for model, found in fields.pop("model_limits").items()
        for name, amount in found.items()
    }
    return {"models": fields.pop("models"), **limits, **of_models, **fields}
