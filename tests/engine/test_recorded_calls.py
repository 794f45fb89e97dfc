"""The recorded calls of a real TEI with all-MiniLM-L6-v2, sent to the gateway with the built-in engine.

TEI computes GELU by its approximation with tanh, whatever the checkpoint says. The engine computes what the
checkpoint says: with the approximation its numbers are TEI's, without it they differ by a part in a thousand.
"""

from pathlib import Path
from typing import Any

import pytest

from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from tests.conftest import Boots
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


@pytest.fixture(scope="module", params=list(TOLERANCES))
def engine(
    request: pytest.FixtureRequest, minilm: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EngineInProcess, float]:
    """Return an engine with the checkpoint's weights and an activation, and the tolerance of its numbers."""
    folder = with_activation(minilm, tmp_path_factory.mktemp(request.param) / "minilm", request.param)
    return EngineInProcess(load(folder, "minilm", LoadOptions("float32", "cpu"))), TOLERANCES[request.param]


@pytest.mark.parametrize("recorded", CALLS, ids=name_of)
async def test_engine_answers_as_tei_does(
    boot: Boots, engine: tuple[EngineInProcess, float], recorded: dict[str, Any]
) -> None:
    backend, tolerance = engine
    async with boot({}, CONFIG, engines={"minilm": backend}) as gateway:
        reply = await gateway.client.request(
            recorded["method"], recorded["path"], content=body_of(recorded["request"])
        )

    assert_answered(recorded, reply, kept_status(recorded))
    if recorded["status"] == reply.status_code == 200 and reply.content:
        is_rounded = recorded["path"] == "/similarity"
        assert_equal(recorded["reply"], reply.json(), max(tolerance, ROUNDED) if is_rounded else tolerance)
