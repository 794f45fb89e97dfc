"""Metrics of what a gateway is: version, digest, prices, certificates; and of the memory of its Redis."""

from collections.abc import Callable, Mapping

import msgspec

from gateway import __version__
from gateway.telemetry.instruments import MetricFactory

# Bytes that the fullest server of the store uses, and its bound; 0 where that is not known.
ReadMemory = Callable[[], tuple[int, int]]
# Digest of the configuration in use, in hexadecimal digits; empty if it is not known.
ReadDigest = Callable[[], str]


class Configured(msgspec.Struct, frozen=True):
    """Facts of one configuration.

    prices: of one token, by model. certificates: their ends in seconds
    since 1970, by their place in the configuration.
    """

    currency: str = ""
    prices: Mapping[str, float] = {}
    certificates: Mapping[str, float] = {}


class ConfigMetrics:
    """Gauges of the version, of the configuration, and of the store's memory."""

    def __init__(self, create: MetricFactory) -> None:
        self.read_digest: ReadDigest = str
        build = create.gauge("build_info", "1, with the running version.", ("version",), "livemax")
        build.labels(__version__).set(1)
        self._digest = create.gauge(
            "config_digest", "Digest of the configuration as a number of 48 bits.", (), "livemax"
        )
        self._prices = create.live(
            create.gauge("token_price", "Price of one token.", ("model", "currency"), "livemax")
        )
        self._ends = create.live(
            create.gauge(
                "certificate_end_seconds",
                "End of a certificate in seconds since 1970, as it was loaded.",
                ("certificate",),
                "livemax",
            )
        )
        self._used = create.gauge(
            "store_memory_bytes", "Memory of the fullest Redis server; 0 if unknown.", (), "livemax"
        )
        self._bound = create.gauge("store_memory_max_bytes", "Its maxmemory; 0 without one.", (), "livemax")

    def show(self, configured: Configured) -> None:
        """Show the facts of a configuration."""
        prices = {(model, configured.currency): price for model, price in configured.prices.items()}
        self._prices.keep_only(prices)
        for labels, price in prices.items():
            self._prices.show(labels, price)
        self._ends.keep_only((place,) for place in configured.certificates)
        for place, end_s in configured.certificates.items():
            self._ends.show((place,), end_s)

    def refresh(self, read: ReadMemory) -> None:
        """Read the memory of the store and the digest of the configuration into the gauges."""
        self._digest.set(int(self.read_digest() or "0", 16))
        used, bound = read()
        self._used.set(used)
        self._bound.set(bound)
