"""`gateway import litellm`: what is carried over, and that all else is reported."""

import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec.yaml
import pytest

from gateway.cli.litellm_config import Unreadable, import_litellm, run_import
from gateway.cli.main import full_parser
from gateway.config.load import parse_config
from gateway.config.schema import Config

MOVING = (Path(__file__).parents[2] / "docs" / "moving-litellm.md").read_text()
RANDOM_KEY = "sk-T3BlbkFJq8x2Zp0LmNvR5y"
ONE = "model_list:\n  - model_name: {name}\n    litellm_params: {{model: {model}{more}}}\n"


def served(text: str) -> Config:
    """Return the configuration as the gateway reads it, with a value for each variable."""
    found = import_litellm(text)
    environment = dict.fromkeys(found.variables, "a" * 64)
    return parse_config(found.text, environment, Path())


def one(model: str, more: str = "", name: str = "bge-embed") -> str:
    return ONE.format(name=name, model=model, more=more)


def test_the_example_of_the_documents_becomes_the_router_yaml_below_it() -> None:
    source = MOVING.split("```yaml litellm\n")[1].split("```")[0]
    expected = MOVING.split("```yaml\n")[1].split("```")[0]
    variables = dict.fromkeys(["OPENAI_API_KEY", "REDIS_PASSWORD", "LITELLM_MASTER_KEY_SHA256"], "a" * 64)

    found = import_litellm(source)

    assert parse_config(expected, variables, Path()) == parse_config(found.text, variables, Path())
    assert set(variables) == set(found.variables)
    assert [] == found.left_out


