"""One upstream at work: its replicas, the lane in front of them, and how its tokens are counted."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from backends.texts import AT_ONCE_CHARACTERS, ModelWork, each_text, items_of
from gateway.batching.lane import Lane
from gateway.batching.slices import Bounds, bounds_of, tightest, token_bounds
from gateway.calls import Call, Similarity, Work, characters_of
from gateway.config import schema as config
from gateway.prompts import with_prompt, with_roles
from gateway.routing.pool import Pool
from gateway.upstreams.token_ids import IdDecoder
from gateway.vector_spaces.space import VectorSpace

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens import TextTokenizer

# Threads of its own: counting that nobody waits for any more must not hold up anything else.
COUNTING = ThreadPoolExecutor(2, "count")

MIXED = "mixed"
# refused: the replicas that answer are of another vector space.
UpstreamState = Literal["ready", "loading", "refused", "unavailable"]


class PreparedWork:
    """One call as replicas are asked for it, given what they were known to do: told."""

    __slots__ = ("_most_tokens", "told", "work")

    def __init__(self, work: BackendWork, told: Capabilities | None) -> None:
        self.work = work
        self.told = told
        self._most_tokens: list[int] | None = None

    def most_tokens(self) -> list[int]:
        """An upper bound of the tokens of each input, without a tokenizer."""
        if self._most_tokens is None:
            told, prompt = self.told, self.prompt() or ""
            most, overhead = (told.max_input_tokens, told.overhead_tokens) if told else (None, 0)
            self._most_tokens = token_bounds(self.work, most, prompt, pair_overhead=overhead)
        return self._most_tokens

    def prompt(self) -> str | None:
        """What is put before each input; None where only the upstream knows."""
        work, told = self.work, self.told
        if not isinstance(work, Embed | Encode | Tokenize) or told is None:
            return ""
        name = told.default_prompt if work.prompt_name is None else work.prompt_name
        return told.prompts.get(name) if name else ""


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
        self._bounds = BoundsNow(pool, settings)
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
        return self._bounds()

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
        if not isinstance(work, Rerank | Score):
            return isinstance(work, Similarity)
        offered = self.capabilities.operations if self.capabilities else frozenset()
        return Operation.RERANK not in offered and Operation.EMBED in offered

    def prepare(
        self, call: Call, prompts: Mapping[str, str], known: PreparedWork | None = None
    ) -> PreparedWork:
        """What replicas are asked for: what is scored by cosine is embedded, a query first, with the prompts
        of their roles; each text of pairs once.

        prompts: of the model's config, beside those of the upstream's and the checkpoint's own. known: what
        was found before, which holds unless replicas have told something else since.
        """
        told = self.capabilities
        if known is not None and known.told is told:
            return known
        return PreparedWork(self._prompted(call, prompts, told), told)

    def _prompted(self, call: Call, prompts: Mapping[str, str], told: Capabilities | None) -> BackendWork:
        work = self._as_work(call.work)
        if not isinstance(work, Embed | Encode | Tokenize):
            return work
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

    def may_count(self, sent: PreparedWork) -> bool:
        """Whether `exact_tokens` may know more than `most_tokens`, if its tokenizer can be opened."""
        work, told = sent.work, sent.told
        if told is None or told.max_input_tokens is None or not (self.settings.tokenizer or told.checkpoint):
            return False
        if isinstance(work, Tokenize | Detokenize) or sent.prompt() is None:
            return False
        # Not the tokenizer alone knows what the pairs of such a reranker become.
        return not (isinstance(work, Rerank) and told.overhead_tokens)

    async def exact_tokens(self, sent: PreparedWork) -> list[int] | None:
        """The tokens of each input as the model will count them; None without a tokenizer."""
        tokenizer = await self._open(sent) if self.may_count(sent) else None
        work = sent.work
        if tokenizer is None or isinstance(work, Tokenize | Detokenize):
            return None
        prompt = sent.prompt() or ""
        if (
            isinstance(work, Embed)
            and characters_of(work) + len(prompt) * len(work.inputs) <= AT_ONCE_CHARACTERS
        ):
            return _lengths(tokenizer, work, prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(COUNTING, _lengths, tokenizer, work, prompt)

    async def _open(self, sent: PreparedWork) -> "TextTokenizer | None":
        assert sent.told is not None
        assert sent.told.max_input_tokens is not None
        source = self.settings.tokenizer or sent.told.checkpoint or ""
        if self._tokenizer is None:
            async with self._opening:
                if self._tokenizer is None:
                    self._tokenizer = await asyncio.to_thread(_opened, source, sent.told.max_input_tokens)
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


class BoundsNow:
    """What every replica that has told takes in one request, made tighter by the config."""

    def __init__(self, pool: Pool, settings: config.Upstream) -> None:
        self._pool = pool
        self._settings = settings
        self._told: list[Capabilities | None] = []
        self._bounds = Bounds()

    def __call__(self) -> Bounds:
        """Worked out anew only when a replica has told something else."""
        told = [one.capabilities for one in self._pool.replicas]
        if told != self._told:
            self._told, self._bounds = told, self._tightest([one for one in told if one is not None])
        return self._bounds

    def _tightest(self, told: Sequence[Capabilities]) -> Bounds:
        settings = self._settings
        each = [bounds_of(one, settings.batch_inputs, settings.batch_tokens) for one in told]
        return tightest(each) if each else Bounds()


def _opened(source: str, max_tokens: int) -> "TextTokenizer | None":
    from backends.tokens import open_tokenizer

    try:
        return open_tokenizer(Path(locate_tokenizer(source)), max_tokens)
    except ModelUnavailable:
        # Counting falls back to the upper bound, which no limit is overshot by.
        return None


def texts_of(work: Score) -> tuple[str, ...]:
    """Each text of some pairs once, in the order of their first places."""
    return tuple(dict.fromkeys(text for pair in work.pairs for text in pair))


def _lengths(tokenizer: "TextTokenizer", work: ModelWork, prompt: str) -> list[int]:
    asked = each_text(work, lambda text: prompt + text) if prompt else work
    return tokenizer.encode_items(items_of(asked), Truncate.RIGHT).lengths
