"""JSON Schema of router.yaml: it is current, and accepts and refuses what the loader does."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from backends.contract import ServerKind
from backends.kinds import KINDS
from gateway.cli.init import editor_line, editor_schema
from gateway.config.schema import Config, UpstreamSettings

ROOT = Path(__file__).parents[1]
SHIPPED = [
    ROOT / "router.yaml",
    *sorted((ROOT / "deploy/compose").glob("*.yaml")),
    *sorted((ROOT / "deploy/kubernetes/overlays").glob("*/*router.yaml")),
]


def mistakes(data: Any) -> list[str]:
    """Return the paths of the mistakes that an editor shows."""
    # As JSON: YAML's dates become text.
    plain = json.loads(json.dumps(data, default=str))
    found = Draft7Validator(json.loads(editor_schema())).iter_errors(plain)
    return sorted(".".join(map(str, error.absolute_path)) for error in found)


def test_the_shipped_schema_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs/router_schema.py"))

    assert made["schema_text"]() == editor_schema(), "run: .venv/bin/python docs/router_schema.py"
    assert made["values_schema_text"](editor_schema()) == made["VALUES_SCHEMA"].read_text()


def test_the_schema_is_valid_and_describes_every_section() -> None:
    schema = json.loads(editor_schema())
    Draft7Validator.check_schema(schema)

    assert list(Config.__struct_fields__) == list(schema["properties"])
    assert [] == [name for name, part in schema["properties"].items() if "description" not in part]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_shipped_file_names_the_schema_and_fits_it(file: Path) -> None:
    text = file.read_text()
    place = text.partition("$schema=")[2].partition("\n")[0]

    assert text.startswith(editor_line(place))
    assert (ROOT / "gateway/config/router.schema.json") == (file.parent / place).resolve()
    assert [] == mistakes(yaml.safe_load(text))


FILE = {"upstreams": {"a": {"backend": "tei", "replicas": ["http://a"]}}, "models": {"m": {"upstream": "a"}}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"workers": "${WORKERS:-2}", "logs": {"access": "${LOG}"}}, []),
        ({"upstreams": {"a": {"backend": "${KIND}", "request_inputs": "${N}"}}}, []),
        (
            {"upstreams": {"a": {"backend": "torch", "device": ["cpu", "cpu"], "rerank_template": "qwen3"}}},
            [],
        ),
        ({"tenants": {"acme": {"keys": ["sha256:x", {"digest": "${D}", "scopes": ["admin"]}]}}}, []),
        ({"workers": "two"}, ["workers"]),
        ({"listen": 9705}, ["listen"]),
        ({"listn": ""}, [""]),
        ({"upstreams": {"a": {"backend": "pytorch", "dtype": "int8"}}}, ["upstreams.a.backend"]),
        ({"upstreams": {"a": {"backend": "tei", "dtype": "int8"}}}, ["upstreams.a"]),
        ({"upstreams": {"a": {"backend": "tei", "batch_inputs": 1}}}, ["upstreams.a"]),
        ({"upstreams": {"a": {"backend": "vllm", "extra_body": {"x": 1}}}}, ["upstreams.a"]),
        ({"upstreams": {"a": {"backend": "cohere", "extra_body": {"x": 1}, "task": "embed"}}}, []),
        ({"upstreams": {"a": {"backend": "jina", "preload": True}}}, ["upstreams.a"]),
        ({"upstreams": {"a": {"backend": "torch", "replicas": [], "tls": {}}}}, ["upstreams.a"]),
        ({"upstreams": {"a": {"backend": "torch", "dtype": "bad"}}}, ["upstreams.a.dtype"]),
        ({"upstreams": {"a": {"replica": []}}}, ["upstreams.a", "upstreams.a"]),
        ({"tenants": {"acme": {"limits": {"tokens_per_fortnight": 1}}}}, ["tenants.acme.limits"]),
        ({"tenants": {"acme": {"limits": {"tokens_per_day": 0}}}}, ["tenants.acme.limits.tokens_per_day"]),
        ({"tenants": {"acme": {"limits": {"tokens_per_day": 1.5}}}}, ["tenants.acme.limits.tokens_per_day"]),
        ({"tenants": {"acme": {"limits": {"budget_per_day": 1.5}}}}, []),
        ({"tenants": {"acme": {"limits": {"budget_per_day": 0}}}}, ["tenants.acme.limits.budget_per_day"]),
        ({"tenants": {"acme": {"limits": {"budget_per_day": 5e6}}}}, ["tenants.acme.limits.budget_per_day"]),
    ],
)
def test_an_editor_shows_what_the_loader_refuses(change: dict[str, Any], expected: list[str]) -> None:
    assert expected == mistakes({**FILE, **change})


def test_an_editor_offers_the_keys_of_the_kind_of_server() -> None:
    definitions = json.loads(editor_schema())["$defs"]
    keys = {name: definitions[f"{name}Upstream"]["properties"].keys() for name in ("Tei", "Openai", "Torch")}

    assert {"backend", "replicas", "request_inputs"} <= keys["Tei"] < keys["Openai"]
    assert {"extra_body", "task", "vendor", "proxy"} == keys["Openai"] - keys["Tei"] - {
        "embeddings",
        "rerank",
        "input_type",
    }
    assert {"backend", "dtype", "task", "request_inputs", "tokenizer"} <= keys["Torch"]
    assert not {"replicas", "tls", "extra_body"} & keys["Torch"]
    sections = {kind.name for kind in KINDS.values() if kind.settings is not None}
    expected = keys["Openai"] | keys["Torch"] | sections
    assert definitions["UpstreamSettings"]["properties"].keys() == expected


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: str(kind.name))
def test_the_keys_of_a_kind_are_settings(kind: ServerKind) -> None:
    assert kind.keys < set(UpstreamSettings.__struct_fields__)