@pytest.mark.parametrize(
    ("model", "more", "backend", "replica"),
    [
        ("text-embedding-3-small", "", "openai", "https://api.openai.com/v1"),
        ("openai/a/b", ", api_base: 'http://x/v1'", "openai", "http://x/v1"),
        ("cohere/embed-v4.0", "", "cohere", "https://api.cohere.com/v2"),
        ("jina_ai/jina-embeddings-v3", "", "jina", "https://api.jina.ai/v1"),
        ("voyage/voyage-3", "", "voyage", "https://api.voyageai.com/v1"),
        ("infinity/BAAI/bge-m3", ", api_base: 'http://i:7997'", "infinity", "http://i:7997"),
        ("hosted_vllm/BAAI/bge-m3", ", api_base: 'http://v:8000/v1'", "vllm", "http://v:8000"),
        ("huggingface/BAAI/bge-m3", ", api_base: 'http://t:8080'", "tei", "http://t:8080"),
        ("ollama/nomic-embed-text", "", "openai", "http://localhost:11434"),
        (
            "azure/small",
            ", api_base: 'https://n.openai.azure.com', api_version: '2025-01-01'",
            "azure",
            "https://n.openai.azure.com",
        ),
    ],
)
def test_each_provider_has_its_backend(model: str, more: str, backend: str, replica: str) -> None:
    (upstream,) = served(one(model, more)).upstreams.values()

    assert (backend, (replica,)) == (upstream.backend, upstream.replicas)


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        (
            "bedrock/amazon.titan-embed-text-v2:0",
            ", aws_region_name: eu-west-1, aws_profile_name: search",
            {
                "model": "amazon.titan-embed-text-v2:0",
                "bedrock": {"region": "eu-west-1", "profile": "search"},
            },
        ),
        (
            "bedrock/us-west-2/cohere.embed-v4:0",
            "",
            {"model": "cohere.embed-v4:0", "bedrock": {"region": "us-west-2"}},
        ),
        (
            "bedrock/arn:aws:bedrock:us-west-2::foundation-model/amazon.rerank-v1:0",
            ", aws_bedrock_runtime_endpoint: 'https://vpce-1/'",
            {
                "model": "arn:aws:bedrock:us-west-2::foundation-model/amazon.rerank-v1:0",
                "bedrock": {"region": "us-west-2"},
                "replicas": ["https://vpce-1"],
            },
        ),
        (
            "bedrock/cohere.embed-v4",
            ", model_id: 'arn:aws:bedrock:eu-west-3:1:application-inference-profile/x'",
            {
                "model": "arn:aws:bedrock:eu-west-3:1:application-inference-profile/x",
                "bedrock": {"family": "cohere.embed-v4", "region": "eu-west-3"},
            },
        ),
        (
            "bedrock/cohere.embed-v4:0",
            ", api_key: os.environ/AWS_BEARER_TOKEN_BEDROCK",
            {
                "model": "cohere.embed-v4:0",
                "bedrock": {"region": "$AWS_REGION_NAME"},
                "api_key": "$AWS_BEARER_TOKEN_BEDROCK",
            },
        ),
        (
            "vertex_ai/text-embedding-005",
            ", vertex_project: p, vertex_location: europe-west4, vertex_credentials: /etc/google.json",
            {
                "model": "text-embedding-005",
                "vertex": {"project": "p", "location": "europe-west4", "credentials": "/etc/google.json"},
            },
        ),
        (
            "vertex_ai/text-embedding-005",
            "",
            {
                "model": "text-embedding-005",
                "vertex": {"project": "$VERTEXAI_PROJECT", "location": "$VERTEXAI_LOCATION"},
            },
        ),
        (
            "vertex_ai/semantic-ranker-default@latest",
            ", vertex_ai_project: p",
            {"model": "semantic-ranker-default@latest", "vertex": {"project": "p"}},
        ),
        (
            "gemini/gemini-embedding-001",
            "",
            {"model": "gemini-embedding-001", "api_key": "$GEMINI_API_KEY"},
        ),
        (
            "gemini/gemini-embedding-001",
            ", api_base: 'http://g/v1beta', api_key: os.environ/KEY",
            {"model": "gemini-embedding-001", "replicas": ["http://g/v1beta"], "api_key": "$KEY"},
        ),
        (
            "huggingface/BAAI/bge-m3",
            "",
            {"model": "BAAI/bge-m3", "api_key": "$HUGGINGFACE_API_KEY"},
        ),
        (
            "huggingface/BAAI/bge-reranker-base",
            "",
            {
                "model": "BAAI/bge-reranker-base",
                "huggingface": {"task": "rerank"},
                "api_key": "$HUGGINGFACE_API_KEY",
            },
        ),
        (
            "nvidia_nim/nvidia/nv-embedqa-e5-v5",
            ", api_base: 'https://integrate.api.nvidia.com/v1'",
            {"model": "nvidia/nv-embedqa-e5-v5", "nim": {"hosted": True}, "api_key": "$NVIDIA_NIM_API_KEY"},
        ),
        (
            "nvidia_nim/nvidia/llama-3_2-nv-rerankqa-1b-v2",
            "",
            {
                "model": "nvidia/llama-3.2-nv-rerankqa-1b-v2",
                "task": "rerank",
                "nim": {"hosted": True},
                "api_key": "$NVIDIA_NIM_API_KEY",
            },
        ),
        (
            "nvidia_nim/ranking/nvidia/rerank-1b",
            ", api_base: 'http://nim:8000/v1/'",
            {"model": "nvidia/rerank-1b", "task": "rerank", "replicas": ["http://nim:8000"]},
        ),
        (
            "watsonx/ibm/slate-30m-english-rtrvr",
            ", api_base: 'https://eu-de.ml.cloud.ibm.com', project_id: p, api_version: '2024-03-13'",
            {
                "model": "ibm/slate-30m-english-rtrvr",
                "watsonx": {"project_id": "p", "version": "2024-03-13"},
                "replicas": ["https://eu-de.ml.cloud.ibm.com"],
                "api_key": "$WATSONX_APIKEY",
            },
        ),
        (
            "watsonx/ibm/slate-30m-english-rtrvr",
            ", region_name: eu-de, space_id: s, api_key: os.environ/IBM",
            {
                "model": "ibm/slate-30m-english-rtrvr",
                "watsonx": {"region": "eu-de", "space_id": "s"},
                "api_key": "$IBM",
            },
        ),
        (
            "watsonx/ibm/slate-30m-english-rtrvr",
            ", region_name: eu-de",
            {
                "model": "ibm/slate-30m-english-rtrvr",
                "watsonx": {"region": "eu-de", "project_id": "$WATSONX_PROJECT_ID"},
                "api_key": "$WATSONX_APIKEY",
            },
        ),
    ],
)
def test_clouds_have_their_settings(model: str, more: str, expected: dict[str, Any]) -> None:
    found = import_litellm(one(model, more))
    written = msgspec.yaml.decode(found.text)["upstreams"]["bge-embed"]
    kind = {"vertex_ai": "vertex", "nvidia_nim": "nim"}.get(model.partition("/")[0], model.partition("/")[0])

    assert [] == found.left_out
    references = re.sub(r"\$([A-Z_]+)", r"${\1}", json.dumps({"backend": kind, **expected}))
    assert json.loads(references) == written
    # Values that the environment has.
    environment = dict.fromkeys(found.variables, "us-east-1") | {"VERTEXAI_LOCATION": "us-east1"}
    assert parse_config(found.text, environment, Path()).upstreams["bge-embed"].backend == kind


