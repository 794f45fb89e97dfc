"""What the documents show can be pasted, and what they name is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml

from backends.registry import BackendKind
from gateway.cli.main import _parser
from gateway.config.load import parse_config
from gateway.config.schema import Config, Section, UpstreamSettings
from gateway.errors import FACTS
from tests.conftest import Boots
from tests.fakes.additions import ReadingParent
from tests.fakes.tei import FakeTei

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
# What may be shown. text: what cannot be run here, such as what needs a cluster.
LANGUAGES = {"console", "json", "python", "text", "yaml", "yaml litellm"}
# What is added to a part of a config that has none.
UPSTREAM = "\nupstreams: {one: {backend: tei, replicas: ['http://tei']}}\n"
# Other people's commands, and words of the shell.
FOREIGN = {"KEY=<the", "curl", "docker"}


class Block(msgspec.Struct, frozen=True):
    """One fenced block."""

    document: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Every block of these languages, in every document."""
    return [
        Block(document, language, text)
        for document in DOCUMENTS
        for language, text in re.findall(
            r"^```(\S[^\n]*)\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE
        )
        if not languages or language in languages
    ]


def commands() -> Iterator[tuple[str, str]]:
    """Each command that is shown after a prompt, whole, and where."""
    for block in blocks("console"):
        text = block.text.replace("\\\n", " ")
        yield from ((block.document, line[2:]) for line in text.splitlines() if line.startswith("$ "))


def inline(name: str) -> set[str]:
    """Commands of this name in running text, without those that stand for several."""
    found = {
        one
        for document in DOCUMENTS
        for one in re.findall(rf"`(?:\.venv/bin/)?({name} [^`]+)`", (ROOT / document).read_text())
    }
    return {one for one in found if not re.search(r"[|…\[]", one)}


def filled(text: str) -> Config:
    """A config with something for each variable that it names; one that shows a part is made whole."""
    told = yaml.safe_load(text)
    if "upstreams" not in told:
        text += UPSTREAM
    if "models" not in told:
        text += f"\nmodels: {{some: {{upstream: {next(iter(told.get('upstreams', {'one': None})))}}}}}\n"
    names = re.findall(r"\$\{(\w+)\}", text)
    return parse_config(text, dict.fromkeys(names, "0" * 64), ROOT)


def test_every_block_says_what_it_is() -> None:
    assert LANGUAGES >= {block.language for block in blocks()}
    for document in DOCUMENTS:
        assert 0 == (ROOT / document).read_text().count("```") % 2


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.document)
def test_every_config_loads(block: Block) -> None:
    assert filled(block.text).models


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.document)
def test_every_program_is_python(block: Block) -> None:
    compile(block.text, block.document, "exec")


def test_every_command_is_one_that_there_is() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = [_without_path(shlex.split(one)) for _, one in commands()]

    assert {"make", "gateway", "docker", "curl"} <= {words[0] for words in shown}
    for words in shown:
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "gateway":
            _parser().parse_args(words[1:])
        else:
            assert words[0] in FOREIGN
    for one in inline("make"):
        assert one.split()[1] in targets
    for one in inline("gateway"):
        _is_spoken_of(shlex.split(one)[1:])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_a_pod_are_ones_that_there_are(document: str) -> None:
    text = (ROOT / document).read_text().replace("\\\n", " ")
    for found in re.findall(r"-- +(gateway .+)$", text, re.MULTILINE):
        _parser().parse_args(shlex.split(found)[1:])


def test_compose_has_the_profiles_that_are_named() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    there = {profile for service in services for profile in service.get("profiles", [])}
    named = {
        found
        for document in DOCUMENTS
        for found in re.findall(r"--profile (\w+)", (ROOT / document).read_text())
    }

    assert named
    assert named <= there


async def test_every_curl_is_answered(boot: Boots) -> None:
    config = """
upstreams: {minilm: {backend: tei, replicas: ["http://tei-0"]}}
models: {all-minilm-l6-v2: {upstream: minilm}}
"""
    calls = [one for _, one in commands() if one.startswith("curl ")]

    assert calls
    parent = ReadingParent(parse_config(config, {}, ROOT))
    async with boot({"tei-0": FakeTei()}, config, adding=parent.adding) as gateway:
        for words in map(shlex.split, calls):
            headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
            assert "Bearer $KEY" == headers.pop("Authorization")
            body = words[words.index("-d") + 1]
            path = urlsplit(words[1]).path
            method = words[words.index("-X") + 1] if "-X" in words else "POST"
            reply = await gateway.client.request(method, path, content=body, headers=headers)
            assert 200 == reply.status_code, words


@pytest.mark.parametrize("document", [*DOCUMENTS, "ARCHITECTURE.md", "loadtest/README.md"])
def test_every_link_leads_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.is_file(), link
        if anchor:
            assert anchor in set(_anchors(target)), link


