"""Detection of a vLLM server's features, with short texts, when it joins.

A release reports few of its features and ignores unknown fields. A process executes one pooling task,
therefore the probe stops at the first one it finds.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from backends.contract import Audio, Capabilities, Image, Operation, Output, Vectors
from backends.contract.errors import ConnectionLost, ReplicaFailed
from backends.contract.vectors import sigmoid
from backends.http.client import UpstreamResponse
from backends.http.media import content_of, probe_image, probe_recording
from backends.http.openai_wire import UnequalWidths, decode_embeddings
from backends.recipe.recipe import InputRules
from backends.vllm.wire import (
    BASE64,
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    SCORE,
    TOKENIZE,
    Body,
    decode_classes,
    decode_scores,
    decode_token_vectors,
    decode_tokenize,
    failure,
    is_own_error,
    side_of,
    tokenize_body,
)

PROBE = ("a", "b c")
# Several pairs, because one pair is not enough to determine the scale of the scores.
PROBE_PAIRS = ("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))
# Unlike any default in length, so that a template with it renders another number of tokens.
PROBE_INSTRUCTION = "a"
# Statuses of a route that does not exist, or exists for a different kind of model.
NOT_OFFERED = frozenset({400, 404, 405, 501})
# More tokens than this for one letter are not believed, and not searched.
SPECIALS_MAX = 256
# Share of zeros above which a vector contains term weights; a dense vector has almost no zeros.
SPARSE_SHARE = 0.5

SendRequest: TypeAlias = Callable[[str, Body], Awaitable[UpstreamResponse]]
# Field that turns normalization off: since 0.20, and before.
Switch: TypeAlias = Literal["use_activation", "normalize"]
ScoreSupport: TypeAlias = Literal["on_request", "logits", "sigmoid"]
RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})")
SWITCHES: tuple[Switch, ...] = ("use_activation", "normalize")


class VllmProfile(msgspec.Struct, frozen=True):
    """Features of a server, determined when it joins.

    width: of its vectors; None if it has none. raw_vectors: the switch that turns their normalization off.
    scores: logits on request, always logits, or always sigmoid; None if it has no scores.
    instructed: it puts the instruction of a request for scores into the prompt of each pair.
    specials: the number of special tokens before and after a text. special_ids: their ids.
    sparse: its vectors are term weights. token_width: of its token vectors; None if it has none.
    raw_tokens: a switch turns their normalization off. classes: their number; 0 if it is no classifier.
    raw_classes: a switch returns their logits. images, sound: a message may contain them. scored_images: a
    pair that it scores may contain images.
    """

    model: str
    max_tokens: int
    version: str = ""
    width: int | None = None
    raw_vectors: Switch | None = None
    scores: ScoreSupport | None = None
    instructed: bool = False
    specials: tuple[int, int] | None = None
    special_ids: frozenset[int] = frozenset()
    sparse: bool = False
    token_width: int | None = None
    raw_tokens: bool = False
    classes: int = 0
    raw_classes: bool = False
    images: bool = False
    sound: bool = False
    scored_images: bool = False

    @property
    def release(self) -> tuple[int, ...]:
        """Numbers of the version, (0, 32) for "0.32.0"; () if it is not known."""
        found = RELEASE.match(self.version)
        return () if found is None else tuple(map(int, found.groups()))

    @property
    def outputs(self) -> frozenset[Output]:
        """Kinds of output that the server offers."""
        outputs = {
            Output.DENSE: self.width is not None,
            Output.SPARSE: self.sparse,
            Output.MULTIVECTOR: self.token_width is not None,
            Output.TOKENS: self.raw_tokens,
        }
        return frozenset(output for output, is_offered in outputs.items() if is_offered)

    @property
    def options(self) -> frozenset[str]:
        """Features that requests can ask for, and that capabilities do not contain."""
        options = {
            "raw vectors": self.raw_vectors is not None,
            "raw scores": self.scores in ("on_request", "logits"),
            "raw scores of classes": self.raw_classes,
            "instructions": self.instructed,
        }
        return frozenset(option for option, is_offered in options.items() if is_offered)

    def same_server(self, other: "VllmProfile") -> bool:
        """Return True if two profiles agree in the values that the server reports itself."""
        own = (self.model, self.max_tokens, self.version)
        return own == (other.model, other.max_tokens, other.version)


def capabilities(profile: VllmProfile, rules: InputRules | None, labels: tuple[str, ...]) -> Capabilities:
    """Convert a profile to capabilities. rules: of the checkpoint, if its tokenizer is here."""
    return Capabilities(
        model_id=profile.model,
        operations=frozenset(_operations(profile, has_tokenizer=rules is not None)),
        max_input_tokens=profile.max_tokens,
        dimensions=profile.width,
        prompts=rules.prompts if rules else {},
        default_prompt=rules.default_prompt if rules else None,
        version=f"vLLM {profile.version}".strip(),
        outputs=profile.outputs,
        labels=labels,
        takes_instruction=profile.instructed,
        notes=_notes(profile),
    )


def _operations(profile: VllmProfile, *, has_tokenizer: bool) -> set[Operation]:
    operations: set[Operation] = set()
    if has_tokenizer or profile.specials:
        operations |= {Operation.TOKENIZE, Operation.DETOKENIZE}
    model_operations = {
        Operation.EMBED: profile.width is not None,
        Operation.ENCODE: bool(profile.outputs - {Output.DENSE}),
        Operation.RERANK: profile.scores is not None,
        Operation.RERANK_IMAGE: profile.scored_images,
        Operation.CLASSIFY: profile.classes > 0,
    }
    operations |= media_operations(profile)
    return operations | {operation for operation, is_offered in model_operations.items() if is_offered}


def media_operations(profile: VllmProfile) -> set[Operation]:
    """Return the operations with media that a server offers."""
    offered = {Operation.EMBED_IMAGE: profile.images, Operation.EMBED_AUDIO: profile.sound}
    return {operation for operation, is_offered in offered.items() if is_offered}


def labels_of(profile: VllmProfile, checkpoint_labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels by class id; only a checkpoint has them, because the wire does not."""
    if len(checkpoint_labels) == profile.classes:
        return checkpoint_labels
    return tuple(f"LABEL_{index}" for index in range(profile.classes))