@pytest.mark.parametrize(
    ("model", "setting", "reason"),
    [
        (
            "bedrock/cohere.embed-v4:0",
            "aws_role_name: arn",
            "`aws_role_name` cannot be carried over: a profile",
        ),
        ("bedrock/cohere.embed-v4:0", "aws_web_identity_token: hunter2", "`aws_web_identity_token` cannot"),
        ("bedrock/async_invoke/cohere.embed-v4:0", "rpm: 1", "the route 'async_invoke'"),
        ("bedrock/cohere.embed-v4:0", "aws_bedrock_runtime_endpoint: 'http://me:hunter2@h'", "has a user"),
        ("vertex_ai/text-embedding-005", "api_key: hunter2", "takes credentials, and no key"),
        ("vertex_ai/text-embedding-005", "api_base: 'http://h/models/x'", "the address of one model"),
        ("vertex_ai/7493847", "vertex_project: p", "an endpoint of an own model"),
        ("watsonx/ibm/embed", "project_id: p", "no `api_base`"),
        ("watsonx/ibm/embed", "region_name: eu-de, token: hunter2", "a token ends"),
        ("watsonx/ibm/embed", "region_name: eu-de, zen_api_key: hunter2", "`headers.authorization`"),
        ("watsonx/deployment/embed", "region_name: eu-de", "deployments of watsonx"),
    ],
)
def test_an_entry_of_a_cloud_without_its_identity_is_left_out(model: str, setting: str, reason: str) -> None:
    first = "{model_name: first-embed, litellm_params: {model: openai/one}}"
    entry = f"{{model_name: my-embed, litellm_params: {{model: '{model}', {setting}}}}}"
    found = import_litellm(f"model_list: [{first}, {entry}]\n")

    [line] = found.left_out
    assert reason in line
    assert line.startswith("model_list[1] (my-embed): ")
    assert "hunter2" not in found.text + line


@pytest.mark.parametrize(
    ("model", "more", "left_out"),
    [
        (
            "bedrock/cohere.embed-v4:0",
            ", aws_region_name: us-east-1, aws_access_key_id: hunter2, aws_secret_access_key: os.environ/SK",
            {
                "aws_access_key_id": "keys are not written here; set AWS_ACCESS_KEY_ID,",
                "aws_secret_access_key": "keys are not written here; set AWS_SECRET_ACCESS_KEY,",
            },
        ),
        (
            "vertex_ai/text-embedding-005",
            ', vertex_project: p, vertex_location: l, vertex_credentials: \'{"private_key": "secret"}\'',
            {"vertex_credentials": "credentials are not written here; write them into a file"},
        ),
        (
            "vertex_ai/text-embedding-005",
            ", vertex_project: p, vertex_location: l, vertex_credentials: {private_key: hunter2}",
            {"vertex_credentials": "credentials are not written here; write them into a file"},
        ),
        (
            "watsonx/ibm/embed",
            ", region_name: eu-de, project_id: p, space_id: s",
            {"space_id": "`project_id` comes first"},
        ),
        ("openai/x", ", aws_region_name: us-east-1", {"aws_region_name": "it has no counterpart"}),
    ],
)
def test_settings_of_clouds_that_stay_behind_are_reported(
    model: str, more: str, left_out: dict[str, str]
) -> None:
    found = import_litellm(one(model, more))

    assert [*left_out] == [line.partition(": ")[0].rpartition(".")[2] for line in found.left_out]
    for line, reason in zip(found.left_out, left_out.values(), strict=True):
        assert line.partition(": ")[2].startswith(reason)
    assert "hunter2" not in found.text + "".join(found.left_out)


def test_keys_of_aws_in_the_variables_of_aws_need_no_setting() -> None:
    keys = ", ".join(
        f"{name}: os.environ/{name.upper()}" for name in ("aws_access_key_id", "aws_secret_access_key")
    )
    found = import_litellm(one("bedrock/cohere.embed-v4:0", f", aws_region_name: us-east-1, {keys}"))

    assert ([], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]) == (found.left_out, found.variables)
    assert "KEY" not in found.text


