"""One model of an engine's process, in memory or not, and a load of it on its way.

Rule: only the event loop's thread touches it.
"""

import asyncio
from collections import Counter
from pathlib import Path

from backends.contract import Capabilities, ModelState, Residence, UnloadReason
from backends.torch import memory, wire
from backends.torch.engine import Engine
from backends.torch.loader import Loaded
from backends.torch.stats import Recorder


class Arrival:
    """One load on its way. waiting: whose work waits for it; granted: whether they hold the model by now."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.waiting = 0
        self.granted = False


class Model:
    """One model of the process, in memory or not."""

    def __init__(self, boot: wire.ModelBoot) -> None:
        self.boot = boot
        self.folder: Path | None = None
        self.told: Capabilities | None = None
        self.engine: Engine | None = None
        self.arrival: Arrival | None = None
        self.is_leaving = False
        self.in_flight = 0
        self.used_s = 0.0
        # What it held when it was last in memory.
        self.memory_bytes = 0
        self.error: str | None = None
        self.failed_s = 0.0
        self.loads = 0
        self.failed_loads = 0
        self.unloads: Counter[UnloadReason] = Counter()
        self.ended = asyncio.Event()
        self.recorder = Recorder()
        self._batch_tokens: int | None = None
        self._out_of_memory = 0

    @property
    def state(self) -> ModelState:
        """Whether it is in memory."""
        if self.engine is not None:
            return "loaded"
        if self.arrival is not None:
            return "loading"
        return "unloaded" if self.error is None else "failed"

    @property
    def residence(self) -> Residence:
        """What is told of it."""
        return Residence(
            self.state,
            self.error,
            0 if self.engine is None else self.memory_bytes,
            self.loads,
            self.failed_loads,
            dict(self.unloads),
            self._out_of_memory + (0 if self.engine is None else self.engine.out_of_memory),
        )

    def needed_bytes(self, folder: Path) -> int:
        """What it may take to load it: the files' weights as they are, and then what it holds."""
        return max(self.memory_bytes, memory.files_bytes(folder))

    def batch_tokens(self, loaded: Loaded) -> int:
        """Tokens of one forward; what was learnt from running out of memory holds on."""
        told = self.boot.batch_tokens or loaded.batch_tokens
        return min(told, self._batch_tokens or told)

    def failed(self, message: str, now_s: float) -> None:
        """It could not be loaded."""
        self.error = message
        self.failed_s = now_s
        self.failed_loads += 1

    def forget(self, why: UnloadReason) -> None:
        """It has left memory."""
        assert self.engine is not None
        self._out_of_memory += self.engine.out_of_memory
        if self.engine.out_of_memory:
            self._batch_tokens = self.engine.batch_tokens
        self.engine = None
        self.unloads[why] += 1

    def release(self, now_s: float) -> None:
        """One piece of work no longer needs it."""
        self.in_flight -= 1
        self.used_s = now_s
        if not self.in_flight:
            self.ended.set()
