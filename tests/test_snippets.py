"""Tests that snippets of the documents work, and that the names in them exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml

from backends.contract import BackendKind
from gateway.cli.main import full_parser
from gateway.config.load import parse_config
from gateway.config.schema import Config, Section, UpstreamSettings
from gateway.errors import FACTS
from tests.conftest import Boots
from tests.fakes.additions import ReadingParent
from tests.fakes.tei import FakeTei

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    # Lines of docstrings, which have checks of their own.
    if path.name != "MODULES.md"
]
# Languages of blocks. text: anything that cannot be run here, for example commands for a cluster.
LANGUAGES = {"console", "json", "python", "text", "yaml", "yaml litellm"}
# Completes a part of a configuration that has no upstream.
UPSTREAM = "\nupstreams: {only: {backend: tei, replicas: ['http://tei']}}\n"
# Commands that are not the gateway's, and words of the shell.
OTHER_COMMANDS = {"KEY=<the", "curl", "docker"}


class Block(msgspec.Struct, frozen=True):
    """Fenced block of a document."""

    document: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Return every block of these languages, in every document."""
    return [
        Block(document, language, text)
        for document in DOCUMENTS
        for language, text in re.findall(
            r"^```(\S[^\n]*)\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE
        )
        if not languages or language in languages
    ]


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command after a prompt with its document; continued lines are joined."""
    for block in blocks("console"):
        text = block.text.replace("\\\n", " ")
        yield from ((block.document, line[2:]) for line in text.splitlines() if line.startswith("$ "))


def inline(name: str) -> set[str]:
    """Return the commands of this name in running text, without patterns of commands."""
    found = {
        command
        for document in DOCUMENTS
        for command in re.findall(rf"`(?:\.venv/bin/)?({name} [^`]+)`", (ROOT / document).read_text())
    }
    return {command for command in found if not re.search(r"[|…\[]", command)}


def filled(text: str) -> Config:
    """Return the configuration with all variables set, completed if it is only a part."""
    sections = yaml.safe_load(text)
    if "upstreams" not in sections:
        text += UPSTREAM
    if "models" not in sections:
        text += f"\nmodels: {{some: {{upstream: {next(iter(sections.get('upstreams', {'only': None})))}}}}}\n"
    names = re.findall(r"\$\{(?:url:)?(\w+)\}", text)
    return parse_config(text, dict.fromkeys(names, "0" * 64), ROOT)


def test_every_block_names_its_language() -> None:
    assert LANGUAGES >= {block.language for block in blocks()}
    for document in DOCUMENTS:
        assert 0 == (ROOT / document).read_text().count("```") % 2


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.document)
def test_every_configuration_loads(block: Block) -> None:
    assert filled(block.text).models


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.document)
def test_every_program_compiles(block: Block) -> None:
    compile(block.text, block.document, "exec")


def test_every_command_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = [_without_path(shlex.split(command)) for _, command in commands()]

    assert {"make", "gateway", "docker", "curl"} <= {words[0] for words in shown}
    for words in shown:
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "gateway":
            full_parser().parse_args(words[1:])
        else:
            assert words[0] in OTHER_COMMANDS
    for command in inline("make"):
        assert command.split()[1] in targets
    for command in inline("gateway"):
        _assert_command_exists(shlex.split(command)[1:])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_a_pod_exist(document: str) -> None:
    text = (ROOT / document).read_text().replace("\\\n", " ")
    for found in re.findall(r"-- +(gateway .+)$", text, re.MULTILINE):
        full_parser().parse_args(shlex.split(found)[1:])


def test_compose_has_the_documented_profiles() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    existing = {profile for service in services for profile in service.get("profiles", [])}
    named = {
        found
        for document in DOCUMENTS
        for found in re.findall(r"--profile (\w+)", (ROOT / document).read_text())
    }

    assert named
    assert named <= existing


async def test_every_curl_command_succeeds(boot: Boots) -> None:
    config = """
upstreams:
  minilm: {backend: tei, replicas: ["http://tei-0"]}
  e5: {backend: tei, replicas: ["http://tei-0:8080", "http://tei-1:8080"]}