def test_a_variable_of_googles_credentials_has_to_be_a_path() -> None:
    more = ", vertex_project: p, vertex_location: l, vertex_credentials: os.environ/GOOGLE_FILE"
    found = import_litellm(one("vertex_ai/text-embedding-005", more))

    assert "credentials: ${GOOGLE_FILE}" in found.text
    [warning] = found.warnings
    assert "GOOGLE_FILE has to be the path of a file" in warning


def test_keys_of_the_file_become_references_and_digests() -> None:
    text = one("openai/x", ", api_key: sk-secret") + f"general_settings: {{master_key: {RANDOM_KEY}}}\n"

    found = import_litellm(text)

    assert "secret" not in found.text + "".join(found.left_out)
    assert RANDOM_KEY not in found.text
    assert ["BGE_EMBED_API_KEY"] == found.variables
    assert hashlib.sha256(RANDOM_KEY.encode()).hexdigest() in found.text
    assert [
        "model_list[0] (bge-embed).api_key: keys are not written here; set BGE_EMBED_API_KEY"
    ] == found.left_out
    assert ["from which a chosen key can be guessed" in line for line in found.warnings] == [True]


@pytest.mark.parametrize(
    "key", ["sk-1234", "sk-master", "hunter2", "sk-my-company-master-key", "a1" * 20, "1" * 40]
)
def test_a_chosen_key_is_left_out(key: str) -> None:
    found = import_litellm(one("openai/x") + f"general_settings: {{master_key: '{key}'}}\n")

    assert "sha256" not in found.text
    assert ["general_settings.master_key"] == [line.partition(": ")[0] for line in found.left_out]
    assert "does not look random" in found.left_out[0]
    assert key not in "".join(found.left_out)


@pytest.mark.parametrize("written", ["os.environ/REDIS_PASSWORD", "pw"])
@pytest.mark.parametrize("password", ["plain", "p@ss/w:rd#?%41 ü", "$100%"])
def test_any_password_of_redis_is_part_of_a_url(written: str, password: str) -> None:
    text = one("openai/x") + f"router_settings: {{redis_host: r, redis_password: {written}}}\n"
    found = import_litellm(text)
    environment = dict.fromkeys(found.variables, "key") | {"REDIS_PASSWORD": password}
    store = parse_config(found.text, environment, Path()).quotas.store

    assert "REDIS_PASSWORD" in found.variables
    parts = urlsplit(store)
    assert ("r", 6379, "/0") == (parts.hostname, parts.port, parts.path)
    assert password == unquote(parts.password or "")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{model_name: gpt-4o, litellm_params: {model: openai/gpt-4o}}", "neither embeds nor ranks"),
        (
            "{model_name: embed-chat, litellm_params: {model: openai/x}, model_info: {mode: chat}}",
            "neither embeds nor ranks",
        ),
        ("{model_name: '*', litellm_params: {model: 'openai/*'}}", "a pattern"),
        ("{model_name: titan-embed, litellm_params: {model: sagemaker/titan}}", "the API of 'sagemaker'"),
        ("{model_name: my-bge, litellm_params: {model: hosted_vllm/bge}}", "no `api_base`"),
        ("{model_name: first-embed, litellm_params: {model: openai/other}}", "another model"),
        ("text", "no mapping"),
        ("{model_name: bge, litellm_params: {model: [openai/x]}}", "where a text belongs"),
        ("{model_name: {a: bge}, litellm_params: {model: openai/x}}", "where a text belongs"),
        ("{model_name: bge, litellm_params: {model: openai/x}, model_info: {mode: [rerank]}}", ""),
        ("{model_name: bge, litellm_params: {model: openai/x, api_base: os.environ/A B}}", "no variable"),
        ("{model_name: bge, litellm_params: {model: openai/x, api_key: os.environ/}}", "no variable"),
        (
            "{model_name: bge, litellm_params: {model: openai/x, api_base: 'http://me:secret@h/v1'}}",
            "has a user or password",
        ),
    ],
)
def test_an_entry_that_cannot_be_served_is_reported(entry: str, reason: str) -> None:
    first = "{model_name: first-embed, litellm_params: {model: openai/one}}"
    found = import_litellm(f"model_list: [{first}, {entry}]\n")

    assert 1 == len(found.left_out)
    assert reason in found.left_out[0]
    assert ["first-embed"] == list(parse_config(found.text, {"OPENAI_API_KEY": "k"}, Path()).models)


