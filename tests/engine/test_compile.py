"""`compile: true`: the same vectors, or an error that names the reason."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import transformers

from backends.contract import Embed, EmbedReply, Vectors
from backends.contract.errors import ModelUnavailable
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load, load_model, options_of
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.wire import ModelBoot
from tests.engine.checkpoints import ENCODERS, SMALL, make_encoder
from tests.engine.texts import real_texts

pytestmark = pytest.mark.slow

# Prints how many graphs a compiled model has once loaded and after texts of many lengths, and saves vectors.
SERVE_COMPILED = """
import asyncio, os, sys
from pathlib import Path
from torch._dynamo.utils import counters
from backends.contract import Embed
from backends.torch.passes.engine import Engine
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.threads import ForwardThreads
from tests.engine.texts import real_texts
import numpy, torch

async def main():
    threads = ForwardThreads(torch.device("cpu"), cores=2)
    model = load(
        Path(sys.argv[1]), "tiny", LoadOptions("float32", "cpu", compiled=True),
        run_on_device=lambda warm_up: threads.warm_up(warm_up).result(),
    )
    print(counters["stats"]["unique_graphs"], flush=True)
    engine = Engine(model, batch_tokens=256, queue_tokens=10**9, threads=threads)
    for words in range(2, 14):
        await engine.run(Embed(("word " * words, "word " * (words // 2))))
    # Two passes at once, on half of the cores each.
    await asyncio.gather(*(engine.run(Embed(("word " * 100,) * 4)) for _ in range(8)))
    reply = await engine.run(Embed(tuple(real_texts()[:40])))
    numpy.save(sys.argv[2], reply.vectors)

asyncio.run(main())
print(counters["stats"]["unique_graphs"], flush=True)
# The engine ends in the same way: its threads must not run during the interpreter's shutdown.
os._exit(0)
"""


class Compiled(NamedTuple):
    """Checkpoint, its vectors of 40 texts if compiled, and the number of graphs before and after serving."""

    checkpoint: Path
    vectors: Vectors
    loaded: int
    served: int


def load_tiny(folder: Path, *, compiled: bool) -> LoadedModel:
    return load(folder, "tiny", LoadOptions("float32", "cpu", compiled=compiled))


@pytest.fixture(scope="module")
def compiled(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compile and run a model once, because compiling takes seconds."""
    folder = tmp_path_factory.mktemp("compiled")
    # The compiler takes seconds for each layer.
    make_encoder(transformers.BertConfig(**SMALL | {"num_hidden_layers": 1}), minilm, folder)
    vectors = folder / "vectors.npy"
    # In a process of its own: graphs of other tests would count towards the compiler's limit.
    done = subprocess.run(
        [sys.executable, "-c", SERVE_COMPILED, str(folder), str(vectors)],
        capture_output=True,
        text=True,
        # Compiling takes long on a busy machine.
        timeout=270,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    loaded, served = (int(line) for line in done.stdout.split())
    return Compiled(folder, np.load(vectors), loaded, served)


async def test_compiled_model_gives_the_same_vectors(compiled: Compiled) -> None:
    engine = Engine(load_tiny(compiled.checkpoint, compiled=False), batch_tokens=256, queue_tokens=10**9)
    reply = await engine.run(Embed(tuple(real_texts()[:40])))

    assert isinstance(reply, EmbedReply)
    np.testing.assert_allclose(reply.vectors, compiled.vectors, atol=1e-4)


def test_model_is_compiled_once_for_all_lengths(compiled: Compiled) -> None:
    # One graph for the first shape and one for all others, again for half of the cores. None while serving.
    assert 1 <= compiled.loaded <= 4
    assert compiled.served == compiled.loaded


def test_error_names_the_missing_compiler(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ModelUnavailable, match=r"needs a C\+\+ compiler"):
        load_tiny(tmp_path, compiled=True)


def test_refuses_to_compile_an_architecture_with_its_own_attention(minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS["mpnet"][0](), minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="mpnet"):
        load_tiny(tmp_path, compiled=True)


def test_nothing_is_compiled_for_a_processor_and_a_note_says_so(minilm: Path) -> None:
    boot = ModelBoot("tiny", str(minilm), device="cpu", compiled=True)

    assert not options_of(boot).compiled
    loaded = load_model(boot, minilm, lambda _: None, lambda warm_up: warm_up())
    assert "`compile` has no effect on a processor" in " ".join(loaded.capabilities.notes)
