"""Checks of the section `batches`."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from gateway.config.problems import Problem, missing_extra
from gateway.config.schema import BatchesSettings, BucketSettings, Config

BATCH_LIMIT = "batch_"


def batch_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of `batches`, and of limits that only tenants and keys can have."""
    for name, model in config.models.items():
        yield from _limit_problems(f"models.{name}.limits", model.limits)
    for name, tenant in config.tenants.items():
        for model_name, limits in tenant.model_limits.items():
            yield from _limit_problems(f"tenants.{name}.model_limits.{model_name}", limits)
    if config.batches is not None:
        yield from _settings_problems(config.batches)


def _settings_problems(batches: BatchesSettings) -> Iterator[Problem]:
    if not batches.dir:
        yield Problem("batches.dir", "is empty; a folder for files and results")
    if batches.tenant_bytes < batches.file_bytes:
        yield Problem("batches.tenant_bytes", "less than `batches.file_bytes`; raise it, or lower that")
    if batches.bytes < batches.tenant_bytes:
        yield Problem("batches.bytes", "less than `batches.tenant_bytes`; raise it, or lower that")
    if batches.kept_jobs_per_tenant < batches.jobs_per_tenant:
        yield Problem(
            "batches.kept_jobs_per_tenant", "less than `batches.jobs_per_tenant`; raise it, or lower that"
        )
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


def _limit_problems(path: str, limits: Mapping[str, float]) -> Iterator[Problem]:
    for name in limits:
        if name.startswith(BATCH_LIMIT):
            yield Problem(f"{path}.{name}", "only `limits` of tenants and keys may have it")
