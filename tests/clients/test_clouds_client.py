"""Clients of Azure OpenAI, NVIDIA NIM and watsonx.ai against the stubs that the adapters are tested with.

They show that the stubs have the vendors' wire: a stub refuses fields that are not the vendor's, and the
client reads its replies. Their bodies are those of the adapters in tests/backends/test_clouds.py.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings, NVIDIARerank
from openai import AzureOpenAI, NotFoundError

from tests.clients.conftest import ROOT

STUB_PYTHON = ROOT / ".venv" / "bin" / "python"
Recorded = list[tuple[str, dict[str, Any]]]


@contextmanager
def stub(*arguments: str) -> Iterator[tuple[str, Callable[[], Recorded]]]:
    """Run a stub by its name; yield its address and a function that ends it and returns its requests."""
    command = [str(STUB_PYTHON), "-m", "tests.fakes.clouds", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        def end() -> Recorded:
            output, _ = process.communicate(timeout=60)
            return [(path, body) for path, body in json.loads(output)]

        try:
            yield address, end
        finally:
            if process.poll() is None:
                process.kill()


def test_azure_openai() -> None:
    with stub("azure") as (address, end):
        client = AzureOpenAI(
            azure_endpoint=address, api_key="azure-key-1234", api_version="2024-10-21", max_retries=0
        )
        reply = client.embeddings.create(model="small", input=["a", "b c"])
        with pytest.raises(NotFoundError):
            client.embeddings.create(model="none", input=["a"])
        ((path, body),) = [request for request in end() if "small" in request[0]]

    assert 2 == len(reply.data)
    assert 7 == reply.usage.prompt_tokens
    assert "/openai/deployments/small/embeddings" == path
    assert {"model": "small", "input": ["a", "b c"], "encoding_format": "base64"} == body


def test_nim_embeddings() -> None:
    with stub("nim") as (address, end):
        client = NVIDIAEmbeddings(
            base_url=f"{address}/v1", model="nvidia/llama-nemotron-embed-1b-v2", truncate="END"
        )
        assert 8 == len(client.embed_query("a"))
        assert 2 == len(client.embed_documents(["a", "b"]))
        query, passages = [body for path, body in end() if path == "/v1/embeddings"]

    assert ("query", "END", ["a"]) == (query["input_type"], query["truncate"], query["input"])
    assert ("passage", "END", ["a", "b"]) == (
        passages["input_type"],
        passages["truncate"],
        passages["input"],
    )


def test_nim_ranking() -> None:
    with stub("nim-ranking") as (address, end):
        client = NVIDIARerank(
            base_url=f"{address}/v1", model="nvidia/llama-3.2-nv-rerankqa-1b-v2", truncate="END"
        )
        found = client.compress_documents(
            query="a", documents=[Document(page_content=text) for text in ("a", "b", "c")]
        )
        (body,) = [body for path, body in end() if path == "/v1/ranking"]

    scores = [document.metadata["relevance_score"] for document in found]
    assert sorted(scores, reverse=True) == scores
    expected = {
        "model": "nvidia/llama-3.2-nv-rerankqa-1b-v2",
        "query": {"text": "a"},
        "passages": [{"text": "a"}, {"text": "b"}, {"text": "c"}],
        "truncate": "END",
    }
    assert expected == body


def test_watsonx(tmp_path: Path) -> None:
    from ibm_watsonx_ai import APIClient, Credentials
    from ibm_watsonx_ai.foundation_models import Embeddings, Rerank

    with stub("watsonx", str(tmp_path)) as (address, end):
        credentials = Credentials(
            url=address, token="iam-token-0", instance_id="openshift", version="5.1", verify=False
        )
        client = APIClient(credentials, project_id="p-1", scope_validation=False)
        vectors = Embeddings(
            model_id="ibm/slate", params={"truncate_input_tokens": 16}, api_client=client
        ).embed_documents(["a", "b c"])
        ranks = Rerank(model_id="ibm/slate", api_client=client).generate(query="a", inputs=["a", "b", "c"])
        bodies = dict(end())

    assert [8, 8] == [len(vector) for vector in vectors]
    assert {0, 1, 2} == {item["index"] for item in ranks["results"]}
    expected = {"model_id": "ibm/slate", "project_id": "p-1", "inputs": ["a", "b c"]}
    cut = {"parameters": {"truncate_input_tokens": 16}}
    assert expected | cut == bodies["/ml/v1/text/embeddings"]
    assert [{"text": "a"}, {"text": "b"}, {"text": "c"}] == bodies["/ml/v1/text/rerank"]["inputs"]