def _notes(profile: VllmProfile) -> tuple[str, ...]:
    notes: list[str] = []
    if profile.width is not None:
        notes.append(f"raw vectors by {profile.raw_vectors}" if profile.raw_vectors else "no raw vectors")
    if profile.scores is not None:
        notes.append(f"scores: {profile.scores}")
    features = {
        "images": profile.images,
        "pairs with images": profile.scored_images,
        "sound": profile.sound,
        "instructions": profile.instructed,
        "term weights": profile.sparse,
        "token vectors": profile.token_width is not None,
        f"{profile.classes} classes": profile.classes > 0,
    }
    return (*notes, *(name for name, is_offered in features.items() if is_offered))


def detect_score_support(raw: Vectors, activated: Vectors) -> ScoreSupport | None:
    """Determine a server's score support from the same pairs scored without and with activation.

    raw, activated: (n,) float32. Equal scores mean that the server ignores the switch or that the model has
    no activation; only a logit can be outside the range 0 to 1. Returns None for scores that are neither
    logits nor sigmoid, such as those of late interaction.
    """
    if np.allclose(raw, activated, atol=1e-3):
        return "logits" if ((raw < 0) | (raw > 1)).any() else "sigmoid"
    return "on_request" if np.allclose(sigmoid(raw), activated, atol=0.02) else None


def count_specials(whole: list[int], bare: list[int]) -> tuple[int, int] | None:
    """Count the tokens of `whole` before and after those of `bare`; None if they are not contained."""
    if len(whole) > SPECIALS_MAX:
        return None
    for before in range(len(whole) - len(bare) + 1):
        if whole[before : before + len(bare)] == bare:
            return before, len(whole) - len(bare) - before
    return None


async def probe_features(profile: VllmProfile, send: SendRequest) -> VllmProfile:
    """Determine a server's features with short texts.

    Raises: BackendError, unless the server merely lacks a feature.
    """
    profile = await _probe_specials(profile, send)
    vectors = await _try_vectors(send, {})
    if vectors is not None:
        return await _probe_vectors(profile, vectors, send)
    # The one class of a cross-encoder is that of its scores.
    scored = await _probe_classes(await _probe_scores(profile, send), send)
    if not (scored.classes or scored.scores is not None):
        return await _probe_token_vectors(profile, send)
    # A server that is starting, or a proxy before it, may have refused the first question alone.
    vectors = await _try_vectors(send, {})
    return scored if vectors is None else await _probe_vectors(profile, vectors, send)


async def _probe_vectors(profile: VllmProfile, vectors: Vectors, send: SendRequest) -> VllmProfile:
    if (vectors == 0).mean() > SPARSE_SHARE:
        return msgspec.structs.replace(profile, sparse=True)
    switch = None
    for candidate in SWITCHES:
        raw = await _try_vectors(send, {candidate: False})
        if raw is not None and not np.allclose(np.linalg.norm(raw, axis=1), 1.0, atol=0.01):
            switch = candidate
            break
    return msgspec.structs.replace(
        profile,
        width=vectors.shape[1],
        raw_vectors=switch,
        images=await _takes(send, EMBEDDINGS, probe_image()),
        sound=await _takes(send, EMBEDDINGS, probe_recording()),
    )


async def _takes(send: SendRequest, path: str, part: Image | Audio) -> bool:
    """Return whether a message with a part gets vectors. Any refusal is a no: texts work without it."""
    form = BASE64 if path == EMBEDDINGS else {"task": "token_embed"}
    try:
        response = await send(path, {"messages": [{"role": "user", "content": content_of([part])}]} | form)
    except (ConnectionLost, ReplicaFailed):
        # A server that breaks at a picture still reads texts.
        return False
    return response.status == 200


