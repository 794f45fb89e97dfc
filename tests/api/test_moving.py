"""docs/moving.md followed literally: its files are served, and old and new calls give the same answers."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.conftest import KEY, Boots
from tests.fakes.hooks import RERANKER
from tests.fakes.infinity import FakeInfinity
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm

QWEN, PUBLISHED, RERANK = "Qwen/Qwen3-Embedding-0.6B", "BAAI/bge-reranker-v2-m3", "org/made-reranker"
# A replica of a published reranker joins only if it ranks as that does, which a fake server does not.
PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text().replace(PUBLISHED, RERANK)
SERVERS: dict[str, dict[str, Any]] = {
    "tei": {
        "tei-minilm-0": FakeTei(),
        "tei-minilm-1": FakeTei(),
        "tei-bge-m3": FakeTei(),
        "tei-reranker": FakeTei(model_type=RERANKER),
    },
    "infinity": {
        "infinity": FakeInfinity(models=("BAAI/bge-m3",)),
        "infinity-rerank": FakeInfinity(capability="rerank", models=(RERANK,)),
    },
    "vllm": {
        "vllm": FakeVllm(model=QWEN),
        "vllm-rerank": FakeVllm(task="classify", model=RERANK),
    },
}
SECTIONS = {"tei": "From containers of TEI", "infinity": "From Infinity", "vllm": "From vLLM"}
# Facts of one call, and counts, which the gateway takes from the model's own tokenizer.
OWN_FACTS = {"id", "created", "usage", "meta"}


def blocks(section: str, language: str) -> list[str]:
    """Return the blocks of a section in a language."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def file_of(section: str) -> str:
    """Return the router.yaml of a section. Its tokenizers are replaced by one that is on this machine."""
    (text,) = blocks(section, "yaml")
    return re.sub(r"tokenizer: \S+", "tokenizer: sentence-transformers/all-MiniLM-L6-v2", text)


def calls_of(block: str) -> list[tuple[str, dict[str, str], bytes]]:
    """Return address, headers and body of each curl command of a block."""
    calls = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "))
        assert words[0] == "curl"
        headers = dict(words[index + 1].split(": ") for index, word in enumerate(words) if word == "-H")
        calls.append((words[1], headers, words[words.index("-d") + 1].encode()))
    return calls


def comparable(answer: Any) -> Any:
    """Return an answer without the facts of one call; numbers are rounded to the precision of float32."""
    if isinstance(answer, dict):
        return {name: comparable(value) for name, value in answer.items() if name not in OWN_FACTS}
    if isinstance(answer, list):
        return [comparable(value) for value in answer]
    return float(np.round(answer, 5)) if isinstance(answer, float) else answer


@pytest.mark.parametrize("name", SERVERS)
async def test_old_and_new_calls_give_the_same_answers(boot: Boots, name: str) -> None:
    section = SECTIONS[name]
    old, new = map(calls_of, blocks(section, "text"))
    assert len(old) == len(new) == 2
    async with boot(SERVERS[name], file_of(section)) as gateway:
        for (before, headers, body), (after, moved_headers, moved_body) in zip(old, new, strict=True):
            parts = urlsplit(before)
            transport = httpx.ASGITransport(SERVERS[name][parts.hostname or ""])
            async with httpx.AsyncClient(transport=transport, base_url="http://replica") as direct:
                answered = await direct.post(parts.path, content=body, headers=headers)
            assert answered.status_code == 200, answered.text
            moved = urlsplit(after)
            assert moved.netloc == "gateway:8080"
            assert json.loads(moved_body) == json.loads(body)
            sent = {key: value.replace("$KEY", KEY) for key, value in moved_headers.items()}
            reply = await gateway.client.post(moved.path, content=moved_body, headers=sent)
            assert reply.status_code == 200, reply.text
            assert comparable(reply.json()) == comparable(answered.json())
