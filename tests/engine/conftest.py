"""Engines on real weights, loaded once per session for each checkpoint and dtype."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.recipe.options import DTypeName
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.networks import int8
from backends.torch.passes.engine import Engine
from tests.engine.cross_encoder import make_cross_encoder

Engines = Callable[[Path, DTypeName], Engine]


@pytest.fixture(autouse=True)
def quick_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept `dtype: int8` however fast it is: a busy machine would refuse it."""
    monkeypatch.setattr(int8, "refuse_slow", lambda _: None)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the real all-MiniLM-L6-v2."""
    return locate_checkpoint(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the one folder of a session into which transformers copies the code of checkpoints.

    Its modules are parts of a package, which Python finds in one folder only.
    """
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="session")
def cross_encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fitted cross-encoder of MiniLM's shape."""
    return make_cross_encoder(minilm, tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture(scope="session")
def engine_of() -> Iterator[Engines]:
    """Load a checkpoint once for each dtype."""

    @cache
    def open_engine(checkpoint: Path, dtype: DTypeName) -> Engine:
        loaded = load(checkpoint, "model", LoadOptions(dtype, "cpu"))
        return Engine(loaded, batch_tokens=4096, queue_tokens=10**9)

    yield open_engine
    open_engine.cache_clear()
