"""Objects in a bucket, and a whole batch with one, against the S3 server of moto."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from gateway.batches.objects import Objects, ObjectsUnavailable
from gateway.config.schema import BucketSettings
from tests.batches import results, run, servers, texts, with_batches
from tests.conftest import Boots
from tests.fakes.tei import vector_of
from tests.object_contract import ObjectContract
from tests.real.servers import bucket_server

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with bucket_server() as url:
        yield url


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> BucketSettings:
    """Create a bucket of its own for each test."""
    name = f"bucket-{abs(hash(request.node.name))}"
    httpx.put(f"{server}/{name}", trust_env=False).raise_for_status()
    return BucketSettings(name, "prefix", server, access_key="key", secret_key="secret", timeout_s=10)


class TestBucket(ObjectContract):
    """A bucket keeps the promises."""

    @pytest.fixture
    def objects(self, bucket: BucketSettings) -> Objects:
        from gateway.batches.bucket import BucketObjects

        return BucketObjects(bucket)


async def test_a_server_that_is_away_is_reported(tmp_path: Path) -> None:
    from gateway.batches.bucket import BucketObjects

    settings = BucketSettings(
        "b", endpoint="http://127.0.0.1:1", access_key="k", secret_key="s", timeout_s=0.2
    )
    objects = BucketObjects(settings)
    with pytest.raises(ObjectsUnavailable):
        await objects.create("a", b"{}")
    with pytest.raises(ObjectsUnavailable):
        await objects.names("files/")


async def test_runs_a_batch_in_a_bucket(boot: Boots, bucket: BucketSettings, tmp_path: Path) -> None:
    place = {"name": bucket.name, "prefix": "gateway", "endpoint": bucket.endpoint}
    keys = {"access_key": "key", "secret_key": "secret"}
    async with boot(servers(), with_batches(tmp_path, bucket=place | keys)) as gateway:
        end = await run(gateway, texts(300))
        lines = await results(gateway, end["output_file_id"])
        await gateway.client.delete(f"/v1/files/{end['output_file_id']}")

    assert end["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    for number, item in enumerate(lines):
        embedding = item["response"]["body"]["data"][0]["embedding"]
        np.testing.assert_allclose(vector_of(f"text {number}"), embedding, rtol=1e-6)
    assert not (tmp_path / "files").exists()
