"""JSON Schema of router.yaml for editors, made from the structs of the schema and the tables of the docs.

`python docs/router_schema.py` writes it into the package, from where `gateway schema` prints it. It also
writes it into the schema of the Helm chart's values, whose `config` has the same keys. The test
tests/test_router_schema.py checks that both files are current.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.contract import BackendKind
from backends.kinds import KINDS
from gateway.config.money import BUDGET_MAX
from gateway.config.schema import KINDS_OF_KEYS, LIMIT_NAME, Config, LimitAmount

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "gateway/config/router.schema.json"
VALUES_SCHEMA = ROOT / "deploy/helm/embedding-gateway/values.schema.json"
TABLES = sorted((ROOT / "docs").glob("configuration*.md"))

ROW = re.compile(r"^\| (`[\w.<>`, ]+`) \| .+ \| (.+?) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
# A reference to another place of the documents.
REFERENCE = re.compile(r"[;.] [Ss]ee (\[[^\]]+\]\([^)]+\)|below)\.")
LIMIT_AMOUNT = msgspec.json.schema(LimitAmount)
PLACEHOLDER = {"$ref": "#/$defs/Placeholder"}


def meanings() -> dict[str, str]:
    """Return the meaning of each documented key by its path, without links and references."""
    found: dict[str, str] = {}
    for keys, meaning in ROW.findall("".join(page.read_text(encoding="utf-8") for page in TABLES)):
        text = LINK.sub(r"\1", REFERENCE.sub(".", meaning))
        for key in re.findall(r"`([^`]+)`", keys):
            known = found.get(key, "")
            found[key] = known if text.rstrip(".") in known else f"{known} {text}".strip()
    return found


def schema_text() -> str:
    """Return the JSON Schema, one keyword on a line."""
    made = msgspec.json.schema(Config)
    definitions = made["$defs"]
    for definition in definitions.values():
        # The first paragraph.
        definition["description"] = " ".join(definition["description"].split("\n\n")[0].split())
        definition.pop("title")
    # One of the two says who serves a model.
    either = [{"required": [key]} for key in ("upstream", "upstreams")]
    definitions["ModelSettings"]["anyOf"] = either
    _describe(definitions, "Config", "", meanings())
    for definition in definitions.values():
        definition["properties"] = {name: _fillable(part) for name, part in definition["properties"].items()}
    _split_upstreams(definitions)
    definitions["Placeholder"] = {
        "description": (
            "Filled from the environment or a file: ${NAME}, ${NAME:-default}, ${file:/path} or ${url:NAME}."
        ),
        "type": "string",
        "pattern": r"\$\{",
    }
    whole = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "router.yaml of the embedding gateway",
        **definitions.pop("Config"),
        "$defs": definitions,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _split_upstreams(definitions: dict[str, Any]) -> None:
    """Let an upstream have the keys of its kind of server; all keys while its kind is not known."""
    every = definitions["UpstreamSettings"]
    split: dict[str, Any] = {"$ref": "#/$defs/UpstreamSettings"}
    kinds_by_keys: dict[frozenset[str], list[BackendKind]] = {}
    for kind in KINDS.values():
        kinds_by_keys.setdefault(kind.keys, []).append(kind.name)
    for own, kinds in kinds_by_keys.items():
        keys = [key for key in every["properties"] if key in own or key not in KINDS_OF_KEYS]
        places = {key: {"$ref": f"#/$defs/UpstreamSettings/properties/{key}"} for key in keys}
        name = f"{kinds[0].title()}Upstream"
        definitions[name] = {**every, "properties": places}
        is_kind = {"properties": {"backend": {"enum": kinds}}, "required": ["backend"]}
        split = {"if": is_kind, "then": {"$ref": f"#/$defs/{name}"}, "else": split}
    definitions["Upstream"] = {"description": every["description"], **split}
    definitions["Config"]["properties"]["upstreams"]["additionalProperties"] = {"$ref": "#/$defs/Upstream"}


def values_schema_text(router_schema: str) -> str:
    """Return the schema of the chart's values with the current sections of router.yaml as its `$defs`.

    The rest of it is written by hand. Values are merged over what the chart makes, so no key is required.
    """
    router = json.loads(router_schema)
    whole = json.loads(VALUES_SCHEMA.read_text(encoding="utf-8"))
    sections = {"Router": {key: router[key] for key in ("type", "properties", "additionalProperties")}}
    for name, section in (sections | router["$defs"]).items():
        sections[name] = {key: value for key, value in section.items() if key not in {"required", "anyOf"}}
    return json.dumps(whole | {"$defs": sections}, indent=1, ensure_ascii=False) + "\n"


def _describe(definitions: Mapping[str, Any], name: str, path: str, meaning: Mapping[str, str]) -> None:
    """Describe the keys of a section, and of the sections below it."""
    for key, part in definitions[name]["properties"].items():
        place = f"{path}.{key}" if path else key
        inner_sections = _sections(part)
        if place in meaning:
            part["description"] = meaning[place]
        elif inner_sections:
            part["description"] = definitions[inner_sections[0][0]]["description"]
        for inner, suffix in inner_sections:
            _describe(definitions, inner, place + suffix, meaning)


def _sections(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the sections that a value may be, and what their path has after the key's."""
    alternatives = [part, part.get("items", {}), *part.get("anyOf", ())]
    found = [(one["$ref"].rpartition("/")[2], "") for one in alternatives if "$ref" in one]
    by_name = part.get("additionalProperties", False)
    return found + (
        [(by_name["$ref"].rpartition("/")[2], ".<name>")] if by_name and "$ref" in by_name else []
    )


def _fillable(part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that allows placeholders in place of scalars, which are filled later."""
    if "items" in part:
        return {**part, "items": _fillable(part["items"])}
    if isinstance(part.get("additionalProperties"), dict):
        inner = part["additionalProperties"]
        return _limits(part) if inner == LIMIT_AMOUNT else {**part, "additionalProperties": _fillable(inner)}
    if "anyOf" in part:
        alternatives = [_fillable(one) for one in part["anyOf"]]
        flat = [inner for one in alternatives for inner in one.get("anyOf", [one])]
        unique = [one for index, one in enumerate(flat) if one not in flat[:index]]
        return {**part, "anyOf": unique}
    if part.get("type") in {"integer", "number", "boolean"} or "enum" in part:
        outside = {key: part[key] for key in ("description", "default") if key in part}
        inside = {key: value for key, value in part.items() if key not in outside}
        return {"anyOf": [inside, PLACEHOLDER], **outside}
    return part


def _limits(part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of limits: budgets are decimals, all others whole numbers."""
    whole, decimal = LIMIT_AMOUNT["anyOf"]
    return {
        **part,
        "propertyNames": {"pattern": f"^({LIMIT_NAME.pattern})$"},
        "patternProperties": {"^budget_": _fillable({**decimal, "maximum": BUDGET_MAX})},
        "additionalProperties": _fillable(whole),
    }


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    VALUES_SCHEMA.write_text(values_schema_text(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
