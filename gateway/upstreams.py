"""One upstream at work: its replicas, the lane in front of them, and how its tokens are counted."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from backends.checkpoints import locate_tokenizer
from backends.contract import (
    Capabilities,
    Detokenize,
    Embed,
    Encode,
    Operation,
    Rerank,
    Residence,
    Score,
    Tokenize,
    Truncate,
)
from backends.contract import Work as BackendWork
from backends.errors import ModelUnavailable
from backends.texts import ModelWork, each_text, items_of
from backends.tokens import TextTokenizer, open_tokenizer
from gateway import config
from gateway.batching.lane import Lane
from gateway.batching.slices import Bounds, bounds_of, tightest, token_bounds
from gateway.calls import Call, Similarity, Work
from gateway.decoding import IdDecoder
from gateway.prompts import with_prompt, with_roles
from gateway.routing.pool import Pool
from gateway.spaces.space import VectorSpace

# Threads of its own: counting that nobody waits for any more must not hold up anything else.
COUNTING = ThreadPoolExecutor(2, "count")

MIXED = "mixed"
# refused: the replicas that answer are of another vector space.
UpstreamState = Literal["ready", "loading", "refused", "unavailable"]


class Upstream:
    """What the config calls an upstream, with its collaborators."""

    def __init__(
        self, name: str, settings: config.Upstream, pool: Pool, lane: Lane, space: VectorSpace
    ) -> None:
        self.name = name
        self.settings = settings
        self.pool = pool
        self.lane = lane
        self.space = space
        self.ids = IdDecoder(settings.token_encoding)
        # Calls that go by it, from the route to the reply; it may be closed when there are none.
        self.calls = 0
        self._tokenizer: TextTokenizer | None = None
        self._opening = asyncio.Lock()

    def held(self) -> "Held":
        """A block in which a call goes by it."""
        return Held(self)

    @property
    def idle(self) -> bool:
        """Whether no call goes by it, and nothing is in flight to any of its replicas."""
        return not self.calls and not any(one.batches for one in self.pool.replicas)

    @property
    def capabilities(self) -> Capabilities | None:
        """What it can do; None while no replica has joined."""
        return self.pool.capabilities()

    @property
    def bounds(self) -> Bounds:
        """What one request to it may hold."""
        return bounds_now(self.pool, self.settings)

    @property
    def settled(self) -> bool:
        """Whether it no longer holds up readiness: an engine has loaded, a remote one has been tried."""
        if self.settings.backend == "torch":
            return self.capabilities is not None or self.pool.refused()
        return not self.pool.joining()

    @property
    def fingerprint(self) -> str | None:
        """Which vector space its vectors are in; `mixed` while a replica in use gives others."""
        return MIXED if self.space.id and self.pool.mixed() else self.space.id

    @property
    def state(self) -> UpstreamState:
        """Whether it can be called, and if not, why."""
        if self.pool.usable():
            return "ready"
        if self.pool.refused():
            return "refused"
        return "unavailable" if self.settled else "loading"

    @property
    def residence(self) -> Residence | None:
        """Whether its model is in memory, where it need not be."""
        return next((one.residence for one in self.pool.replicas), None)

    @property
    def counts_here(self) -> bool:
        """Whether tokens are counted before a call is sent: so that tenants can share a request to it."""
        return self.settings.backend != "torch" and self.settings.tokenizer is not None

    def by_cosine(self, work: Work) -> bool:
        """Whether the scores asked for are cosines of embeddings, because nothing here scores pairs."""
        if isinstance(work, Similarity):
            return True
        offered = self.capabilities.operations if self.capabilities else frozenset()
        scored = isinstance(work, Rerank | Score)
        return scored and Operation.RERANK not in offered and Operation.EMBED in offered

    def as_sent(self, call: Call, prompts: Mapping[str, str]) -> BackendWork:
        """What replicas are asked for: what is scored by cosine is embedded, a query first, with the prompts
        of their roles; each text of pairs once.

        prompts: of the model's config, beside those of the upstream's and the checkpoint's own.
        """
        work = self._as_work(call.work)
        if not isinstance(work, Embed | Encode | Tokenize):
            return work
        told = self.capabilities
        own = told.prompts if told else {}
        written = {**self.settings.prompts, **prompts}
        if isinstance(call.work, Rerank) and isinstance(work, Embed):
            return with_roles(work, {**own, **written}, told.default_prompt if told else None)
        return with_prompt(work, call.role, written, own)

    def _as_work(self, work: Work) -> BackendWork:
        match work:
            case Similarity():
                return Embed((work.source, *work.sentences), prompt_name=work.prompt_name)
            case Rerank() if self.by_cosine(work):
                return Embed((work.query, *work.documents))
            case Score() if self.by_cosine(work):
                return Embed(texts_of(work))
        return work

    def most_tokens(self, work: BackendWork) -> list[int]:
        """An upper bound of the tokens of each input, without a tokenizer."""
        told = self.capabilities
        prompt = self._prompt(work) or ""
        if told is None:
            return token_bounds(work, None, prompt)
        return token_bounds(work, told.max_input_tokens, prompt, pair_overhead=told.overhead_tokens)

    async def exact_tokens(self, work: BackendWork) -> list[int] | None:
        """The tokens of each input as the model will count them; None without a tokenizer."""
        if isinstance(work, Tokenize | Detokenize) or self._prompt(work) is None:
            return None
        if isinstance(work, Rerank) and self.capabilities and self.capabilities.overhead_tokens:
            # Not the tokenizer alone knows what its pairs become.
            return None
        tokenizer = await self._open()
        if tokenizer is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(COUNTING, _lengths, tokenizer, work, self._prompt(work) or "")

    def _prompt(self, work: BackendWork) -> str | None:
        """What is put before each input; None where only the upstream knows."""
        told = self.capabilities
        if not isinstance(work, Embed | Encode | Tokenize) or told is None:
            return ""
        name = told.default_prompt if work.prompt_name is None else work.prompt_name
        return told.prompts.get(name) if name else ""

    async def _open(self) -> TextTokenizer | None:
        told = self.capabilities
        if self._tokenizer is not None or told is None or told.max_input_tokens is None:
            return self._tokenizer
        source = self.settings.tokenizer or told.checkpoint
        if source is None:
            return None
        async with self._opening:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(_opened, source, told.max_input_tokens)
        return self._tokenizer


class Held:
    """Counts a call of an upstream for as long as its block runs; a generator would cost more."""

    __slots__ = ("_upstream",)

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def __enter__(self) -> Upstream:
        """The call begins."""
        self._upstream.calls += 1
        return self._upstream

    def __exit__(self, *_: object) -> None:
        """The call is over, however it ended."""
        self._upstream.calls -= 1


def bounds_now(pool: Pool, settings: config.Upstream) -> Bounds:
    """What every replica that has told takes in one request, made tighter by the config."""
    told = [one.capabilities for one in pool.replicas if one.capabilities is not None]
    each = [bounds_of(one, settings.batch_inputs, settings.batch_tokens) for one in told]
    return tightest(each) if each else Bounds()


def _opened(source: str, max_tokens: int) -> TextTokenizer | None:
    try:
        return open_tokenizer(Path(locate_tokenizer(source)), max_tokens)
    except ModelUnavailable:
        # Counting falls back to the upper bound, which no limit is overshot by.
        return None


def texts_of(work: Score) -> tuple[str, ...]:
    """Each text of some pairs once, in the order of their first places."""
    return tuple(dict.fromkeys(text for pair in work.pairs for text in pair))


def _lengths(tokenizer: TextTokenizer, work: ModelWork, prompt: str) -> list[int]:
    asked = each_text(work, lambda text: prompt + text) if prompt else work
    return tokenizer.encode_items(items_of(asked), Truncate.RIGHT).lengths