def test_texts_of_the_file_are_no_placeholders() -> None:
    entry = "'openai/${file:/etc/hostname}'", ", api_base: 'http://h/${HOME}'"
    found = import_litellm(one(*entry))
    assert not found.left_out
    upstream = parse_config(found.text, {"OPENAI_API_KEY": "k", "HOME": "leaked"}, Path()).upstreams[
        "bge-embed"
    ]
    assert upstream.model == "${file:/etc/hostname}"
    assert [str(replica) for replica in upstream.replicas] == ["http://h/${HOME}"]


def test_aliases_that_repeat_aliases_end() -> None:
    levels = "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30))
    text = f"a0: &a0 [x]\n{levels}model_list: [{{model_name: bge, litellm_params: {{model: *a29}}}}]\n"
    with pytest.raises(Unreadable):
        import_litellm(text)


@pytest.mark.parametrize("timeout", ["0", "-1", ".inf", ".nan", "true", "[5]", "abc"])
def test_timeouts_that_are_none_are_reported(timeout: str) -> None:
    found = import_litellm(
        one("openai/x", f", timeout: {timeout}") + f"litellm_settings: {{request_timeout: {timeout}}}\n"
    )
    assert 2 == len(found.left_out)
    assert parse_config(found.text, {"OPENAI_API_KEY": "k"}, Path()).models


@pytest.mark.parametrize("name", ["5-e5", "Жbge", "é-bge", "bge"])
def test_variables_of_keys_have_names_that_a_shell_can_set(name: str) -> None:
    text = f"model_list: [{{model_name: {name}, litellm_params: {{model: openai/x, api_key: sk-1}}}}]\n"
    found = import_litellm(text)
    assert all(variable.isascii() and variable.isidentifier() for variable in found.variables)
    assert parse_config(found.text, dict.fromkeys(found.variables, "k"), Path()).models


@pytest.mark.parametrize(
    "section",
    [
        "router_settings: {redis_url: [x]}",
        "router_settings: {redis_host: os.environ/}",
        "general_settings: {master_key: [x]}",
    ],
)
def test_sections_with_odd_values_are_reported(section: str) -> None:
    found = import_litellm(one("openai/x") + section + "\n")
    assert 1 == len(found.left_out)
    assert parse_config(found.text, {"OPENAI_API_KEY": "k"}, Path()).models


DEPLOYMENTS = """
model_list:
  - model_name: small
    litellm_params: {model: openai/text-embedding-3-small, weight: 3}
  - model_name: small
    litellm_params: {model: azure/text-embedding-3-small, api_base: "https://x.openai.azure.com", WEIGHT}
  - model_name: small
    litellm_params: {model: azure/mine, api_base: "https://y.openai.azure.com", weight: 1, order: 2}
    model_info: {mode: embedding, base_model: azure/text-embedding-3-small}
"""


@pytest.mark.parametrize(("weight", "expected"), [("weight: 1", [3, 1, 1]), ("weight: 0.5", [300, 50, 100])])
def test_deployments_of_one_model_become_upstreams_with_weights(weight: str, expected: list[int]) -> None:
    config = served(DEPLOYMENTS.replace("WEIGHT", weight))
    members = config.models["small"].upstreams

    assert ["small", "small-2", "small-3"] == [member.name for member in members]
    assert expected == [member.weight for member in members]
    assert [0, 0, 2] == [member.priority for member in members]
    assert {"azure", "openai"} == {config.upstreams[member.name].backend for member in members}


def test_equal_deployments_are_replicas_and_count_as_many_as_they_are() -> None:
    entry = "  - model_name: bge-embed\n    litellm_params: {model: MODEL, api_base: 'http://HOST'}\n"
    servers = [("huggingface/BAAI/bge", "a"), ("huggingface/BAAI/bge", "b"), ("hosted_vllm/BAAI/bge", "c")]
    listed = "".join(entry.replace("MODEL", model).replace("HOST", host) for model, host in servers)
    config = served("model_list:\n" + listed)

    assert [("bge-embed", 2), ("bge-embed-2", 1)] == [
        (member.name, member.weight) for member in config.models["bge-embed"].upstreams
    ]
    assert ("http://a", "http://b") == config.upstreams["bge-embed"].replicas


def test_every_setting_that_is_not_carried_over_is_reported() -> None:
    text = (
        one("openai/x", ", rpm: 5, drop_params: true")
        + "litellm_settings: {num_retries: 3, request_timeout: 12}\n"
        + "router_settings: {routing_strategy: latency-based-routing, redis_url: 'redis://:pw@r:6379'}\n"
        + "general_settings: {database_url: x}\nenvironment_variables: {A: b}\n"
    )

    found = import_litellm(text)

    assert [
        "environment_variables",
        "general_settings.database_url",
        "litellm_settings.num_retries",
        "model_list[0] (bge-embed).litellm_params.drop_params",
        "model_list[0] (bge-embed).litellm_params.rpm",
        "router_settings.routing_strategy",
    ] == [line.split(": ")[0] for line in found.left_out]
    assert "pw" not in found.text
    assert "${REDIS_URL}" in found.text
    assert "attempt_timeout_s: 12" in found.text


