"""Many models in one engine process: a memory budget for three of ten, their states, and a crash."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.processes.conftest import Served, wait_until

pytestmark = pytest.mark.slow

MODELS = 10
# Requests of each caller. A number of seconds would be too few requests on a busy machine.
REQUESTS = 12
# A tiny model holds 23 MB, most of it its tokenizer; `big` never fits.
CONFIG = """
listen: 127.0.0.1:0
engine: {{memory_bytes: 72000000}}
upstreams:
{upstreams}
  refusing: {{backend: torch, model: {tiny}, dtype: float32, preload: false, when_loading: refuse}}
  big: {{backend: torch, model: {big}, dtype: float32, preload: false}}
models: {{{models}}}
"""
UPSTREAM = "  m{n}: {{backend: torch, model: {tiny}, dtype: float32, preload: {preload}}}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    minilm = locate_checkpoint(DEFAULT_MODEL)
    folder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path_factory.mktemp("tiny"))
    # With all of its words, so that the memory of a model can be measured.
    shutil.copy(minilm / "tokenizer.json", folder)
    return folder


def config_of(folder: Path, checkpoint: Path) -> Path:
    """Write a config of models m0, m1, …, of which m0 is preloaded, and of two special ones."""
    upstreams = (UPSTREAM.format(n=n, tiny=checkpoint, preload=str(n == 0).lower()) for n in range(MODELS))
    names = [*(f"m{n}" for n in range(MODELS)), "refusing", "big"]
    path = folder / "router.yaml"
    path.write_text(
        CONFIG.format(
            upstreams="\n".join(upstreams),
            tiny=checkpoint,
            big=DEFAULT_MODEL,
            models=", ".join(f"{name}: {{upstream: {name}}}" for name in names),
        )
    )
    return path


def embed(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": model, "input": "some words"})


def residences(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["residence"] for model in client.get("/v1/models").json()["data"]}


def measured(client: httpx.Client, metric: str) -> dict[str, float]:
    """Return a metric's values by its labels."""
    lines = client.get("/metrics").text.splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(metric + "{"))
    return {name: float(value) for name, _, value in found}


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Served]:
    """Serve all models to the tests of this module, which run in order."""
    config = config_of(tmp_path_factory.mktemp("ten"), checkpoint)
    gateway = Served(config).wait_until_up()
    yield gateway
    gateway.stop()


def test_lists_unrequested_model_as_unloaded(served: Served) -> None:
    with served.client() as client:
        assert client.get("/readyz").status_code == 200
        assert wait_until(lambda: residences(client)["m0"] == "loaded")
        # The state of each model is null until its first probe, and models are probed one by one.
        assert wait_until(lambda: residences(client)["m7"] is not None)

        listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
        assert listed["m7"]["residence"] == "unloaded"
        assert "embed" in listed["m7"]["operations"]
        assert client.get("/models/m7/info").json()["residence"] == "unloaded"
        assert client.get("/models/m7/info").json()["max_input_length"] == 130


def test_serves_ten_models_at_random_within_a_budget_for_three(served: Served) -> None:
    def caller(seed: int) -> list[tuple[str, httpx.Response]]:
        dice = random.Random(seed)
        names = [f"m{dice.randrange(MODELS)}" for _ in range(REQUESTS)]
        with served.client() as client:
            return [(name, embed(client, name)) for name in names]

    engine = served.child("backends.torch.serving.server")
    before_bytes = resident_bytes(engine)
    most_bytes = 0
    with ThreadPoolExecutor(4) as callers, served.client() as operator:
        running = [callers.submit(caller, seed) for seed in range(4)]
        while not all(future.done() for future in running):
            most_bytes = max(most_bytes, resident_bytes(engine))
            time.sleep(0.05)
        replies = [reply for future in running for reply in future.result()]
        assert wait_until(lambda: sum(measured(operator, "gateway_model_unloads_total").values()) > 3)

    assert {reply.status_code for _, reply in replies} == {200}
    assert len({name for name, _ in replies}) == MODELS
    vectors = np.array([reply.json()["data"][0]["embedding"] for _, reply in replies])
    np.testing.assert_allclose(vectors, vectors[:1].repeat(len(vectors), axis=0), atol=1e-5)
    # m0 was loaded before. All ten would add 200 MB; three, and a fourth while it loads, add less than half.
    assert most_bytes - before_bytes < 100_000_000
    assert engine == served.child("backends.torch.serving.server")


def test_requests_wait_for_a_killed_engine(served: Served) -> None:
    with served.client() as client:
        assert embed(client, "m3").status_code == 200
        engine = served.child("backends.torch.serving.server")
        os.kill(engine, signal.SIGKILL)
        # Loaded at start, loaded when the engine died, and never loaded.
        assert [embed(client, name).status_code for name in ("m0", "m3", "m7")] == [200, 200, 200]

        assert engine != served.child("backends.torch.serving.server")


def test_loading_model_is_refused_with_retry_after(served: Served) -> None:
    with served.client() as client:
        refused = embed(client, "refusing")
        assert wait_until(lambda: embed(client, "refusing").status_code == 200)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
    assert refused.headers["retry-after"] == "5"


def test_model_that_never_fits_fails_and_the_others_serve(served: Served) -> None:
    with served.client() as client:
        refused = embed(client, "big")
        assert embed(client, "m0").status_code == 200
        assert wait_until(lambda: residences(client)["big"] == "failed")
        (big,) = [model for model in client.get("/v1/models").json()["data"] if model["id"] == "big"]

    assert refused.status_code == 502
    assert "`engine.memory_bytes` is 72 MB" in refused.json()["error"]["message"]
    assert "`engine.memory_bytes` is 72 MB" in big["last_error"]
