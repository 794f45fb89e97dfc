"""Tests of the documents against the code: rooms, keys, errors, metrics, links and tables."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from backends.kinds import KINDS
from backends.torch.stats import BOUNDS, COUNTERS
from gateway.config.load import parse_config
from gateway.config.schema import Config, Key
from gateway.errors import FACTS
from gateway.telemetry.metrics import Metrics
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
OBSERVABILITY = ROOT / "deploy/observability"


DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "changes/README.md",
    *sorted((ROOT / "loadtest").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FRAGMENT_TYPES = ("added", "changed", "fixed", "security")
NO_FRAGMENTS = {"README.md", "template.md.jinja"}
CELL_CHARACTERS_MAX = 120
ARCHITECTURE_LINES_MAX = 225
GLOSSARY_WORDS_MAX = 40
LOOSE_MODULES_MAX = 11
DECISION_WORDS_MAX = 400
PAGE_LINES_MAX = 220


def test_architecture_lists_the_rooms_of_the_tree() -> None:
    rows = re.findall(r"^\| `((?:gateway|backends)/[\w/.]*)` \|", _architecture(), re.MULTILINE)
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for root in ("gateway", "backends")
        for path in (ROOT / root).rglob("*.py")
        # The room of the dialects has one folder for each, which its row says.
        if path.parent.parent != ROOT / "gateway/api/dialects"
    }
    loose = {
        f"gateway/{path.name}"
        for path in (ROOT / "gateway").glob("*.py")
        if path.name not in {"__init__.py", "__main__.py"}
    }

    assert len(rows) == len(set(rows))
    assert (folders - {"gateway/"}) | loose == set(rows)
    assert len(loose) <= LOOSE_MODULES_MAX


def test_the_map_of_modules_is_that_of_the_tree() -> None:
    made = runpy.run_path(str(ROOT / "docs/module_map.py"))
    assert made["page"]() == made["PAGE"].read_text(encoding="utf-8"), "run: make modules"


def test_the_table_of_hosted_apis_is_that_of_their_adapters() -> None:
    made = runpy.run_path(str(ROOT / "docs/translation_hosted.py"))
    page = made["PAGE"].read_text(encoding="utf-8")
    vendors = {name for name, kind in KINDS.items() if kind.is_vendor}

    assert made["page"]() == page, "run: make translation"
    assert vendors <= set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


def test_files_that_comments_name_exist() -> None:
    files = [
        path for room in ("gateway", "backends", "loadtest", "tests") for path in (ROOT / room).rglob("*.py")
    ]
    paths = {path.relative_to(ROOT).as_posix() for path in files}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in re.findall(r"`([\w/.-]+\.py)`", path.read_text(encoding="utf-8"))
        if not (path.parent / name).exists()
        and not ("/" in name and any(f"/{full}".endswith(f"/{name}") for full in paths))
    ]

    assert not missing


def test_architecture_is_short() -> None:
    assert len(_architecture().splitlines()) <= ARCHITECTURE_LINES_MAX


def test_the_glossary_has_few_words_and_defines_each_once() -> None:
    glossary = _architecture().partition("## Glossary")[2]
    cells = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[2:]
    words = [word for cell in cells for word in cell.split(", ")]

    assert len(words) > 20
    assert len(words) <= GLOSSARY_WORDS_MAX
    assert len(words) == len(set(words))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_table_cells_are_short(document: Path) -> None:
    rows = re.findall(r"^\|(.*)\|$", _without_blocks(document.read_text()), re.MULTILINE)
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]

    assert [] == [cell for cell in cells if len(cell) > CELL_CHARACTERS_MAX]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_exist(document: Path) -> None:
    text = _without_blocks(document.read_text())
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    links += re.findall(r"^\[\w+\]: (\S+)", text, re.MULTILINE)
    for link in links:
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_file(), link
        assert not anchor or anchor in _anchors(target), link


def test_messages_name_existing_pages_and_headings() -> None:
    files = [path for room in ("gateway", "backends", "deploy") for path in (ROOT / room).rglob("*")]
    texts = [
        path.read_text() for path in files if path.suffix in {".py", ".yaml", ".json", ".txt", ".service"}
    ]
    named = {found for text in texts for found in re.findall(r'(docs/[\w/-]+\.md)(?:, \\?"([^"\\]+))?', text)}

    assert ("docs/production.md", "An emptied Redis") in named
    for page, heading in named:
        assert (ROOT / page).is_file(), page
        assert not heading or re.search(
            rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), re.MULTILINE
        ), heading


def test_headings_of_a_document_are_unique() -> None:
    for document in DOCUMENTS:
        headings = re.findall(r"^#+ (.+)$", _without_blocks(document.read_text()), re.MULTILINE)
        assert len(headings) == len(set(headings)), document


def test_pages_are_short() -> None:
    # A longer page is a guide and references to look up. Pages written from tables are exempt.
    written = {"models-tested.md", "model-types.md"}
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in written]

    assert [] == [page.name for page in pages if len(page.read_text().splitlines()) > PAGE_LINES_MAX]


def test_the_site_lists_every_document() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/-]+\.md)$", site.partition("\nnav:")[2], re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/0")}

    assert len(listed) == len(set(listed))
    assert pages - decisions == set(listed)


def test_the_index_of_decisions_lists_every_decision() -> None:
    folder = ROOT / "docs/decisions"
    rows = re.findall(
        r"^\| (\d{3}) \| \[(.+)\]\((\S+)\) \|$", (folder / "index.md").read_text(), re.MULTILINE
    )

    assert {path.name for path in folder.glob("*.md")} - {"index.md"} == {name for _, _, name in rows}
    assert sorted(rows) == rows
    for number, title, name in rows:
        assert name.startswith(f"{number}-")
        text = (folder / name).read_text()
        assert text.startswith(f"# {number} · {title}\n")
        assert len(text.split()) <= DECISION_WORDS_MAX, name


def test_sections_of_the_changelog_have_the_headings_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", text.partition("\n<!-- releases -->\n")[2], flags=re.MULTILINE)[1:]

    assert versions
    for version in versions:
        headings = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert headings
        assert headings == [name.capitalize() for name in FRAGMENT_TYPES if name.capitalize() in headings]


def test_fragments_of_the_changelog_have_legal_names_and_one_line() -> None:
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name not in NO_FRAGMENTS]
    legal = re.compile(rf"[a-z0-9-]+\.({'|'.join(FRAGMENT_TYPES)})\.md")

    assert [] == [path.name for path in fragments if not legal.fullmatch(path.name)]
    assert [] == [path.name for path in fragments if not re.fullmatch(r"[^-\s].*\S\n", path.read_text())]


def test_a_release_collects_the_fragments(tmp_path: Path) -> None:
    pytest.importorskip("towncrier")
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n<!-- releases -->\n")
    (tmp_path / "changes/clock.fixed.md").write_text("The clock is right.\n")
    (tmp_path / "changes/bell.added.md").write_text("A bell rings.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "today"]
    made = subprocess.run(
        command, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, text=True, check=True
    )

    assert made.stdout.startswith("## 9.9.9 - today\n\n### ")
    assert re.search(r"### Added\n\n(?:- .+\n)*- A bell rings\.\n", made.stdout)
    assert re.search(r"### Fixed\n\n(?:- .+\n)*- The clock is right\.\n", made.stdout)


def test_the_site_fetches_nothing() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()

    assert "font: false" in settings
    assert not re.search(r"https?://", settings)


@pytest.mark.parametrize("document", ["docs/start.md"])
def test_yaml_examples_of_the_first_steps_load(document: str) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)

    assert examples
    for example in examples:
        assert parse_config(example, {}, ROOT).models


@pytest.mark.parametrize(
    "name", ["router.yaml", "router.tei.yaml", "router.infinity.yaml", "router.vllm.yaml"]
)
def test_the_configurations_of_compose_load(name: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose" / name).read_text().replace("/secrets/", f"{tmp_path}/")
    (tmp_path / "redis-password").write_text("made at random")
    (tmp_path / "metrics-digest").write_text("0f" * 32)
    config = parse_config(text, {}, ROOT)

    assert config.quotas.store == "redis://:made at random@redis:6379/0"
    assert [("metrics",)] == [key.scopes for key in config.admin.keys if isinstance(key, Key)]


def test_files_that_compose_mounts_exist() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    volumes = [str(volume) for service in services.values() for volume in service.get("volumes", ())]
    paths = [volume.partition(":")[0] for volume in volumes if volume.startswith("./")]

    assert paths
    assert [] == [path for path in paths if not (ROOT / path).exists()]
    assert not any(
        service["image"].endswith(":latest") for name, service in services.items() if name != "vllm"
    )


def test_the_default_router_yaml_loads() -> None:
    assert parse_config((ROOT / "router.yaml").read_text(), {}, ROOT).defaults.embed == "all-minilm-l6-v2"


def test_every_error_is_documented_with_its_status() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\w+) \| (\d+) \| .+? \| (\d+) \| (\w+) \| (\d+) \|", _doc("errors"), re.MULTILINE
    )
    documented = {
        (kind, source, int(status), int(tei_status), tei_type, int(infinity_status))
        for kind, source, status, tei_status, tei_type, infinity_status in rows
    }

    assert {
        (kind, facts.source, facts.status, facts.tei_status, facts.tei_type, facts.infinity_status)
        for kind, facts in FACTS.items()
    } == documented


def test_the_engines_metrics_are_documented() -> None:
    rows = re.findall(r"^\| (`te_.+?) \|", _doc("metrics"), re.MULTILINE)

    assert {"te_queue_size", *COUNTERS, *BOUNDS} == set(re.findall(r"`(\w+)`", "".join(rows)))


async def test_every_metric_is_documented() -> None:
    documented = set(re.findall(r"^\| `(gateway_\w+)` \| (\w+) \|", _doc("metrics"), re.MULTILINE))
    body, _ = await Metrics(is_open=True).render()
    families = text_string_to_metric_families(body.decode())
    exposed = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type)
        for family in families
        if family.name.startswith("gateway_")
    }

    assert exposed == documented


def test_every_config_key_is_documented() -> None:
    documented = set(
        re.findall(r"`([\w.<>]+)`", "".join(re.findall(r"^\| (`.+?) \|", _configuration(), re.MULTILINE)))
    )

    assert set(_keys(Config, "")) == documented


def _keys(section: type[msgspec.Struct], path: str) -> list[str]:
    """Return the paths of all keys of a section, as the document writes them."""
    by_name = {"upstreams", "models", "tenants", "sign_on"}
    keys: list[str] = []
    for field in msgspec.structs.fields(section):
        place = f"{path}.{field.encode_name}" if path else field.encode_name
        inner = field.type
        if (field.name in by_name and not path) or place == "manager.commands":
            inner, place = inner.__args__[1], f"{place}.<name>"
        # The document lists the keys of an optional section, and the section itself if it may be a word.
        members = [member for member in get_args(inner) if member is not NoneType] or [inner]
        sections = [member for member in members if _is_section(member)]
        keys += [key for section in sections for key in _keys(section, place)]
        if not sections or len(members) > 1:
            keys.append(place)
    return keys


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _doc(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def _configuration() -> str:
    """Return the pages on keys of router.yaml."""
    return "".join(page.read_text() for page in sorted((ROOT / "docs").glob("configuration*.md")))


def _architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text()


def _without_blocks(text: str) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as repository browsers and the site make them."""
    headings = re.findall(r"^#+ (.+)$", _without_blocks(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_dashboards_and_alerts_use_documented_metrics() -> None:
    documented = set(re.findall(r"`((?:gateway|te)_\w+)`", _doc("metrics")))
    boards = [json.loads(path.read_text()) for path in (OBSERVABILITY / "grafana/dashboards").glob("*.json")]
    queries = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for board in boards for variable in board["templating"]["list"]]
    rules = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    metrics = {name for query in queries for name in re.findall(r"\b(?:gateway|te)_\w+", query)}

    assert 11 == len(boards)
    assert metrics
    assert set() == {
        name for name in metrics if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & documented
    }


def test_every_cell_of_the_translation_tables_names_an_existing_test() -> None:
    text = _doc("translation")
    references = _test_references(text)
    rows = re.findall(r"^\| (?!\|)(.+) \|$", text, re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")[1:] if not row.startswith("| tei")]

    assert len(cells) > 100
    assert [] == [cell for cell in cells if not re.search(r"\[\d+\]", cell)]
    assert set(references) == {number for cell in cells for number in re.findall(r"\[(\d+)\]", cell)}
    _assert_tests_exist(references)


def test_rows_of_the_failure_modes_name_existing_tests() -> None:
    pages = {name: _doc(name) for name in ("failures", "failures-gateway")}
    references = {name: _test_references(text) for name, text in pages.items()}

    assert sum(map(len, references.values())) > 40
    for name, text in pages.items():
        rows = re.findall(r"^\|.+\|$", text, re.MULTILINE)
        assert set(references[name]) == {
            number for row in rows for number in re.findall(r"\[(\d+)\] \|$", row)
        }
        _assert_tests_exist(references[name])


def _test_references(text: str) -> dict[str, tuple[str, str]]:
    """Return file and test name of each numbered reference at the end of a document."""
    found = re.findall(r'^\[(\d+)\]: \.\./(tests/[\w/]+\.py) "(\w+)"$', text, re.MULTILINE)
    return {number: (path, name) for number, path, name in found}


def _assert_tests_exist(references: dict[str, tuple[str, str]]) -> None:
    for path, name in references.values():
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


# Idioms of earlier documents. Documents use the field's terms, in plain sentences.
RETIRED_IDIOMS = re.compile(
    r"\b(anew|beside|besides|whoever|whomever|nobody|somebody|told|tells|of late|by itself alone|"
    r"is gone|are gone|goes by|go by|stands in|so as not|must not fear)\b"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_use_no_retired_idiom(document: Path) -> None:
    prose = re.sub(r"`[^`]+`|\"[^\"]+\"", "", _without_blocks(document.read_text()))

    assert [] == RETIRED_IDIOMS.findall(prose)
