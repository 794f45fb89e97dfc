"""One load of a model and one text through it, to show that it can be served.

`python -m backends.torch.serving.smoke` reads the settings of a model as JSON from its standard input and
writes what it found as JSON to its standard output. It is a process of its own: it imports torch, and a load
may end it.
"""

import asyncio
import logging
import sys
import time

import msgspec

from backends.contract import Classify, Embed, Encode, ModelWork, Operation, Rerank
from backends.contract.errors import BackendError, ModelUnavailable
from backends.torch import wire
from backends.torch.load.loader import load, locate_model, options_of
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel

TEXT = "A text that shows whether the model computes."
QUEUE_TOKENS = 10_000
BATCH_TOKENS = 4096


def smoke_load(boot: wire.ModelBoot) -> wire.SmokeLoad:
    """Load a model and compute one text. A failure is part of the result."""
    started_s = time.perf_counter()
    try:
        loaded = load(locate_model(boot), boot.model, options_of(boot))
        asyncio.run(_compute(loaded))
    except (ModelUnavailable, BackendError) as error:
        return wire.SmokeLoad(error=str(error))
    found = loaded.capabilities
    return wire.SmokeLoad(
        None,
        tuple(sorted(found.operations)),
        found.dimensions,
        found.max_input_tokens,
        round(time.perf_counter() - started_s, 2),
    )


async def _compute(loaded: LoadedModel) -> None:
    engine = Engine(loaded, batch_tokens=BATCH_TOKENS, queue_tokens=QUEUE_TOKENS)
    await engine.run(_work_of(loaded))


def _work_of(loaded: LoadedModel) -> ModelWork:
    found = loaded.capabilities
    if Operation.EMBED in found.operations:
        return Embed((TEXT,))
    if Operation.ENCODE in found.operations:
        return Encode((TEXT,), frozenset(list(found.outputs)[:1]))
    if Operation.RERANK in found.operations:
        return Rerank(TEXT, (TEXT,))
    return Classify((TEXT,))


def main() -> None:
    """Load the model whose settings are on standard input."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=wire.ModelBoot)
    sys.stdout.buffer.write(msgspec.json.encode(smoke_load(boot)))


if __name__ == "__main__":
    main()