def test_the_readme_lists_every_document() -> None:
    listed = set(
        re.findall(r"^\| \[(docs/[\w-]+\.md)\]\(\1\) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    )

    assert set(DOCUMENTS) - {"README.md"} == listed


async def test_the_readme_lists_every_route(boot: Boots) -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("| Dialect | Endpoints |")[2].partition("\n\n")[0]
    listed = {_any_name(one) for one in re.findall(r"/[\w/{}]*", table)}
    async with boot({}, wait=False) as gateway:
        document = (await gateway.client.get("/docs/openapi.json")).json()

    # What the page at /ui is made of is nobody's to call.
    served = {_any_name(path) for path in document["paths"] if not path.startswith(("/models/", "/ui/"))}
    assert served
    assert served <= listed


def test_the_defaults_of_keys_are_those_that_are_documented() -> None:
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    told = {key: default.strip("`") for keys, default in rows for key in re.findall(r"`([\w.<>]+)`", keys)}
    fixed = {key: default for key, default in _defaults(Config, "") if default is not None}

    assert len(fixed) > 20
    assert fixed == {key: told[key] for key in fixed}


def test_the_config_of_litellm_is_the_one_beside_it() -> None:
    [theirs] = blocks("yaml litellm")
    ours = filled(next(block.text for block in blocks("yaml") if block.document == theirs.document))
    told = yaml.safe_load(theirs.text)
    names = {entry["model_name"] for entry in told["model_list"]}

    assert names == set(ours.models)
    for name in names:
        entries = [one["litellm_params"] for one in told["model_list"] if one["model_name"] == name]
        _assert_equal(entries, ours.upstreams[ours.models[name].upstream])
    assert told["router_settings"]["redis_host"] in ours.quotas.store
    assert "least_tokens" == ours.upstreams["bge-m3"].policy


def _assert_equal(entries: list[dict[str, str]], upstream: UpstreamSettings) -> None:
    """One model's deployments there are one upstream's replicas here."""
    kinds: dict[str, BackendKind] = {"openai": "openai", "huggingface": "tei", "hosted_vllm": "vllm"}
    for entry in entries:
        kind, _, model = entry["model"].partition("/")
        assert kinds[kind] == upstream.backend
        assert upstream.model in {model, None}
    assert [entry["api_base"] for entry in entries] == list(upstream.replicas)
    assert any("api_key" in entry for entry in entries) is bool(upstream.api_key)


def test_tests_that_failure_modes_name_are_there() -> None:
    text = (ROOT / "docs/failures.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }

    assert len(named) > 15
    assert named <= there
    assert all((ROOT / one).is_file() for one in re.findall(r"`(tests/[\w/]+\.py)`", text))
    for module in re.findall(r"`loadtest\.(\w+)", text):
        assert (ROOT / "loadtest" / f"{module}.py").is_file()


def test_lines_of_the_log_that_failure_modes_name_are_written_somewhere() -> None:
    table = (ROOT / "docs/failures.md").read_text().partition("## What the log says")[2]
    written = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    quoted = re.findall(r'"([^"]+)"', table)

    assert len(quoted) > 8
    for line in quoted:
        # Between what is told of whom: names in capitals, and what stands for a reason.
        pieces = re.split(r"\b[A-Z]+\b|\(…\)|…|^(?:worker|engine|upstream)\b", line)
        assert all(piece.strip(" :") in written for piece in pieces), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_metrics_that_documents_name_are_documented(document: str) -> None:
    known = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text())) | set(FACTS)

    assert set(re.findall(r"`(gateway_\w+)", (ROOT / document).read_text())) <= known


def _defaults(section: type[Section], path: str) -> Iterator[tuple[str, str | None]]:
    """Every key with its default as a document writes it; None where there is no one value."""
    for field in msgspec.structs.fields(section):
        place, kinds = f"{path}{field.name}", [field.type, *get_args(field.type)]
        inner = next((one for one in kinds if isinstance(one, type) and issubclass(one, Section)), None)
        if inner is None:
            yield place, _written(field.default)
        else:
            # Named ones stand below a name of the operator's.
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


def _is_spoken_of(words: list[str]) -> None:
    """A command as the command line takes it; or, where what it needs is left out, one that has help."""
    try:
        _parser().parse_args(words)
    except SystemExit:
        with pytest.raises(SystemExit) as ended:
            _parser().parse_args([*words, "--help"])
        assert not ended.value.code, words


def _any_name(path: str) -> str:
    """A route whatever its parameters are called."""
    return re.sub(r"\{\w+\}", "{}", path)


def _without_path(words: list[str]) -> list[str]:
    """Without where the environment is."""
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def _anchors(path: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
