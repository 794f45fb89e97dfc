"""Mistakes in the section `batches`, and limits of batches where they have no effect."""

import pytest

from gateway.quotas.limits import Limit
from gateway.tenants.keyring import Keyring, key_digest
from tests.config_texts import parsed, problems_of
from tests.conftest import CONFIG


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("batches: {dir: ''}", "batches.dir"),
        ("batches: {}", "batches"),
        ("batches: {dir: a, file_bytes: 20, tenant_bytes: 10}", "batches.tenant_bytes"),
        ("batches: {dir: a, bytes: 10}", "batches.bytes"),
        ("batches: {dir: a, kept_jobs_per_tenant: 99}", "batches.kept_jobs_per_tenant"),
        ("batches: {dir: a, bucket: {name: ''}}", "batches.bucket.name"),
        ("batches: {dir: a, bucket: {name: b, endpoint: s3.local}}", "batches.bucket.endpoint"),
        ("batches: {dir: a, bucket: {name: b, access_key: k}}", "batches.bucket"),
        (
            "tenants: {a: {model_limits: {bge: {batch_tokens_per_day: 5}}}}",
            "tenants.a.model_limits.bge.batch_tokens_per_day",
        ),
        ("tenants: {a: {limits: {batch_requests_per_day: 5}}}", "tenants.a.limits.batch_requests_per_day"),
    ],
)
def test_a_mistake_is_named(text: str, path: str) -> None:
    found = problems_of(CONFIG.replace("strict: {", "strict: {limits: {}, ") + text)

    assert any(problem.path.startswith(path) for problem in found)


def test_limits_of_batches_count_only_lines() -> None:
    digest = key_digest("sk")
    config = parsed(
        CONFIG
        + "tenants: {a: {limits: {tokens_per_day: 9, batch_tokens_per_day: 5}, keys: [{id: k, "
        + f'digest: "{digest}", limits: {{batch_tokens_per_month: 7}}}}]}}}}\n'
    )
    owner = Keyring(config.tenants, None).identify("sk")

    assert owner.limits == (Limit("tokens", "day", 9),)
    assert [limit.name for limit in owner.for_batches().limits] == [
        "tokens_per_day",
        "batch_tokens_per_day",
        "key k batch_tokens_per_month",
    ]
