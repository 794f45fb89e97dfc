"""Calls of a load: the path, the bodies, and what a good reply contains. Pure."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from gateway.cli.bench_figures import STAGES_MAX

Api: TypeAlias = Literal["openai", "tei", "tei-rerank", "cohere-rerank"]
APIS: dict[Api, str] = {
    "openai": "/v1/embeddings",
    "tei": "/embed",
    "tei-rerank": "/rerank",
    "cohere-rerank": "/v2/rerank",
}
# By the end of a path that the URL brings along, the longest first.
API_OF_PATH: tuple[tuple[str, Api], ...] = (
    ("/v1/rerank", "cohere-rerank"),
    ("/v2/rerank", "cohere-rerank"),
    ("/rerank", "tei-rerank"),
    ("/embeddings", "openai"),
    ("/embed", "tei"),
)
NEEDS_MODEL: frozenset[Api] = frozenset({"openai", "cohere-rerank"})
# Common words of one token in most vocabularies.
SENTENCE = (
    "the time of a day is not always long enough for all that people want to do with their work and life "
    "some read books about water light music food money health school travel or history while others build "
    "small houses near rivers and write letters to friends who live in another city far away"
)
# Enough that a cache of recent texts does not answer, unless it is meant to.
DISTINCT_TEXTS = 10_000
SEED = 7
TOKENS_MAX = 2**53
NO_ADDRESS = "is not an address such as http://127.0.0.1:8080"


class Target(msgspec.Struct, frozen=True):
    """Destination of calls. base: scheme, host and port."""

    base: str
    path: str
    api: Api


class _OpenAIReply(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: Any = None


class _RankReply(msgspec.Struct):
    results: list[msgspec.Raw]


def target_of(url: str, api: Api | None) -> Target:
    """Return the target of a URL, whose path decides the API unless one is given. Raises: ValueError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # A port that is no number raises where it is read.
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(NO_ADDRESS) from error
    if not is_address:
        raise ValueError(NO_ADDRESS)
    base, path = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.rstrip("/")
    found = next((named for end, named in API_OF_PATH if path.endswith(end)), None)
    if found is None:
        # A base such as /v1 of OpenAI's clients.
        chosen = api or "openai"
        return Target(base, path.removesuffix("/v1") + APIS[chosen], chosen)
    return Target(base, path, api or found)


def made_texts(words: int) -> Sequence[str]:
    """Return texts of this many words on average, from half to one and a half times as many."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    known = SENTENCE.split()
    return [
        " ".join(chance.choices(known, k=max(1, round(words * chance.uniform(0.5, 1.5)))))
        for _ in range(DISTINCT_TEXTS)
    ]


def bodies(target: Target, model: str | None, texts: Sequence[str], per_call: int) -> Iterator[bytes]:
    """Yield the bodies of one call after the other, without end."""
    named: dict[str, Any] = {} if model is None else {"model": model}
    position = 0
    while True:
        chosen = [texts[(position + index) % len(texts)] for index in range(per_call)]
        position += per_call
        match target.api:
            case "openai":
                content = {**named, "input": chosen, "encoding_format": "base64"}
            case "tei":
                content = {**named, "inputs": chosen, "truncate": True}
            case "tei-rerank":
                content = {**named, "query": texts[0], "texts": chosen, "truncate": True}
            case _:
                content = {**named, "query": texts[0], "documents": chosen}
        yield msgspec.json.encode(content)


def read_reply(api: Api, body: bytes, sent: int) -> tuple[int, str]:
    """Return the tokens that a reply reports and its problem, empty if it has a result for each text."""
    tokens = 0
    try:
        match api:
            case "openai":
                reply = msgspec.json.decode(body, type=_OpenAIReply)
                found, tokens = len(reply.data), _tokens_in(reply.usage)
            case "cohere-rerank":
                found = len(msgspec.json.decode(body, type=_RankReply).results)
            case _:
                found = len(msgspec.json.decode(body, type=list[msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return 0, f"not a reply of this API: {error}"
    return tokens, "" if found == sent else f"{found} results for {sent} texts"


def _tokens_in(usage: object) -> int:
    """Return the tokens of a reply's usage, 0 where it has no usable number."""
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens <= TOKENS_MAX else 0


def stages_of(header: str) -> dict[str, float]:
    """Return the milliseconds of each stage in a `server-timing` header; of many stages, the first."""
    stages: dict[str, float] = {}
    for entry in header.split(",")[:STAGES_MAX]:
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    duration = float(value)
                except ValueError:
                    continue
                if 0 <= duration < math.inf:
                    stages[name] = duration
    return stages
