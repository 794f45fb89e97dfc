"""The documents say what is there."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from backends.torch.stats import BOUNDS, COUNTERS
from gateway.config.load import parse_config
from gateway.config.schema import Config, Key, Section
from gateway.errors import FACTS
from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[1]
OBSERVABILITY = ROOT / "deploy/observability"


def test_the_files_of_architecture_are_the_files_of_the_tree() -> None:
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    there = {
        str(path.relative_to(ROOT))
        for room in ("gateway", "backends")
        for path in (ROOT / room).rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"}
    }

    assert there == listed


@pytest.mark.parametrize("document", ["README.md"])
def test_every_yaml_example_is_a_config_that_loads(document: str) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)

    assert examples
    for example in examples:
        assert parse_config(example, {}, ROOT).models


@pytest.mark.parametrize(
    "name", ["router.yaml", "router.tei.yaml", "router.infinity.yaml", "router.vllm.yaml"]
)
def test_the_files_that_compose_serves_load(name: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose" / name).read_text().replace("/secrets/", f"{tmp_path}/")
    (tmp_path / "redis-password").write_text("made at random")
    (tmp_path / "metrics-digest").write_text("0f" * 32)
    config = parse_config(text, {}, ROOT)

    assert config.quotas.store == "redis://:made at random@redis:6379/0"
    assert [("metrics",)] == [one.scopes for one in config.admin.keys if isinstance(one, Key)]


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounted = [str(one) for service in services.values() for one in service.get("volumes", ())]
    paths = [one.partition(":")[0] for one in mounted if one.startswith("./")]

    assert paths
    assert [] == [one for one in paths if not (ROOT / one).exists()]
    assert not any(
        service["image"].endswith(":latest") for name, service in services.items() if name != "vllm"
    )


def test_the_projects_own_router_yaml_loads() -> None:
    assert parse_config((ROOT / "router.yaml").read_text(), {}, ROOT).defaults.embed == "all-minilm-l6-v2"


def test_every_error_is_documented_with_its_status() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| (\d+) \| .+? \| (\d+) \| (\w+) \| (\d+) \|", _doc("errors"), re.MULTILINE
    )
    documented = {(kind, source, int(a), int(b), tei, int(c)) for kind, source, a, b, tei, c in rows}

    assert {
        (kind, one.source, one.status, one.tei_status, one.tei_type, one.infinity_status)
        for kind, one in FACTS.items()
    } == documented


def test_the_engines_metrics_are_documented() -> None:
    rows = re.findall(r"^\| (`te_.+?) \|", _doc("metrics"), re.MULTILINE)

    assert {"te_queue_size", *COUNTERS, *BOUNDS} == set(re.findall(r"`(\w+)`", "".join(rows)))


async def test_every_metric_is_documented() -> None:
    documented = set(re.findall(r"^\| `(gateway_\w+)` \| (\w+) \|", _doc("metrics"), re.MULTILINE))
    body, _ = await Metrics(is_open=True).render()
    families = text_string_to_metric_families(body.decode())
    there = {
        (f"{one.name}_total" if one.type == "counter" else one.name, one.type)
        for one in families
        if one.name.startswith("gateway_")
    }

    assert there == documented


def test_every_config_key_is_documented() -> None:
    documented = set(
        re.findall(
            r"`([\w.<>]+)`", "".join(re.findall(r"^\| (`.+?) \|", _doc("configuration"), re.MULTILINE))
        )
    )

    assert set(_keys(Config, "")) == documented


def _keys(section: type[Section], path: str) -> list[str]:
    """Leaves of the schema, as the document writes them."""
    named = {"upstreams": "Upstream", "models": "Model", "tenants": "Tenant"}
    keys: list[str] = []
    for field in msgspec.structs.fields(section):
        place = f"{path}.{field.name}" if path else field.name
        inner = field.type
        if field.name in named and not path:
            inner, place = inner.__args__[1], f"{place}.<name>"
        # An optional section: its keys are what there is to document.
        inner = next((one for one in get_args(inner) if _is_section(one)), inner)
        if _is_section(inner):
            keys += _keys(inner, place)
        else:
            keys.append(place)
    return keys


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _doc(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_dashboards_and_alerts_ask_for_metrics_that_are_documented() -> None:
    documented = set(re.findall(r"`((?:gateway|te)_\w+)`", _doc("metrics")))
    boards = [json.loads(path.read_text()) for path in (OBSERVABILITY / "grafana/dashboards").glob("*.json")]
    asked = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"] for board in boards for variable in board["templating"]["list"]]
    rules = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
    asked += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    named = {name for one in asked for name in re.findall(r"\b(?:gateway|te)_\w+", one)}

    assert 4 == len(boards)
    assert named
    assert set() == {
        name for name in named if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & documented
    }


def test_every_cell_of_the_translation_table_names_a_test_that_is_there() -> None:
    text = _doc("translation")
    held = re.findall(r'^\[(\d+)\]: \.\./(tests/[\w/]+\.py) "(\w+)"$', text, re.MULTILINE)
    rows = re.findall(r"^\| (?!\|)(.+) \|$", text, re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")[1:] if not row.startswith("| tei")]
    used = {number for cell in cells for number in re.findall(r"\[(\d+)\]", cell)}

    assert len(cells) > 100
    assert [] == [cell for cell in cells if not re.search(r"\[\d+\]", cell)]
    assert {number for number, _, _ in held} == used
    for _, path, name in held:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
