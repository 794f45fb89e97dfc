"""Cost of each operation: reserved as an upper bound or exactly, settled at the computed tokens."""

from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.vllm import FakeVllm

LIMIT = 1000
LONG = "w " * 30
TEI_PATHS = ("/predict", "/embed_sparse", "/embed_all")
PAIRS = {"queries": ["a b", "c"], "documents": ["d", "e f g"]}
# Model, path, body, and the tokens that the servers count: words and two special tokens, three for a pair.
CALLS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "score_pairs": ("cross", "/score", PAIRS, (3 + 3) + (4 + 3)),
    "score_of_embeddings": ("bge", "/score", PAIRS, 4 + 3 + 3 + 5),
    "classify": ("moods", "/classify", {"input": ["a b", "c"]}, 4 + 3),
    "predict": ("moods", "/predict", {"inputs": [["a b"], ["c"]]}, 4 + 3),
    "sparse": ("splade", "/embed_sparse", {"inputs": ["a b", "c"]}, 4 + 3),
    "token_vectors": ("late", "/embed_all", {"inputs": ["a b", "c"]}, 4 + 3),
    "pooling": ("late", "/pooling", {"input": ["a b", "c"]}, 4 + 3),
    "long": ("moods", "/classify", {"input": LONG}, 16),
    "decode": ("bge", "/decode", {"ids": [7, 8]}, 0),
    "detokenize": ("bge", "/detokenize", {"tokens": [7, 8]}, 0),
}


def servers() -> dict[str, FakeVllm]:
    """Return a server for each task."""
    return {
        "bge": FakeVllm(),
        "cross": FakeVllm(task="classify"),
        "moods": FakeVllm(task="classify", classes=3),
        "splade": FakeVllm(splade=True),
        "late": FakeVllm(task="token_embed"),
    }


def config_of(limit: int, tokenizer: Path | None) -> str:
    """Return a config whose tenant has a limit of tokens per day."""
    tokenizer_setting = "" if tokenizer is None else f", tokenizer: {tokenizer}"
    upstreams = "".join(
        f"  {name}: {{backend: vllm, replicas: ['http://{name}']{tokenizer_setting}}}\n" for name in servers()
    )
    models = "".join(f"  {name}: {{upstream: {name}}}\n" for name in servers())
    return f"""
upstreams:
{upstreams}
models:
{models}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], limits: {{tokens_per_day: {limit}}}}}
"""


@pytest.fixture(params=["bound", "exact"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Return a tokenizer, or None to reserve the cost as an upper bound."""
    return write_small_files(tmp_path) if request.param == "exact" else None


@pytest.mark.parametrize(("model", "path", "body", "tokens"), CALLS.values(), ids=CALLS.keys())
async def test_charges_the_computed_tokens(
    boot: Boots, tokenizer: Path | None, model: str, path: str, body: dict[str, Any], tokens: int
) -> None:
    if path in ("/decode", "/detokenize") and tokenizer is not None:
        # The small vocabulary has three words.
        body = {field: [0] for field in body}
    reply = await posted(boot(servers(), config_of(LIMIT, tokenizer)), path, body | {"model": model})

    assert 200 == reply.status_code, reply.text
    assert str(LIMIT - tokens) == reply.headers["x-ratelimit-remaining-tokens"]


COUNTED = {name: call for name, call in CALLS.items() if call[3]}


@pytest.mark.parametrize(("model", "path", "body", "tokens"), COUNTED.values(), ids=COUNTED.keys())
async def test_admits_a_call_of_exactly_the_limit_if_tokens_are_counted(
    boot: Boots, tmp_path: Path, model: str, path: str, body: dict[str, Any], tokens: int
) -> None:
    files = write_small_files(tmp_path)
    async with boot(servers(), config_of(tokens, files)) as gateway:
        enough = await gateway.post(path, body | {"model": model})
    async with boot(servers(), config_of(tokens - 1, files)) as gateway:
        less = await gateway.post(path, body | {"model": model})

    assert (200, "0") == (enough.status_code, enough.headers["x-ratelimit-remaining-tokens"])
    status = 422 if path in TEI_PATHS else 400
    message = f"this call costs {tokens} tokens, and tokens_per_day is {tokens - 1}: "
    assert (status, True) == (less.status_code, message in less.text)
