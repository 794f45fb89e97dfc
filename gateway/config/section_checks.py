"""Checks of a whole configuration, and of the sections that are about neither upstreams nor access.

They find what no value shows by itself: references to nothing, and settings that do not fit each other. Reads
no files.
"""

import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from ipaddress import ip_address
from urllib.parse import urlsplit

from gateway.config.access_checks import (
    NO_NETWORK,
    all_limit_problems,
    end_user_problems,
    is_network,
    listener_problems,
    sign_on_problems,
    tenant_problems,
)
from gateway.config.problems import Problem, missing_extra, unknown_name
from gateway.config.schema import (
    BatchesSettings,
    BucketSettings,
    CommandTemplate,
    Config,
    Defaults,
    FetchSettings,
    ManagerSettings,
    NotifySettings,
)
from gateway.config.upstream_checks import (
    currency_problem,
    header_problems,
    model_problems,
    model_upstream_problems,
    upstream_problems,
)

STORE = re.compile(r"(rediss?|redis\+cluster)://[^/]|redis\+sentinel://[^/]+/[^/]+")
STORES_ALLOWED = "memory, redis://host:port/db, rediss://host:port/db, redis+sentinel://h1,h2/name/db, redis+cluster://h1,h2"
HOST = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?", re.IGNORECASE)
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
EXTRA_ARGS = "{extra_args}"
# Fields of a request for an instance that a template may have a place for.
OPTIONAL_PLACEHOLDERS = (
    "max_batch_tokens",
    "max_concurrent_requests",
    "pooling",
    "gpu_id",
    "prometheus_port",
    "device",
)
PLACEHOLDERS = ("name", "model_id", "port", "extra_args", *OPTIONAL_PLACEHOLDERS)
REQUIRED_PLACEHOLDERS = ("model_id", "port")
# Part of labels and messages.
INSTANCE_KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
ENGINE = "engine"


def config_problems(config: Config, upstreams: Collection[str], models: Collection[str]) -> Iterator[Problem]:
    """Yield the problems that no value shows by itself.

    upstreams, models: names in the file, including those of entries that have a mistake of their own.
    """
    yield from listener_problems(config)
    yield from _fetch_problems(config.media.fetch)
    yield from _batches_problems(config.batches)
    yield from _manager_problems(config.manager)
    yield from _quota_problems(config)
    yield from _cache_problems(config)
    yield from all_limit_problems(config)
    if config.tracing is not None:
        yield from header_problems(config.tracing.headers, "tracing.headers")
    if config.metrics is not None:
        yield from header_problems(config.metrics.headers, "metrics.headers")
    yield from _notify_problems(config.notify)
    for name, upstream in config.upstreams.items():
        yield from upstream_problems(upstream, f"upstreams.{name}")
    yield from _default_problems(config.defaults, models)
    yield from end_user_problems(config.end_users)
    yield from tenant_problems(config, models)
    yield from sign_on_problems(config.sign_on, models)
    for name, model in config.models.items():
        if problem := currency_problem(name, model, config.currency):
            yield problem
        yield from model_problems(name, model, upstreams)
        yield from model_upstream_problems(name, model, config.upstreams)


def _default_problems(defaults: Defaults, models: Collection[str]) -> Iterator[Problem]:
    for operation in ("embed", "rerank", "classify"):
        default = getattr(defaults, operation)
        if default is not None and default not in models:
            yield Problem(f"defaults.{operation}", unknown_name("model", default, models))
    if defaults.any_name and len(models) > 1:
        message = f"needs a file with one model, which serves every name; this one has {len(models)}"
        yield Problem("defaults.any_name", message)


def _notify_problems(notify: NotifySettings | None) -> Iterator[Problem]:
    """Yield the problems of a webhook. The messages leave its address out, which may contain a secret."""
    if notify is None:
        return
    if not _can_be_called(notify.url):
        yield Problem("notify.url", "not an address that can be called, https://host/path")
    elif "@" in urlsplit(notify.url).netloc:
        yield Problem(
            "notify.url", "has a user or password; receivers check the signature, see `notify.secret`"
        )
    if len(set(notify.on)) < len(notify.on):
        yield Problem("notify.on", "names an event twice")