models: {all-minilm-l6-v2: {upstream: minilm}}
"""
    curls = [command for _, command in commands() if command.startswith("curl ")]

    assert curls
    parent = ReadingParent(parse_config(config, {}, ROOT))
    servers = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    async with boot(servers, config, adding=parent.adding) as gateway:
        for words in map(shlex.split, curls):
            headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
            assert "Bearer $KEY" == headers.pop("Authorization")
            body = words[words.index("-d") + 1]
            path = urlsplit(words[1]).path
            method = words[words.index("-X") + 1] if "-X" in words else "POST"
            reply = await gateway.client.request(method, path, content=body, headers=headers)
            assert 200 == reply.status_code, words


@pytest.mark.parametrize("document", [*DOCUMENTS, "changes/README.md", "loadtest/README.md"])
def test_every_link_has_a_target(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.is_file(), link
        if anchor:
            assert anchor in set(_anchors(target)), link


def test_the_index_lists_every_document() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs/index.md").read_text()))
    pages = {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")}
    documents = {name for name in pages if not name.startswith("decisions/")} - {"index.md"}

    assert documents <= linked, documents - linked


async def test_the_table_of_endpoints_lists_every_route(boot: Boots) -> None:
    endpoints = (ROOT / "docs/endpoints.md").read_text()
    table = endpoints.partition("| Dialect | Endpoints |")[2].partition("\n\n")[0]
    listed = {_any_name(path) for path in re.findall(r"/[\w/{}.:-]*", table)}
    async with boot({}, wait=False) as gateway:
        document = (await gateway.client.get("/docs/openapi.json")).json()

    # The files below /ui are parts of its page, not endpoints.
    served = {_any_name(path) for path in document["paths"] if not path.startswith(("/models/", "/ui/"))}
    assert served
    assert served <= listed


def test_documented_defaults_are_those_of_the_schema() -> None:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("configuration*.md")))
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", pages, re.MULTILINE)
    documented = {
        key: default.strip("`") for keys, default in rows for key in re.findall(r"`([\w.<>]+)`", keys)
    }
    fixed = {key: default for key, default in _defaults(Config, "") if default is not None}

    assert len(fixed) > 20
    assert fixed == {key: documented[key] for key in fixed}


def test_the_configuration_of_litellm_equals_ours() -> None:
    [theirs] = blocks("yaml litellm")
    ours = filled(next(block.text for block in blocks("yaml") if block.document == theirs.document))
    settings = yaml.safe_load(theirs.text)
    names = {entry["model_name"] for entry in settings["model_list"]}

    assert names == set(ours.models)
    for name in names:
        entries = [entry["litellm_params"] for entry in settings["model_list"] if entry["model_name"] == name]
        _assert_equal(entries, ours.upstreams[ours.models[name].upstream])
    assert settings["router_settings"]["redis_host"] in ours.quotas.store
    assert "least_tokens" == ours.upstreams["bge-m3"].policy


def _assert_equal(entries: list[dict[str, str]], upstream: UpstreamSettings) -> None:
    """Assert that LiteLLM's deployments of a model are the replicas of the upstream."""
    kinds: dict[str, BackendKind] = {"openai": "openai", "huggingface": "tei", "hosted_vllm": "vllm"}
    for entry in entries:
        kind, _, model = entry["model"].partition("/")
        assert kinds[kind] == upstream.backend
        assert upstream.model in {model, None}
    assert [entry["api_base"] for entry in entries] == list(upstream.replicas)
    assert any("api_key" in entry for entry in entries) is bool(upstream.api_key)


def test_load_tests_that_documents_name_exist() -> None:
    pages = [ROOT / document for document in DOCUMENTS] + sorted((ROOT / "loadtest").rglob("*.md"))
    for page in pages:
        for module in re.findall(r"`(?:(?:\.venv/bin/)?python -m )?loadtest\.(\w+)", page.read_text()):
            assert (ROOT / "loadtest" / f"{module}.py").is_file(), (page, module)


def test_documented_log_lines_are_in_the_code() -> None:
    section = (ROOT / "docs/log-lines.md").read_text().partition("## What the log says")[2]
    table = "".join(re.findall(r"^\|.+\|$", section, re.MULTILINE))
    source = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    quoted = re.findall(r'"([^"]+)"', table)

    assert len(quoted) > 8
    for line in quoted:
        # Names in capitals, reasons and subjects are filled in when the line is logged.
        pieces = re.split(r"\b[A-Z]+\b|\(…\)|…|^(?:worker|engine|upstream)\b", line)
        assert all(piece.strip(" :") in source for piece in pieces), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_metrics_in_documents_are_documented(document: str) -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text())) | set(FACTS)

    assert set(re.findall(r"`(gateway_\w+)", (ROOT / document).read_text())) <= documented


def _defaults(section: type[Section], path: str) -> Iterator[tuple[str, str | None]]:
    """Yield every key with its default as documents write it, or None if there is no single value."""
    for field in msgspec.structs.fields(section):
        place, kinds = f"{path}{field.name}", [field.type, *get_args(field.type)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner is None:
            yield place, _written(field.default)
        else:
            # The members of a mapping are below a name that the operator chooses.
            below = f"{place}.<name>." if get_origin(field.type) is dict else f"{place}."
            yield from _defaults(inner, below)


def _written(default: object) -> str | None:
    match default:
        case bool():
            return str(default).lower()
        case int() | float():
            return f"{default:.15g}"
        case str():
            return default or None
    return None


def _assert_command_exists(words: list[str]) -> None:
    """Assert that the command line accepts the words, or has help for them if arguments are missing."""
    try:
        full_parser().parse_args(words)
    except SystemExit:
        with pytest.raises(SystemExit) as ended:
            full_parser().parse_args([*words, "--help"])
        assert not ended.value.code, words


def _any_name(path: str) -> str:
    """Return a route without the names of its parameters."""
    return re.sub(r"\{\w+\}", "{}", path)


def _without_path(words: list[str]) -> list[str]:
    """Return a command without the path of the environment."""
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def _anchors(path: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
