"""Names of keys in Redis, and arguments and replies of `operate.lua`. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from gateway.quotas.ledger import QuotaRequest, day_of
from gateway.quotas.limits import SECOND_US, UNITS, WINDOWS_US, Cost, Limit, LimitStatus, Unit

DAY_US = 24 * 3600 * SECOND_US
# A cost in time above this, 142 years, is written as this: it is still a whole number in the scripts.
COST_MAX_US = 2**52
# Between the key's id and the model in a field of usage: neither contains a control character. An earlier
# release shows both as the model.
KEY_END = "\x1f"

Key = TypeVar("Key")

# A limit's state as operate.lua returns it: used, time to reset in µs, and of a rate the fraction of a µs. A
# calendar has a third number only if its alert is due.
LimitState = Sequence[int]


class IndexOf(dict[Key, int], Generic[Key]):
    """Indexes of keys, in the order of their first lookup."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __missing__(self, key: Key) -> int:
        self[key] = index = self._first + len(self)
        return index


def keys_of(tenant: str) -> list[str]:
    """Return the keys of a tenant's limits, open reservations and their expiries."""
    prefix = _prefix(tenant)
    return [f"{prefix}:limits", f"{prefix}:open", f"{prefix}:ends"]


def usage_key(tenant: str, day: str) -> str:
    """Return the key of a tenant's usage on a day."""
    return f"{_prefix(tenant)}:usage:{day}"


def users_key(tenant: str, day: str) -> str:
    """Return the key of the usage of a tenant's end users on a day.

    A field is a name, KEY_END, the model, "|" and the unit; a name and KEY_END, if the name is known; or
    KEY_END alone, with the number of known names.
    """
    return f"{_prefix(tenant)}:users:{day}"


def user_limits_key(tenant: str) -> str:
    """Return the key of the fields of limits of end users, by the moment from which each is as new."""
    return f"{_prefix(tenant)}:user_limits"


def _prefix(tenant: str) -> str:
    """Return the prefix of a tenant's keys, whose hash tag is the same for all of them."""
    # An empty tag is no tag: a cluster would spread the keys over its nodes and refuse every script on them.
    if tenant.startswith("}") or not tenant:
        return f"gw:odd:{{:{tenant}}}"
    return f"gw:{{{tenant}}}"


def field_of(limit: Limit) -> str:
    """Return a limit's field in the hash. It has the amount in it: a changed limit starts from scratch."""
    return f"{limit.name}={limit.amount}"


def decode_statuses(limits: Sequence[Limit], states: Sequence[LimitState]) -> tuple[LimitStatus, ...]:
    """Convert the store's states to the limits' own units."""
    return tuple([_status(limit, *state) for limit, state in zip(limits, states, strict=True)])


def _status(limit: Limit, used: int, reset_us: int, rest: int = 0) -> LimitStatus:
    """Convert one state. For a rate, used is the debt in µs, and rest its fraction in parts of the amount."""
    window_us = WINDOWS_US.get(limit.period)
    if window_us is None:
        return LimitStatus(limit, max(0, limit.amount - used), reset_us)
    debt = used * limit.amount + rest
    remaining = max(0, window_us * limit.amount - debt) // window_us
    return LimitStatus(limit, remaining, -(-debt // limit.amount))


def reserve_argument(request: QuotaRequest, limit_index: IndexOf[Limit]) -> tuple[Any, ...]:
    """Encode a reserve as operate.lua reads it."""
    amounts: list[int] = []
    for limit in request.limits:
        amounts += (limit_index[limit], *_cost_parts(limit, request.cost.of(limit.unit)))
    return request.id, request.expires_us, request.shadow, amounts


class Settlement(msgspec.Struct, frozen=True):
    """The actual cost of a reservation.

    day: YYYY-MM-DD, under which usage is recorded. mark_us: how long to leave a mark if no reservation is
    open, so that its late reserve takes nothing; 0 is no mark.
    """

    request: QuotaRequest
    actual: Cost
    day: str
    mark_us: int

    def pack(self, limit_index: IndexOf[Limit], key_index: IndexOf[str]) -> tuple[Any, ...]:
        """Encode it as operate.lua reads it. key_index: of the keys of usage."""
        request, actual = self.request, self.actual
        amounts: list[int] = []
        for limit in request.limits:
            reserved = _cost_parts(limit, request.cost.of(limit.unit))
            amounts += (limit_index[limit], *reserved, *_cost_parts(limit, actual.of(limit.unit)))
        usage: list[str | int] = []
        for unit, field in _usage_fields(request.model, request.key):
            if amount := actual.of(unit):
                usage += (field, amount)
        packed = request.id, self.mark_us, key_index[usage_key(request.tenant, self.day)], amounts, usage
        user = request.end_user
        if user is None or not usage:
            return packed
        end = len(request.key) + len(KEY_END) if request.key else 0
        own = [f"{KEY_END}{part[end:]}" if isinstance(part, str) else part for part in usage]
        return *packed, (key_index[users_key(request.tenant, self.day)], user.most, user.name, own)


@lru_cache(maxsize=4096)
def limit_argument(limit: Limit) -> msgspec.Raw:
    """Encode a limit as operate.lua reads it."""
    argument: dict[str, Any] = {"f": field_of(limit), "a": limit.amount, "k": "flight"}
    if limit.period in WINDOWS_US:
        argument |= {"k": "rate", "w": WINDOWS_US[limit.period]}
    elif limit.period != "in_flight":
        argument |= {"k": "calendar", "p": limit.period}
    if limit.is_end_users:
        argument["o"] = field_of(limit.for_other_users)
    if limit.alert_at is not None:
        argument["n"] = limit.alert_at
    return msgspec.Raw(msgspec.msgpack.encode(argument))


@lru_cache(maxsize=4)
def day_name(day_number: int) -> str:
    """Return YYYY-MM-DD of a day since 1970."""
    return day_of(day_number * DAY_US)


@lru_cache(maxsize=8192)
def _cost_parts(limit: Limit, amount: int) -> tuple[int, int, int]:
    """Return a cost in the limit's unit, and in a rate's time: whole microseconds and the rest."""
    window_us = WINDOWS_US.get(limit.period)
    if window_us is None:
        return amount, 0, 0
    whole, rest = divmod(amount * window_us, limit.amount)
    return amount, min(whole, COST_MAX_US), rest


@lru_cache(maxsize=4096)
def _usage_fields(model: str, key: str) -> tuple[tuple[Unit, str], ...]:
    """Return the field of a day's usage hash for each unit of a model and key; none without a model."""
    name = f"{key}{KEY_END}{model}" if key else model
    return tuple((unit, f"{name}|{unit}") for unit in UNITS) if model else ()


def user_field_parts(field: str) -> tuple[str, str, str] | None:
    """Return the model, the end user and the unit of a field; None for a field that counts nothing."""
    name, _, rest = field.partition(KEY_END)
    model, _, unit = rest.rpartition("|")
    return (model, name, unit) if rest else None


def usage_field_parts(field: str) -> tuple[str, str, str]:
    """Return the model, the key's id and the unit of a field. Earlier releases recorded no key."""
    name, _, unit = field.rpartition("|")
    key, end, model = name.partition(KEY_END)
    return (model, key, unit) if end else (name, "", unit)
