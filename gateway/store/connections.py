"""Open redis-py clients by URL: a plain server, TLS, Sentinel or a cluster."""

from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


def is_cluster(url: str) -> bool:
    """Return True if the URL lists the nodes of a Redis Cluster."""
    return url.startswith("redis+cluster://")


def open_clients(url: str, timeout_s: float) -> list[Any]:
    """Return the client of the store, followed by those of its sentinels."""
    options: dict[str, Any] = {
        "socket_timeout": None,  # BoundedTask is the only timeout; two would race.
        "socket_connect_timeout": max(timeout_s, 0.25),
        "decode_responses": False,
        "protocol": 2,
    }
    if url.startswith("redis+sentinel://"):
        return _sentinel_clients(url, options)
    if is_cluster(url):
        parts = urlsplit(url)
        nodes = [ClusterNode(host, port) for host, port in _hosts(parts.netloc, DEFAULT_PORT)]
        return [RedisCluster(startup_nodes=nodes, **(options | _credentials(url)))]
    return [Redis.from_url(url, **options)]


def _sentinel_clients(url: str, options: dict[str, Any]) -> list[Any]:
    """Parse redis+sentinel://[user:password@]h1:p1,h2:p2/name/db and return the clients."""
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    # redis-py has not typed its constructor.
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(parts.netloc, SENTINEL_PORT), socket_connect_timeout=1.0
    )
    master = sentinel.master_for(name, db=int(database or 0), **(options | _credentials(url)))
    return [master, *sentinel.sentinels]


def _hosts(netloc: str, default_port: int) -> list[tuple[str, int]]:
    hosts = netloc.rpartition("@")[2].split(",")
    split = [host.partition(":") for host in hosts]
    return [(host, int(port or default_port)) for host, _, port in split]


def _credentials(url: str) -> dict[str, Any]:
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    credentials = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}