def _can_be_called(url: str) -> bool:
    """Return whether a URL is one of HTTP, without characters that the URL parser leaves out."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.fragment
        )
    except ValueError:
        return False


def _fetch_problems(fetch: FetchSettings | None) -> Iterator[Problem]:
    """Yield the problems of the addresses that the gateway may fetch pictures from."""
    if fetch is None:
        return
    for index, host in enumerate(fetch.hosts):
        if not (HOST.fullmatch(host) or _is_ip(host)):
            message = f"{host!r} is not a name, an IP address, *.example.org or *"
            yield Problem(f"media.fetch.hosts[{index}]", message)
    for index, network in enumerate(fetch.private):
        if not is_network(network):
            yield Problem(f"media.fetch.private[{index}]", NO_NETWORK)
    if fetch.request_bytes < fetch.item_bytes:
        yield Problem(
            "media.fetch.request_bytes", "less than `media.fetch.item_bytes`; raise it, or lower that"
        )


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _batches_problems(batches: BatchesSettings | None) -> Iterator[Problem]:
    if batches is None:
        return
    if not batches.dir:
        yield Problem("batches.dir", "is empty; a folder for files and results")
    for key, least in (
        ("tenant_bytes", "file_bytes"),
        ("bytes", "tenant_bytes"),
        ("kept_jobs_per_tenant", "jobs_per_tenant"),
    ):
        if getattr(batches, key) < getattr(batches, least):
            yield Problem(f"batches.{key}", f"less than `batches.{least}`; raise it, or lower that")
    if batches.bucket is not None:
        yield from _bucket_problems(batches.bucket)


def _bucket_problems(bucket: BucketSettings) -> Iterator[Problem]:
    if find_spec("obstore") is None:
        yield Problem("batches.bucket", missing_extra("s3"))
    if not bucket.name:
        yield Problem("batches.bucket.name", "is empty; the name of a bucket")
    if bucket.endpoint is not None and not bucket.endpoint.startswith(("http://", "https://")):
        yield Problem("batches.bucket.endpoint", "not a URL, such as https://s3.example.org")
    for key in ("name", "prefix", "region", "access_key", "secret_key"):
        if not getattr(bucket, key).isprintable():
            yield Problem(f"batches.bucket.{key}", "has a line break or another control character")
    if bool(bucket.access_key) != bool(bucket.secret_key):
        yield Problem("batches.bucket", "set both `access_key` and `secret_key`, or neither")


def _manager_problems(manager: ManagerSettings | None) -> Iterator[Problem]:
    """Yield the problems of the commands that instances may start, and of their default kind."""
    if manager is None:
        return
    for kind, template in manager.commands.items():
        path = f"manager.commands.{kind}"
        if kind == ENGINE or not INSTANCE_KIND.fullmatch(kind):
            message = "a kind has lower-case letters, digits, dashes and underscores, and is not `engine`"
            yield Problem(path, message)
        yield from _template_problems(template, path)
    kinds = (ENGINE, *manager.commands)
    if manager.kind not in kinds:
        yield Problem("manager.kind", unknown_name("kind", manager.kind, kinds))


def _template_problems(template: CommandTemplate, path: str) -> Iterator[Problem]:
    names = [name for argument in template.argv for name in PLACEHOLDER.findall(argument)]
    if not template.argv or not template.argv[0] or PLACEHOLDER.search(template.argv[0]):
        yield Problem(f"{path}.argv", "begins with the program, which is no placeholder")
    for name in names:
        if name not in PLACEHOLDERS:
            message = f"{{{name}}} is no placeholder; allowed: {', '.join(PLACEHOLDERS)}"
            yield Problem(f"{path}.argv", message)
    for name in REQUIRED_PLACEHOLDERS:
        if name not in names:
            yield Problem(f"{path}.argv", f"has no place for {{{name}}}")
    if any(EXTRA_ARGS in argument and argument != EXTRA_ARGS for argument in template.argv):
        yield Problem(f"{path}.argv", f"{EXTRA_ARGS} is an argument of its own")
    if not re.fullmatch(r"/[!-~]*", template.health):
        yield Problem(f"{path}.health", "is the path of a URL, such as /health")


def _quota_problems(config: Config) -> Iterator[Problem]:
    if message := _store_problem(config.quotas.store):
        yield Problem("quotas.store", message)
    if config.workers > 1 and config.quotas.store == "memory":
        yield Problem(
            "workers", "more than 1 need quotas that they count together: a Redis in `quotas.store`"
        )


def _cache_problems(config: Config) -> Iterator[Problem]:
    if config.cache is None:
        for name, model in config.models.items():
            if model.cache:
                yield Problem(f"models.{name}.cache", "needs the section `cache`, which says where")
        return
    if config.cache.store == "redis":
        if config.quotas.store == "memory":
            yield Problem("cache.store", "needs a Redis in `quotas.store`, or a URL of its own")
    elif message := _store_problem(config.cache.store):
        yield Problem("cache.store", message.replace("memory,", "memory, redis,", 1))


def _store_problem(store: str) -> str | None:
    """Return the problem of a store's URL without any part of it, because it may contain a password."""
    if store == "memory":
        return None
    if not STORE.match(store):
        return f"not one of: {STORES_ALLOWED}"
    try:
        parts = urlsplit(store)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        ports = [urlsplit(f"//{host}").port for host in hosts]
        if (
            all(urlsplit(f"//{host}").hostname for host in hosts)
            and 0 not in ports
            and "@" not in (parts.path + parts.query + parts.fragment)
        ):
            return None
    except ValueError:
        pass
    return "its host or port cannot be read; in a password / # ? @ and % are written %2F %23 %3F %40 and %25"
