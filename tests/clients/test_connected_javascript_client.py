"""Vercel's AI SDK and LangChain for JavaScript, by the lines of docs/connect-libraries.md and -classes.md."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import (
    FRUIT,
    FRUIT_QUESTION,
    Expected,
    Gateway,
    assert_ranks,
    assert_vectors,
    documented,
)

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


def arguments(gateway: Gateway) -> str:
    """Return a line of JavaScript with the names that the programs below use."""
    names = {
        "url": gateway.url,
        "apiKey": gateway.key,
        "model": gateway.model,
        "prompted": gateway.prompted,
        "texts": FRUIT,
        "question": FRUIT_QUESTION,
        "headers": {"Authorization": f"Bearer {gateway.key}"},
    }
    return f"const {{{', '.join(names)}}} = {json.dumps(names)};"


PROVIDERS = {
    "azure": ("@ai-sdk/azure", "createAzure({baseURL: url + '/openai/v1', apiKey})"),
    "google": ("@ai-sdk/google", "createGoogleGenerativeAI({baseURL: url + '/v1beta', apiKey})"),
    "mistral": ("@ai-sdk/mistral", "createMistral({baseURL: url + '/v1', apiKey})"),
    "ollama": ("ollama-ai-provider-v2", "createOllama({baseURL: url + '/api', headers})"),
    "voyage": ("@ai-sdk/voyage", "createVoyage({baseURL: url + '/v1', apiKey})"),
}


@pytest.mark.parametrize("provider", sorted(PROVIDERS))
def test_vercels_providers_return_the_gateways_vectors(
    provider: str, gateway: Gateway, expected: Expected
) -> None:
    package, call = PROVIDERS[provider]
    found = run(
        f"import {{embedMany}} from 'ai'; import {{{call.partition('(')[0]}}} from '{package}';"
        f"{arguments(gateway)} const made = {call}.textEmbeddingModel(model);"
        "console.log(JSON.stringify((await embedMany({model: made, values: texts})).embeddings));"
    )

    assert_vectors(expected.plain, found)


def test_vercels_voyage_returns_the_gateways_scores(gateway: Gateway, expected: Expected) -> None:
    found = run(
        "import {rerank} from 'ai'; import {createVoyage} from '@ai-sdk/voyage';"
        f"{arguments(gateway)} const made = createVoyage({{baseURL: url + '/v1', apiKey}}).reranking(model);"
        "const {ranking} = await rerank({model: made, query: question, documents: texts});"
        "console.log(JSON.stringify(ranking.map((item) => [item.originalIndex, item.score])));"
    )

    assert_ranks(expected.ranks, found)


COHERES = "client: new CohereClient({token: apiKey, environment: url})"
CLASSES = {
    "azure": (
        "import {AzureOpenAIEmbeddings as Made} from '@langchain/openai';",
        (
            "{azureOpenAIApiKey: apiKey, azureOpenAIApiDeploymentName: model,"
            "azureOpenAIApiVersion: '2024-10-21', azureOpenAIBasePath: url + '/openai/deployments'}"
        ),
    ),
    "cohere": (
        "import {CohereClient} from 'cohere-ai'; import {CohereEmbeddings as Made} from '@langchain/cohere';",
        f"{{model: prompted, {COHERES}}}",
    ),
    "google": (
        "import {GoogleGenerativeAIEmbeddings as Made} from '@langchain/google-genai';",
        "{model: prompted, apiKey, baseUrl: url, taskType: 'RETRIEVAL_DOCUMENT'}",
    ),
    "mistral": (
        "import {MistralAIEmbeddings as Made} from '@langchain/mistralai';",
        "{model, apiKey, serverURL: url}",
    ),
    "ollama": (
        "import {OllamaEmbeddings as Made} from '@langchain/ollama';",
        "{model, baseUrl: url, headers}",
    ),
}


@pytest.mark.parametrize("vendor", sorted(CLASSES))
def test_langchains_classes_return_the_gateways_vectors(
    vendor: str, gateway: Gateway, expected: Expected
) -> None:
    """The name of the model with prompts has a slash, which Google's client leaves `models/` out for."""
    imports, options = CLASSES[vendor]
    call = f"new Made({options}).embedDocuments(texts)"
    found = run(f"{imports} {arguments(gateway)} console.log(JSON.stringify(await {call}));")

    assert_vectors(expected.documents if "prompted" in options else expected.plain, found)


def test_langchains_reranker_returns_the_gateways_scores(gateway: Gateway, expected: Expected) -> None:
    found = run(
        "import {CohereClient} from 'cohere-ai'; import {CohereRerank} from '@langchain/cohere';"
        f"{arguments(gateway)} const made = new CohereRerank({{model, topN: 3, {COHERES}}});"
        "const ranks = await made.rerank(texts, question);"
        "console.log(JSON.stringify(ranks.map((item) => [item.index, item.relevanceScore])));"
    )

    assert_ranks(expected.ranks, found)