@pytest.mark.parametrize("place", ["litellm_params", "model_info"])
@pytest.mark.parametrize(
    ("cost", "price"),
    [("2e-8", 0.02), ("0.00000013", 0.13), ("1.5e-09", 0.0015), ("0", 0.0), ("0.005", 5000.0)],
)
def test_costs_that_are_exact_become_prices(place: str, cost: str, price: float) -> None:
    text = one("openai/x", f", input_cost_per_token: {cost}")
    if place == "model_info":
        text = one("openai/x") + f"    model_info: {{mode: embedding, input_cost_per_token: {cost}}}\n"
    found = import_litellm(text)

    if price == 0.0015:
        assert ["expected at most three decimal places"] == [
            line.rpartition(": ")[2] for line in found.left_out
        ]
        assert served(text).models["bge-embed"].price_per_million_tokens is None
        return
    assert [] == found.left_out
    assert ("USD", price) == (
        served(text).currency,
        served(text).models["bge-embed"].price_per_million_tokens,
    )


def test_other_costs_and_budgets_are_reported() -> None:
    second = one("openai/x", ", input_cost_per_token: 3e-8").partition("\n")[2]
    text = (
        one(
            "openai/x",
            ", input_cost_per_token: 2e-8, output_cost_per_token: 1e-7, max_budget: 5, budget_duration: 1d",
        )
        + second
        + "    model_info: {input_cost_per_query: 0.001, output_cost_per_token: 0}\n"
        + "litellm_settings: {max_budget: 100, budget_duration: 30d}\n"
        + "router_settings: {provider_budget_config: {openai: {budget_limit: 1, time_period: 1d}}}\n"
    )
    found = import_litellm(text)

    assert [
        "litellm_settings.budget_duration",
        "litellm_settings.max_budget",
        "model_list[0] (bge-embed).litellm_params.budget_duration",
        "model_list[0] (bge-embed).litellm_params.max_budget",
        "model_list[0] (bge-embed).litellm_params.output_cost_per_token",
        "model_list[1] (bge-embed).model_info.input_cost_per_query",
        "model_list[1] (bge-embed)",
        "router_settings.provider_budget_config",
    ] == [line.split(": ")[0] for line in found.left_out]
    assert "another price" in found.left_out[6]
    assert "`budget_per_month` or `budget_per_day`" in found.left_out[1]
    assert 0.02 == served(text).models["bge-embed"].price_per_million_tokens


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "no YAML"),
        ("- a", "no `model_list`"),
        ("model_list: 3", "no `model_list`"),
        ("model_list: [{model_name: gpt-4o, litellm_params: {model: gpt-4o}}]", "neither embeds nor ranks"),
    ],
)
def test_a_file_without_such_models_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        import_litellm(text)


def test_the_command_writes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "config.yaml", tmp_path / "router.yaml"
    source.write_text(one("openai/x") + "general_settings: {master_key: os.environ/MASTER}\n")
    options = full_parser().parse_args(["import", "litellm", str(source), "-o", str(target)])

    statuses = [run_import(options, environment) for environment in ({"OPENAI_API_KEY": "k"}, {})]
    assert [0, 1] == statuses

    assert "${MASTER_SHA256}" in target.read_text()
    assert 0o600 == stat.S_IMODE(target.stat().st_mode)
    errors = capsys.readouterr().err
    assert "set before the start: MASTER_SHA256" in errors
    assert "sha256sum" in errors
    assert "File exists" in errors
    assert "keep the file private" in errors


def test_names_of_a_file_are_no_commands_for_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "config.yaml"
    evil = '  - model_name: "evil\\e[31m[/x]"\n    litellm_params: {model: "gpt\\e]0;x\\a"}\n'
    source.write_text(one("openai/x") + evil)

    assert 0 == run_import(full_parser().parse_args(["import", "litellm", str(source)]), {})

    captured = capsys.readouterr()
    assert "(evil [31m[/x])" in captured.err
    assert "\x1b" not in captured.err + captured.out
    assert "\x07" not in captured.err + captured.out
