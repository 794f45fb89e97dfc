"""Vercel's AI SDK and LangChain for JavaScript, by the lines of docs/connect-libraries.md."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.conftest import Gateway, documented

HOME = Path(sys.prefix) / "connected_javascript"
CALL_S = 240.0
WIDTH = 384


def run(program: str) -> Any:
    """Run a module of JavaScript; return the JSON that it prints."""
    command = ["node", "--input-type=module", "-e", program]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=CALL_S, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_vercel_embeds_and_ranks(gateway: Gateway) -> None:
    lines = documented(gateway, "connect-libraries", "Vercel AI SDK", "text")
    lines = lines.replace("await embedMany", "const vectors = await embedMany")
    lines = lines.replace("await rerank", "const ranks = await rerank")
    found = run(f"{lines}console.log(JSON.stringify([vectors.embeddings, vectors.usage, ranks.ranking]))")

    vectors, usage, ranking = found
    assert [WIDTH] * 2 == [len(row) for row in vectors]
    assert usage["tokens"] > 0
    assert {0, 1} == {item["originalIndex"] for item in ranking}
    assert all("score" in item for item in ranking)


def test_langchain_embeds(gateway: Gateway) -> None:
    line = documented(gateway, "connect-libraries", "LangChain", "text").strip()
    found = run(
        f"import {{OpenAIEmbeddings}} from '@langchain/openai'; const made = {line};"
        "console.log(JSON.stringify(await made.embedDocuments(['an apple', 'the sea'])))"
    )

    assert [WIDTH] * 2 == [len(row) for row in found]
