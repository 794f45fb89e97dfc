"""What a vLLM server offers: tried once, with short texts, when it joins.

A release says little of what it can do and ignores fields that it does not know. A process does one pooling
task, so what is found first is all there is.
"""

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from backends.contract import Output, Vectors
from backends.errors import ReplicaFailed
from backends.http import UpstreamResponse
from backends.openai_wire import decode_embeddings
from backends.vectors import sigmoid
from backends.vllm_wire import (
    BASE64,
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    SCORE,
    TOKENIZE,
    Body,
    classes,
    failure,
    scores,
    token_list,
    token_vectors,
    tokenize_body,
)

PROBE = ("a", "b c")
# What a pair is found to be scored with may not be judged by one pair alone.
PROBE_PAIRS = ("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))
# A route that is not there, or is there for another kind of model.
NOT_OFFERED = frozenset({400, 404, 405, 501})
# A dense vector has next to no zeros, the weights of a vocabulary's terms little else.
SPARSE_SHARE = 0.5

Ask: TypeAlias = Callable[[str, Body], Awaitable[UpstreamResponse]]
# What asks for vectors that are not normalized: since 0.20, and before.
Switch: TypeAlias = Literal["use_activation", "normalize"]
Scores: TypeAlias = Literal["on_request", "logits", "sigmoid"]
SWITCHES: tuple[Switch, ...] = ("use_activation", "normalize")


class Facing(msgspec.Struct, frozen=True):
    """What a replica was found to be when it joined.

    width: of its vectors; None where it has none. raw_vectors: the switch that gets them unnormalized.
    scores: what it gives for a pair: logits when asked, logits always, or sigmoid always; None is no scores.
    specials: how many special tokens stand before and after a text; special_ids: which they are.
    sparse: its vectors are term weights. token_width: of its token vectors; None where it has none;
    raw_tokens: whether a switch gets those unnormalized. classes: how many it tells of a text; 0 is none;
    raw_classes: whether a switch gets their logits.
    """

    model: str
    max_tokens: int
    version: str = ""
    width: int | None = None
    raw_vectors: Switch | None = None
    scores: Scores | None = None
    specials: tuple[int, int] | None = None
    special_ids: frozenset[int] = frozenset()
    sparse: bool = False
    token_width: int | None = None
    raw_tokens: bool = False
    classes: int = 0
    raw_classes: bool = False

    @property
    def outputs(self) -> frozenset[Output]:
        """The kinds that it gives."""
        kinds = {
            Output.DENSE: self.width is not None,
            Output.SPARSE: self.sparse,
            Output.MULTIVECTOR: self.token_width is not None,
            Output.TOKENS: self.raw_tokens,
        }
        return frozenset(kind for kind, given in kinds.items() if given)

    def same_server(self, other: "Facing") -> bool:
        """Whether what a server says of itself is the same."""
        mine = (self.model, self.max_tokens, self.version)
        return mine == (other.model, other.max_tokens, other.version)


def kind_of_scores(asked_raw: Vectors, asked_plain: Vectors) -> Scores | None:
    """What a server's scores are, from the same pairs scored without and with its activation.

    asked_raw, asked_plain: (n,) float32. Equal ones mean that the switch is not known or that the
    model's own activation is none; only a logit can lie outside of 0 to 1. None: neither logits nor
    sigmoid, as late interaction's.
    """
    if np.allclose(asked_raw, asked_plain, atol=1e-3):
        return "logits" if ((asked_raw < 0) | (asked_raw > 1)).any() else "sigmoid"
    return "on_request" if np.allclose(sigmoid(asked_raw), asked_plain, atol=0.02) else None


def specials_around(whole: list[int], bare: list[int]) -> tuple[int, int] | None:
    """How many tokens stand before and after a text's own; None where its own are not found."""
    for before in range(len(whole) - len(bare) + 1):
        if whole[before : before + len(bare)] == bare:
            return before, len(whole) - len(bare) - before
    return None


async def explored(facing: Facing, ask: Ask) -> Facing:
    """What a replica offers, tried with short texts.

    Raises: BackendError where it fails for another reason than not offering something.
    """
    facing = await _with_specials(facing, ask)
    vectors = await _tried_vectors(ask, {})
    if vectors is not None:
        return await _with_vectors(facing, vectors, ask)
    kind = await _tried_scores(ask)
    if kind is not None:
        return msgspec.structs.replace(facing, scores=kind)
    facing = await _with_classes(facing, ask)
    return facing if facing.classes else await _with_token_vectors(facing, ask)


async def _with_vectors(facing: Facing, vectors: Vectors, ask: Ask) -> Facing:
    if (vectors == 0).mean() > SPARSE_SHARE:
        return msgspec.structs.replace(facing, sparse=True)
    switch = None
    for one in SWITCHES:
        raw = await _tried_vectors(ask, {one: False})
        if raw is not None and not np.allclose(np.linalg.norm(raw, axis=1), 1.0, atol=0.01):
            switch = one
            break
    return msgspec.structs.replace(facing, width=vectors.shape[1], raw_vectors=switch)


async def _with_specials(facing: Facing, ask: Ask) -> Facing:
    whole = await _tried(ask, TOKENIZE, tokenize_body("a", special=True))
    bare = await _tried(ask, TOKENIZE, tokenize_body("a", special=False))
    if whole is None or bare is None:
        return facing
    ids, own = token_list(whole).tokens, token_list(bare).tokens
    around = specials_around(ids, own)
    special_ids = frozenset(ids) - frozenset(own) if around else frozenset()
    return msgspec.structs.replace(facing, specials=around, special_ids=special_ids)


async def _with_classes(facing: Facing, ask: Ask) -> Facing:
    raw = await _tried_classes(ask, activated=False)
    plain = await _tried_classes(ask, activated=True)
    if raw is None or plain is None or ((plain < 0) | (plain > 1)).any():
        return facing
    differs = raw.shape == plain.shape and not np.allclose(raw, plain, atol=1e-3)
    return msgspec.structs.replace(facing, classes=plain.shape[1], raw_classes=differs)


async def _with_token_vectors(facing: Facing, ask: Ask) -> Facing:
    plain = await _tried_token_vectors(ask, facing, {})
    if plain is None:
        return facing
    raw = await _tried_token_vectors(ask, facing, {"use_activation": False})
    differs = raw is not None and not all(
        one.shape == other.shape and np.allclose(one, other, atol=1e-3)
        for one, other in zip(raw, plain, strict=True)
    )
    return msgspec.structs.replace(facing, token_width=plain[0].shape[1], raw_tokens=differs)


async def _tried(ask: Ask, path: str, body: Body) -> UpstreamResponse | None:
    """The answer, or None where that is not offered."""
    answer = await ask(path, body)
    if answer.status in NOT_OFFERED:
        return None
    if answer.status != 200:
        raise failure(answer)
    return answer


async def _tried_vectors(ask: Ask, switch: Body) -> Vectors | None:
    answer = await _tried(ask, EMBEDDINGS, {"input": PROBE} | BASE64 | switch)
    try:
        return decode_embeddings(answer.body, len(PROBE))[0] if answer else None
    except ReplicaFailed:
        # A vector for each token is another operation.
        return None


async def _tried_scores(ask: Ask) -> Scores | None:
    query, documents = PROBE_PAIRS
    body = {"text_1": query, "text_2": documents}
    raw = await _tried(ask, SCORE, body | {"use_activation": False})
    plain = await _tried(ask, SCORE, body | {"use_activation": True})
    if raw is None or plain is None:
        return None
    return kind_of_scores(scores(raw, len(documents))[0], scores(plain, len(documents))[0])


async def _tried_classes(ask: Ask, *, activated: bool) -> Vectors | None:
    answer = await _tried(ask, CLASSIFY, {"input": PROBE, "use_activation": activated})
    try:
        return classes(answer, len(PROBE))[0] if answer else None
    except ReplicaFailed:
        return None


async def _tried_token_vectors(ask: Ask, facing: Facing, switch: Body) -> tuple[Vectors, ...] | None:
    answer = await _tried(ask, POOLING, {"input": PROBE, "task": "token_embed"} | switch)
    try:
        return token_vectors(answer, len(PROBE), facing.max_tokens)[0] if answer else None
    except ReplicaFailed:
        # A weight for each token is none of its vectors.
        return None
