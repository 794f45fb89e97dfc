"""Two gateways in one process share their routes and nothing else."""

from gateway.tenants.keyring import key_digest
from tests.conftest import Boots, Running
from tests.fakes.tei import FakeTei


def config(model: str, key: str) -> str:
    return f"""
admin: {{keys: ["{key_digest(key)}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{{model}: {{upstream: one}}}}
"""


async def models_and_status(gateway: Running, key: str) -> tuple[list[str], int]:
    """Return the listed models, and the status of a request with an operator's key."""
    models = (await gateway.client.get("/v1/models")).json()["data"]
    status = await gateway.client.get("/admin/status", headers={"authorization": f"Bearer {key}"})
    return [model["id"] for model in models], status.status_code


async def test_each_gateway_serves_its_own_models_and_keys(boot: Boots) -> None:
    async with (
        boot({"tei-0": FakeTei()}, config("a", "operator-of-a")) as a,
        boot({"tei-0": FakeTei()}, config("b", "operator-of-b")) as b,
    ):
        assert (["a"], 200) == await models_and_status(a, "operator-of-a")
        assert (["b"], 401) == await models_and_status(b, "operator-of-a")
        assert (["a"], 401) == await models_and_status(a, "operator-of-b")
        assert (["b"], 200) == await models_and_status(b, "operator-of-b")
