"""The recorded calls of a real TEI with all-MiniLM-L6-v2, sent to the gateway with the built-in engine.

TEI computes GELU by its approximation with tanh, whatever the checkpoint says. The engine computes what the
checkpoint says: with the approximation its numbers are TEI's, without it they differ by a part in a thousand.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from tests.conftest import Running, running_gateway
from tests.engine.checkpoints import with_activation
from tests.engine.engines import EngineInProcess
from tests.recorded_tei import RECORDED, assert_answered, assert_equal, body_of, kept_status, name_of

CALLS = [recorded for recorded in RECORDED if recorded["model"] == "embedder"]
CONFIG = """
upstreams: {minilm: {backend: torch, model: minilm, dtype: float32, token_encoding: model}}
models: {minilm: {upstream: minilm}}
defaults: {any_name: true}
"""
TOLERANCES = {"gelu": 3e-3, "gelu_pytorch_tanh": 1e-5}
# TEI's cosine of a text with itself is 0.99993.
ROUNDED = 1e-4


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(TOLERANCES))
async def served(
    request: pytest.FixtureRequest, minilm: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Running, float]]:
    """Return a gateway on the checkpoint's weights with an activation, and the tolerance of its numbers."""
    folder = with_activation(minilm, tmp_path_factory.mktemp(request.param) / "minilm", request.param)
    engine = EngineInProcess(load(folder, "minilm", LoadOptions("float32", "cpu")))
    async with running_gateway({}, CONFIG, engines={"minilm": engine}) as gateway:
        yield gateway, TOLERANCES[request.param]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("recorded", CALLS, ids=name_of)
async def test_engine_answers_as_tei_does(served: tuple[Running, float], recorded: dict[str, Any]) -> None:
    gateway, tolerance = served
    reply = await gateway.client.request(
        recorded["method"], recorded["path"], content=body_of(recorded["request"])
    )

    assert_answered(recorded, reply, kept_status(recorded))
    if recorded["status"] == reply.status_code == 200 and reply.content:
        is_rounded = recorded["path"] == "/similarity"
        assert_equal(recorded["reply"], reply.json(), max(tolerance, ROUNDED) if is_rounded else tolerance)