async def _probe_specials(profile: VllmProfile, send: SendRequest) -> VllmProfile:
    whole = await _try(send, TOKENIZE, tokenize_body("a", special=True))
    bare = await _try(send, TOKENIZE, tokenize_body("a", special=False))
    if whole is None or bare is None:
        return profile
    ids, text_ids = decode_tokenize(whole).tokens, decode_tokenize(bare).tokens
    specials = count_specials(ids, text_ids)
    special_ids = frozenset(ids) - frozenset(text_ids) if specials else frozenset()
    return msgspec.structs.replace(profile, specials=specials, special_ids=special_ids)


async def _probe_classes(profile: VllmProfile, send: SendRequest) -> VllmProfile:
    raw = await _try_classes(send, activated=False)
    plain = await _try_classes(send, activated=True)
    if raw is None or plain is None or ((plain < 0) | (plain > 1)).any():
        return profile
    differs = raw.shape == plain.shape and not np.allclose(raw, plain, atol=1e-3)
    return msgspec.structs.replace(profile, classes=plain.shape[1], raw_classes=differs)


async def _probe_token_vectors(profile: VllmProfile, send: SendRequest) -> VllmProfile:
    plain = await _try_token_vectors(send, profile, {})
    if plain is None:
        return profile
    raw = await _try_token_vectors(send, profile, {"use_activation": False})
    differs = raw is not None and not all(
        raw_rows.shape == rows.shape and np.allclose(raw_rows, rows, atol=1e-3)
        for raw_rows, rows in zip(raw, plain, strict=True)
    )
    return msgspec.structs.replace(
        profile,
        token_width=plain[0].shape[1],
        raw_tokens=differs,
        images=await _takes(send, POOLING, probe_image()),
    )


async def _try(send: SendRequest, path: str, body: Body) -> UpstreamResponse | None:
    """Send a request and return its response, or None if the server reports that it lacks the route.

    Raises: BackendError, also if something in front of the server has answered in its place.
    """
    response = await send(path, body)
    if response.status in NOT_OFFERED and is_own_error(response):
        return None
    if response.status != 200:
        raise failure(response)
    return response


async def _try_vectors(send: SendRequest, switch: Body) -> Vectors | None:
    response = await _try(send, EMBEDDINGS, {"input": PROBE} | BASE64 | switch)
    try:
        return decode_embeddings(response.body, len(PROBE))[0] if response else None
    except UnequalWidths:
        # One vector per token is a different operation.
        return None


async def _probe_scores(profile: VllmProfile, send: SendRequest) -> VllmProfile:
    query, documents = PROBE_PAIRS
    body = {"text_1": query, "text_2": documents, "use_activation": False}
    raw = await _try(send, SCORE, body)
    plain = await _try(send, SCORE, body | {"use_activation": True})
    if raw is None or plain is None:
        return profile
    raw_scores, tokens = decode_scores(raw, len(documents))
    kind = detect_score_support(raw_scores, decode_scores(plain, len(documents))[0])
    if kind is None:
        return profile
    # Older releases, such as 0.20, ignore the field, and so does any whose template has no place for it.
    instructed = await _try(send, SCORE, body | {"instruction": PROBE_INSTRUCTION})
    is_applied = instructed is not None and decode_scores(instructed, len(documents))[1] != tokens
    return msgspec.structs.replace(
        profile, scores=kind, instructed=is_applied, scored_images=await _scores_images(send)
    )


async def _scores_images(send: SendRequest) -> bool:
    """Return whether a pair may contain an image, which must cost tokens: a template may leave it out.

    Any refusal is a no: pairs of texts work without it.
    """
    counts = []
    for document in ((probe_image(), "a"), ("a",)):
        try:
            sides = {"text_1": "a", "text_2": side_of(document)}
            response = await send(SCORE, sides | {"use_activation": False})
            if response.status != 200:
                return False
            counts.append(decode_scores(response, 1)[1] or 0)
        except (ConnectionLost, ReplicaFailed):
            # A server that breaks at a picture still scores texts.
            return False
    return counts[0] > counts[1]


async def _try_classes(send: SendRequest, *, activated: bool) -> Vectors | None:
    response = await _try(send, CLASSIFY, {"input": PROBE, "use_activation": activated})
    try:
        return decode_classes(response, len(PROBE))[0] if response else None
    except ReplicaFailed:
        return None


async def _try_token_vectors(
    send: SendRequest, profile: VllmProfile, switch: Body
) -> tuple[Vectors, ...] | None:
    response = await _try(send, POOLING, {"input": PROBE, "task": "token_embed"} | switch)
    try:
        return decode_token_vectors(response, len(PROBE), profile.max_tokens)[0] if response else None
    except ReplicaFailed:
        # One weight per token is not a token vector.
        return None
