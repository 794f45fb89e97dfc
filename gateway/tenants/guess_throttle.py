"""Throttle for addresses that send invalid API keys; a valid key always passes. Pure.

The addresses of one IPv6 network count as one: a client may use any of them.
"""

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address, ip_network

# A person who mistypes, or a deployment with an old key, is not guessing yet.
GUESSES_MAX = 20
REFILL_S = 3.0
# An attacker with more addresses than this evicts the oldest; memory stays bounded.
ADDRESSES_MAX = 10_000
# Part of an IPv6 address that one client may choose the rest of.
PREFIX_V6 = 64
# The latest wrong keys, by digest. A key that was created a moment ago is one until it has been read.
RECENT_MAX = 1_000


class GuessThrottle:
    """A bucket of failures per address; it refills by one every REFILL_S."""

    def __init__(self) -> None:
        self._empty_at_s: OrderedDict[str, float] = OrderedDict()
        self._recent: OrderedDict[tuple[str, str], int] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Return the time until this address may try one more wrong key; 0 if it may now."""
        debt_s = self._empty_at_s.get(network_of(address), now_s) - now_s
        return max(0.0, debt_s + REFILL_S - GUESSES_MAX * REFILL_S)

    def has_recent(self, address: str, digest: str) -> bool:
        """Return whether a failure of this address with this key was counted lately."""
        return (network_of(address), digest) in self._recent

    def record_failure(self, address: str, digest: str, now_s: float) -> None:
        """Count one wrong key."""
        address = network_of(address)
        guess = address, digest
        self._recent[guess] = self._recent.pop(guess, 0) + 1
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        debt_until_s = max(now_s, self._empty_at_s.pop(address, now_s)) + REFILL_S
        self._empty_at_s[address] = debt_until_s
        if len(self._empty_at_s) > ADDRESSES_MAX:
            self._empty_at_s.popitem(last=False)

    def forgive(self, is_known: Callable[[str], bool]) -> None:
        """Refund the recent failures of keys that have since become valid.

        is_known: returns True if the key with this digest exists.
        """
        for guess in [guess for guess in self._recent if is_known(guess[1])]:
            address, failures = guess[0], self._recent.pop(guess)
            if address in self._empty_at_s:
                self._empty_at_s[address] -= failures * REFILL_S


def network_of(address: str) -> str:
    """Return the address of a client, or the network of which it may use every address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        # A listener on both protocols shows IPv4 so, all of it in one network.
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed.packed, PREFIX_V6), strict=False))
