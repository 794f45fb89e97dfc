"""Sections of Bedrock, Google and Hugging Face in router.yaml and in additions."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.bedrock import signing
from backends.contract import ReplicaSpec
from backends.contract.errors import ModelUnavailable
from backends.google import credentials
from gateway.config.load import load_config, parse_config
from gateway.config.local_files import EXTRAS, upstream_file_problems
from gateway.config.problems import ConfigError
from gateway.config.schema import UpstreamSettings
from gateway.config.upstream_checks import upstream_problems
from gateway.declared.settings import SecretSources, read_upstream

TITAN: dict[str, Any] = {"backend": "bedrock", "model": "amazon.titan-embed-text-v2:0"}
VERTEX: dict[str, Any] = {"backend": "vertex", "model": "text-embedding-005"}
AZURE: dict[str, Any] = {"backend": "azure"}
WATSONX: dict[str, Any] = {"backend": "watsonx", "model": "ibm/slate-125m-english-rtrvr"}
ENTRA: dict[str, Any] = {"backend": "azure", "model": "m", "azure": {"entra": True}}
ELSEWHERE = {"replicas": ["https://elsewhere.example.org"]}
KEY = {"api_key": "${UPSTREAM_KEY}"}
REGION = {"bedrock": {"region": "us-east-1"}}
PROJECT = {"vertex": {"project": "a-project"}}


def upstream(settings: dict[str, Any]) -> UpstreamSettings:
    return msgspec.convert(settings, UpstreamSettings)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        (TITAN | REGION, "https://bedrock-runtime.us-east-1.amazonaws.com"),
        (VERTEX | PROJECT, "https://aiplatform.googleapis.com"),
        (
            VERTEX | {"vertex": {"project": "p", "location": "us-central1"}},
            "https://us-central1-aiplatform.googleapis.com",
        ),
        (VERTEX | {"vertex": {"project": "example.org:p-1"}}, "https://aiplatform.googleapis.com"),
        (WATSONX | {"watsonx": {"project_id": "p"}}, "https://us-south.ml.cloud.ibm.com"),
        ({"backend": "gemini", "model": "m"}, "https://generativelanguage.googleapis.com/v1beta"),
        ({"backend": "huggingface", "model": "m"}, "https://router.huggingface.co/hf-inference/models"),
    ],
)
def test_address_is_that_of_the_vendor(settings: dict[str, Any], address: str) -> None:
    assert (address,) == upstream(settings).replicas
    assert [] == list(upstream_problems(upstream(settings), "upstreams.x"))


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        (TITAN, "bedrock.region", "${AWS_REGION}, which is not read by itself"),
        (AZURE, "replicas", "https://NAME.openai.azure.com"),
        (AZURE, "model", "the name of the deployment"),
        ({"backend": "nim"}, "replicas", "`nim: {hosted: true}`"),
        ({"backend": "openai"}, "replicas", "`vendor`"),
        (TITAN | {"bedrock": {"region": "somewhere"}}, "bedrock.region", "us-east-1"),
        (TITAN | REGION | PROJECT, "vertex", "is for `backend: vertex`"),
        (VERTEX, "vertex.project", "is missing"),
        (
            VERTEX | {"vertex": {"project": "p", "location": "localhost:1/x"}},
            "vertex.location",
            "europe-west4",
        ),
        (
            VERTEX | {"vertex": {"project": "p", "location": "x.example.org/"}},
            "vertex.location",
            "europe-west4",
        ),
        (VERTEX | {"vertex": {"project": "p", "location": ""}}, "vertex.location", "europe-west4"),
        (VERTEX | {"vertex": {"project": "../p"}}, "vertex.project", "not the id of a project"),
        (VERTEX | {"vertex": {"project": "p?x"}}, "vertex.project", "not the id of a project"),
        (WATSONX | {"watsonx": {"project_id": "p", "region": "x.example.org/"}}, "watsonx.region", "eu-de"),
        ({"backend": "tei", "replicas": ["http://t"]} | REGION, "bedrock", "is for `backend: bedrock`"),
        ({"backend": "gemini"}, "model", "is missing"),
    ],
)
def test_problems_name_the_key(settings: dict[str, Any], path: str, message: str) -> None:
    found = {problem.path: problem.message for problem in upstream_problems(upstream(settings), "x")}
    assert message in found[f"x.{path}"]


def test_unknown_key_of_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="place"):
        parse_config(
            "upstreams: {x: {backend: bedrock, model: m, bedrock: {place: us-east-1}}}\n"
            "models: {m: {upstream: x}}\n",
            {},
            Path(),
        )


@pytest.mark.parametrize(("settings", "extra"), [(TITAN | REGION, "aws"), (VERTEX | PROJECT, "google")])
def test_missing_packages_are_named_at_the_start(settings: dict[str, Any], extra: str) -> None:
    extras = dict(EXTRAS) | {extra: ("no_such_package",)}
    (problem,) = upstream_file_problems(upstream(settings), "upstreams.x", extras)
    assert "upstreams.x.backend" == problem.path
    assert f"needs the extra `{extra}`" in problem.message
    assert [] == list(upstream_file_problems(upstream(settings), "upstreams.x"))


def test_missing_packages_are_named_by_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "find_spec", lambda _: None)
    monkeypatch.setattr(credentials, "find_spec", lambda _: None)
    with pytest.raises(ModelUnavailable, match="extra `aws`"):
        signing.check_installed()
    with pytest.raises(ModelUnavailable, match="extra `google`"):
        credentials.bearer_token(ReplicaSpec("https://x"), None)


def test_file_of_credentials_is_found_next_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "upstreams: {x: {backend: vertex, model: m, vertex: {project: p, credentials: account.json}}}\n"
        "models: {m: {upstream: x}}\n"
    )
    section = load_config(file, {}).upstreams["x"].vertex
    assert section is not None
    assert str(tmp_path / "account.json") == section.credentials


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        # A server elsewhere would get what identifies this machine.
        (TITAN | REGION | ELSEWHERE, "replicas"),
        (VERTEX | PROJECT | ELSEWHERE, "replicas"),
        (ENTRA | ELSEWHERE, "replicas"),
        # The key does not take the place of those credentials.
        (VERTEX | PROJECT | ELSEWHERE | KEY | {"api_key_header": "x-key"}, "replicas"),
        (TITAN | REGION | ELSEWHERE | KEY | {"api_key_header": "x-key"}, "replicas"),
        (ENTRA | ELSEWHERE | KEY, "replicas"),
        (VERTEX | PROJECT | ELSEWHERE | KEY, None),
        (TITAN | REGION | ELSEWHERE | KEY, None),
        (TITAN | {"bedrock": {"region": "us-east-1", "profile": "admin"}}, "bedrock.profile"),
        (VERTEX | {"vertex": {"project": "p", "credentials": "/etc/passwd"}}, "vertex.credentials"),
        (TITAN | REGION, None),
        (VERTEX | PROJECT, None),
        (VERTEX | {"vertex": {"project": "p", "credentials": "account.json"}}, None),
    ],
)
def test_additions_lend_no_credentials_and_read_no_files(
    settings: dict[str, Any], path: str | None, tmp_path: Path
) -> None:
    sources = SecretSources({"UPSTREAM_KEY": "a-key"}, tmp_path)
    found = problems_of(settings, sources)
    assert ({f"upstreams.x.{path}"} if path else set()) == found


@pytest.mark.parametrize(
    "location", ["localhost:19443/x", "x.example.org/", "x.example.org#", "u@example.org/", "["]
)
def test_additions_lead_tokens_to_no_other_host(location: str, tmp_path: Path) -> None:
    settings = VERTEX | {"vertex": {"project": "p", "location": location}}
    found = problems_of(settings, SecretSources({}, tmp_path))
    # The host is checked by itself, too.
    assert {"upstreams.x.vertex.location", "upstreams.x.replicas"} <= found


def problems_of(settings: dict[str, Any], sources: SecretSources) -> set[str]:
    """Return the paths of the problems of an added upstream."""
    try:
        read_upstream("x", settings, sources)
    except ConfigError as error:
        return {problem.path for problem in error.problems}
    return set()
