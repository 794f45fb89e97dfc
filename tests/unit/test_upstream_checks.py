"""Tests of the settings for OpenAI's API and its relatives: defaults, headers, and refused combinations."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from backends.openai.settings import ApiSettings
from gateway.config.load import parse_config
from gateway.config.schema import UpstreamSettings
from gateway.upstreams.factory import ReplicaAddress, ReplicaOpener, create_replica
from tests.config_texts import parsed, problems_of

GRPC = {"backend": "tei", "replicas": ["grpc://t:1"]}
OPENAI = {"backend": "openai", "replicas": ["http://api"]}
SECRET = "0123456789abcdef"


def text_of(upstream: dict[str, Any], model: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> str:
    config = {"upstreams": {"up": upstream}, "models": {"m": {"upstream": "up", **model}}, **more}
    return yaml.safe_dump(config)


def read(upstream: dict[str, Any], **model: Any) -> UpstreamSettings:
    return parsed(text_of(upstream, model)).upstreams["up"]


def problems(upstream: dict[str, Any], **model: Any) -> dict[str, str]:
    found = problems_of(text_of(upstream, model))
    assert SECRET not in "".join(map(str, found))
    return {problem.path.removeprefix("upstreams.up."): problem.message for problem in found}


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("cohere", "https://api.cohere.com/v2"),
        ("jina", "https://api.jina.ai/v1"),
        ("voyage", "https://api.voyageai.com/v1"),
    ],
)
def test_hosted_api_has_an_address(kind: str, address: str) -> None:
    assert (address,) == read({"backend": kind, "model": "m"}).replicas
    assert ("http://proxy",) == read({"backend": kind, "model": "m", "replicas": ["http://proxy"]}).replicas


def test_reads_the_settings_of_an_api() -> None:
    written: dict[str, Any] = {
        "embeddings": "/embed",
        "rerank": "/v1/rerank",
        "input_type": {"query": "q", "default": "d"},
        "extra_body": {"user": "gateway", "options": {"a": [1, 2.5]}},
        "task": "rerank",
    }

    assert ApiSettings("openai", **written) == read(OPENAI | written).api
    assert read({"backend": "tei", "replicas": ["http://tei"]}).api is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"api_key": "k"}, {"authorization": "Bearer k"}),
        ({"api_key": "k", "api_key_header": "Authorization"}, {"Authorization": "Bearer k"}),
        ({"api_key": "k", "api_key_header": "api-key", "headers": {"x": "y"}}, {"x": "y", "api-key": "k"}),
        ({"headers": {"x": "y"}}, {"x": "y"}),
    ],
)
def test_sends_the_key_in_its_header(settings: dict[str, Any], expected: dict[str, str]) -> None:
    specs = []

    def open_replica(_: Any, spec: Any) -> Any:
        specs.append(spec)

    create_replica(
        read(OPENAI | settings), ReplicaAddress("a", "http://api"), ReplicaOpener("up", open_replica)
    )

    assert [expected] == [spec.headers for spec in specs]


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"backend": "voyage"}, "model", "the API serves many models"),
        ({"backend": "tei", "replicas": ["http://t"], "rerank": "/rerank"}, "rerank", "openai, cohere"),
        ({"backend": "torch", "model": "m", "extra_body": {"a": 1}}, "extra_body", "openai, cohere"),
        ({"backend": "tei", "replicas": ["http://t?a=b"]}, "replicas[0]", "not a base URL"),
        (OPENAI | {"replicas": ["http://api#x"]}, "replicas[0]", "not a base URL"),
        (OPENAI | {"replicas": ["grpc://t:1"]}, "replicas[0]", "gRPC is for `backend: tei`"),
        ({"backend": "tei", "replicas": ["grpc://t"]}, "replicas[0]", "grpc://host:port"),
        ({"backend": "tei", "replicas": ["grpcs://t:1/tei"]}, "replicas[0]", "grpcs://host:port"),
        ({"backend": "tei", "replicas": ["grpc://t:99999"]}, "replicas[0]", "not a base URL"),
        (GRPC | {"headers": {"grpc-timeout": "1S"}}, "headers.grpc-timeout", "no `grpc-`"),
        (GRPC | {"headers": {"x-key-bin": "a"}}, "headers.x-key-bin", "`-bin`"),
        (GRPC | {"headers": {"x-team": "é"}}, "headers.x-team", "ASCII"),
        (GRPC | {"model": "modèle"}, "model", "ASCII"),
        (OPENAI | {"replicas": [f"http://api/v1?key={SECRET}"]}, "replicas[0]", "`api_key_header`"),
        (OPENAI | {"replicas": [f"http://api?a=b&SIG={SECRET}"]}, "replicas[0]", "`api_key_header`"),
        (OPENAI | {"rerank": "http://other/rerank"}, "rerank", "not a path"),
        (OPENAI | {"embeddings": "/"}, "embeddings", "not a path"),
        (OPENAI | {"rerank": "/rerank?x=y"}, "rerank", "not a path"),
        (OPENAI | {"task": "rerank"}, "rerank", "such as /v1/rerank"),
        (OPENAI | {"extra_body": {"model": "x"}}, "extra_body.model", "sets this field itself"),
        ({"backend": "cohere", "model": "m", "extra_body": {"texts": []}}, "extra_body.texts", "itself"),
        (OPENAI | {"input_type": {"query": "q"}, "prompts": {"query": "q: "}}, "prompts", "`input_type`"),
        (
            {"backend": "jina", "model": "m", "instruction_template": "{instruction}{text}"},
            "instruction_template",
            "`input_type`",
        ),
        (OPENAI | {"api_key_header": "api-key"}, "api_key_header", "needs `api_key`"),
        (OPENAI | {"api_key": SECRET, "api_key_header": "a b"}, "api_key_header", "letters"),
        (OPENAI | {"api_key": SECRET, "api_key_header": "Host"}, "api_key_header", "framing"),
        (
            OPENAI | {"api_key": SECRET, "api_key_header": "X-Key", "headers": {"x-key": "v"}},
            "api_key_header",
            "write it once",
        ),
        (
            {"backend": "torch", "model": "m", "api_key": SECRET, "api_key_header": "k"},
            "api_key_header",
            "remote backends",
        ),
    ],
)
def test_refuses_a_combination_with_the_way_out(settings: dict[str, Any], path: str, message: str) -> None:
    found = problems(settings)

    assert {path} == found.keys()
    assert message in found[path]


@pytest.mark.parametrize("replica", ["http://tei:8080", "grpc://tei:8080"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", " \n", "\t"])
@pytest.mark.parametrize("source", ["environment", "file", "text"])
def test_keys_and_headers_lose_the_space_around_them(
    tmp_path: Path, replica: str, end: str, source: str
) -> None:
    (tmp_path / "secret").write_bytes(f"key-of-tei{end}".encode())
    value = {"environment": "${KEY}", "file": "${file:secret}", "text": f"key-of-tei{end}"}[source]
    upstream = {"backend": "tei", "replicas": [replica], "api_key": value, "headers": {"x-team": value}}
    text = text_of(upstream, tracing={"headers": {"x": value}})
    found = parse_config(text, {"KEY": f"key-of-tei{end}"}, tmp_path)

    assert ("key-of-tei", {"x-team": "key-of-tei"}) == (
        found.upstreams["up"].api_key,
        found.upstreams["up"].headers,
    )
    assert found.tracing is not None
    assert {"x": "key-of-tei"} == found.tracing.headers


@pytest.mark.parametrize("replica", ["http://tei:8080", "grpc://tei:8080"])
@pytest.mark.parametrize("inside", ["\n", "\r\nx-other: ", "\r", "\0", "\x7f", "\x1b[2J", "é"])
def test_what_would_end_a_header_is_refused_with_its_path(replica: str, inside: str) -> None:
    value = f"{SECRET}{inside}{SECRET}"
    upstream = {"backend": "tei", "replicas": [replica], "api_key": value, "headers": {"x-team": value}}
    found = problems(upstream)

    assert {"api_key", "headers.x-team"} == found.keys()
    assert all("ASCII" in message for message in found.values())


@pytest.mark.parametrize("name", ["x\r\nx-other", "a b", "", "x:", "é"])
def test_a_name_that_no_header_has_is_refused(name: str) -> None:
    assert "letters, digits and dashes" in problems(OPENAI | {"headers": {name: "v"}})["headers"]


@pytest.mark.parametrize("inside", ["\n", "\r\nx-other: a", " ", "\t"])
def test_an_address_has_one_line(inside: str) -> None:
    assert "no URL has" in problems(OPENAI | {"replicas": [f"http://api{inside}/v1"]})["replicas[0]"]


def test_headers_of_traces_are_checked() -> None:
    [problem] = problems_of(text_of(OPENAI, tracing={"headers": {"a": "x\r\ny: z"}}))

    assert "tracing.headers.a" == problem.path


def test_prompts_of_a_model_exclude_types() -> None:
    found = problems({"backend": "cohere", "model": "m"}, prompts={"query": "q: "})

    assert {"models.m.prompts"} == found.keys()
    read({"backend": "cohere", "model": "m", "input_type": {}}, prompts={"query": "q: "})


def test_refuses_a_role_that_does_not_exist() -> None:
    assert "input_type" in problems(OPENAI | {"input_type": {"passage": "p"}})
