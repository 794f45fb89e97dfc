"""Calls of a load: the path, the bodies, and what a good reply contains. Pure."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

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


class Target(msgspec.Struct, frozen=True):
    """Destination of calls. base: scheme, host and port."""

    base: str
    path: str
    api: Api


class _Usage(msgspec.Struct, frozen=True):
    total_tokens: int = 0


class _OpenAIReply(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage = _Usage()


class _RankReply(msgspec.Struct):
    results: list[msgspec.Raw]


def target_of(url: str, api: Api | None) -> Target:
    """Return the target of a URL, whose path decides the API unless one is given. Raises: ValueError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not an address such as http://127.0.0.1:8080")
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
                found, tokens = len(reply.data), reply.usage.total_tokens
            case "cohere-rerank":
                found = len(msgspec.json.decode(body, type=_RankReply).results)
            case _:
                found = len(msgspec.json.decode(body, type=list[msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return 0, f"not a reply of this API: {error}"
    return tokens, "" if found == sent else f"{found} results for {sent} texts"


def stages_of(header: str) -> dict[str, float]:
    """Return the milliseconds of each stage in a `server-timing` header."""
    stages = {}
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    stages[name] = float(value)
                except ValueError:
                    continue
    return stages
