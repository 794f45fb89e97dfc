"""Heartbeat of one gateway in the shared store, and renewal of its leases."""

from collections.abc import Callable, Sequence

import msgspec

from gateway.quotas.account import STATE_TTL_S
from gateway.quotas.ledger import LEASE_US, Reservation
from gateway.quotas.limits import SECOND_US
from gateway.quotas.operations import field_of, keys_of
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

RENEW = load_script("meters", "renew")
BEAT = load_script("meters", "beat")
# Gateways with a heartbeat within this many seconds divide the limits while the store is down.
ALIVE_S = 10.0
GATEWAYS_KEY = "gw:gateways"
GATEWAYS_TTL_S = 3600


class GatewayHeartbeat:
    """Presence of one gateway in the store. now_us: a test's clock."""

    def __init__(self, client: RedisClient, gateway_id: str, now_us: Callable[[], int] | None = None) -> None:
        self._client = client
        self._gateway_id = gateway_id
        self._now_us = now_us

    async def beat(self) -> int:
        """Record this gateway as alive and return the number of live gateways. Raises: StoreUnavailable."""
        argument = {
            "now": self._now(),
            "id": self._gateway_id,
            "alive": round(ALIVE_S * SECOND_US),
            "ttl": GATEWAYS_TTL_S,
        }
        # A script, not plain commands: a server that takes commands and refuses scripts is of no use.
        reply = await self._client.run_script(BEAT, [GATEWAYS_KEY], msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(reply, type=int)

    async def renew(self, tenant: str, reservations: Sequence[Reservation]) -> None:
        """Extend the leases of a tenant's requests in flight. Raises: StoreUnavailable."""
        argument = {
            "now": self._now(),
            "lease": LEASE_US,
            "ttl": STATE_TTL_S,
            "calls": [_renewal(reservation) for reservation in reservations],
        }
        await self._client.run_script(RENEW, keys_of(tenant), msgspec.msgpack.encode(argument))

    def _now(self) -> int:
        """Return a test's time, or 0 for the clock of Redis."""
        return self._now_us() if self._now_us else 0


def _renewal(reservation: Reservation) -> tuple[str, int, int, list[str]]:
    """Encode a request in flight as renew.lua reads it."""
    request = reservation.request
    slots = [field_of(limit) for limit in request.limits if limit.period == "in_flight"]
    return request.id, reservation.at_us, request.expires_us, slots
