"""Limits of an upstream's account, which its replicas and all gateways share, in the ledger of the quotas.

Each attempt reserves for itself, because each of them is a request that the account pays for: a call of many
inputs takes several, calls that share a batch take one, and retries, hedges, moves and copies come on top.
The ledger counts the account as it does a tenant, under a name that no tenant can have.
"""

import math
import secrets
from collections.abc import Sequence
from itertools import count

import msgspec

from backends.contract import Image, Reply
from backends.contract.errors import AttemptTimedOut, BackendError, InvalidWork
from gateway.errors import GatewayError, Overloaded, QuotaExceeded, QuotaUnavailable, RequestExceedsLimit
from gateway.lane.slices import Bounds, Slice
from gateway.quotas.ledger import LEASE_US, NOTHING, RETRY_AFTER_MAX_S, Ledger, QuotaRequest, Reservation
from gateway.quotas.limit_text import format_duration
from gateway.quotas.limits import SECOND_US, Cost, Limit

# Names of tenants have no control characters.
ACCOUNT = "\x1fupstream "


class LimitReached(Exception):
    """The account has no room. error: for callers. wait_s: until it has; None if waiting is of no use."""

    def __init__(self, error: GatewayError, wait_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.wait_s = wait_s


class UpstreamLimits:
    """Limits of one upstream's account. timeout_s: of an attempt. shadow: count, and refuse nothing."""

    def __init__(
        self,
        upstream: str,
        limits: Sequence[Limit],
        ledger: Ledger,
        timeout_s: float,
        *,
        shadow: bool = False,
    ) -> None:
        self.limits = tuple(limits)
        self._account = f"{ACCOUNT}{upstream}"
        self._ledger = ledger
        # Unique among all gateways, and cheap: a random prefix and a counter.
        self._prefix, self._numbers = secrets.token_hex(6), count()
        self._expires_us = round(timeout_s * SECOND_US) + LEASE_US
        self._shadow = shadow
        self._held_until_s = 0.0

    def bounded(self, bounds: Bounds) -> Bounds:
        """Return the bounds of a request that the limits can ever admit."""
        amounts = {unit: self._smallest(unit) for unit in ("inputs", "tokens")}
        return msgspec.structs.replace(
            bounds,
            inputs=min(bounds.inputs, amounts["inputs"] or bounds.inputs),
            tokens=min(bounds.tokens, amounts["tokens"] or bounds.tokens),
        )

    async def reserve(self, piece: Slice) -> Reservation:
        """Reserve what a request may cost. Raises: LimitReached."""
        images = sum(isinstance(medium, Image) for medium in piece.work.media)
        tokens = 0 if piece.work.is_free else piece.tokens
        request = QuotaRequest(
            f"{self._prefix}{next(self._numbers):x}",
            self._account,
            self.limits,
            Cost(1, tokens, piece.inputs, images),
            self._expires_us,
            shadow=self._shadow,
            is_bound=not piece.exact,
        )
        try:
            return await self._ledger.reserve(request)
        except QuotaExceeded as refusal:
            wait_s = refusal.wait_us / SECOND_US
            raise LimitReached(_used_up(wait_s), wait_s) from refusal
        except RequestExceedsLimit as refusal:
            message = "this input is larger than the rate of this model's upstream allows; send a shorter one"
            raise LimitReached(RequestExceedsLimit(message)) from refusal
        except QuotaUnavailable as refusal:
            raise LimitReached(refusal) from refusal

    def settle(self, reservation: Reservation, result: Reply | BackendError | None) -> None:
        """Settle the cost of a request by its result.

        result: None if the request was cancelled: the upstream may compute it, as after a timeout. A failure
        of the upstream costs nothing, and a refused input the request.
        """
        reserved = reservation.request.cost
        if result is None or isinstance(result, AttemptTimedOut):
            used = reserved
        elif isinstance(result, BackendError):
            used = Cost() if isinstance(result, InvalidWork) else NOTHING
        else:
            tokens = min(result.tokens, reserved.tokens) if result.tokens else reserved.tokens
            used = msgspec.structs.replace(reserved, tokens=tokens)
        self._ledger.settle(reservation, used)

    def hold(self, until_s: float) -> None:
        """Record until when the account has no room, on the event loop's clock."""
        self._held_until_s = max(until_s, self._held_until_s)

    def refusal(self, now_s: float) -> Overloaded | None:
        """Return the error of a call that does not wait for the account, None if it may have room."""
        wait_s = self._held_until_s - now_s
        return _used_up(wait_s) if wait_s > 0 else None

    def used_shares(self) -> dict[str, float]:
        """Return the used share of each limit that is known, reservations included, by its name."""
        shares = {limit.name: self._ledger.spent_share(self._account, limit) for limit in self.limits}
        return {name: share for name, share in shares.items() if share is not None}

    def _smallest(self, unit: str) -> int | None:
        return min((limit.amount for limit in self.limits if limit.unit == unit), default=None)


def _used_up(wait_s: float) -> Overloaded:
    """Return the error of a call for which an account has no room. Its amounts are no business of callers."""
    wait = format_duration(round(wait_s * SECOND_US))
    message = (
        f"the rate that the upstream of this model allows to all callers is used up; try again in {wait}"
    )
    return Overloaded(message, retry_after_s=min(RETRY_AFTER_MAX_S, max(1, math.ceil(wait_s))))
