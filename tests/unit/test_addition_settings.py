"""Additions are checked more strictly than router.yaml, and never keep it from being served."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.audit.records import AuditRecord
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, UpstreamSettings
from gateway.declared.additions import WRITTEN_BYTES_MAX, Additions, Part, Put, Remove, UnknownAddition
from gateway.declared.composition import compose, listing_of
from gateway.declared.settings import HIDDEN, SecretSources, read_model, read_upstream, redact
from gateway.declared.store import AdditionsInMemory

FILE = 'upstreams: {one: {backend: tei, replicas: ["http://a"]}}\nmodels: {bge: {upstream: one}}\n'
TEI = {"backend": "tei", "replicas": ["http://b"]}
TORCH = {"backend": "torch", "model": "org/model"}
SECRET = "a-secret-written-out"


def file(text: str = FILE) -> Config:
    return parse_config(text, {}, Path("/nowhere"))


@pytest.fixture
def sources(tmp_path: Path) -> SecretSources:
    """Create a folder with a secret, as Kubernetes mounts one, and a private file next to it."""
    (tmp_path / "private").write_text("private")
    folder = tmp_path / "files"
    (folder / "..data").mkdir(parents=True)
    (folder / "..data" / "token").write_text("of-a-file\n")
    (folder / "token").symlink_to("..data/token")
    (folder / "stray").symlink_to(tmp_path / "private")
    (folder / "two-lines").write_text("a\nb\n")
    (folder / "empty").write_text("\n")
    (folder / "checkpoint").mkdir()
    (tmp_path / "outside" / "m").mkdir(parents=True)
    (folder / "out").symlink_to("../outside")
    (folder / "inside").symlink_to("checkpoint")
    return SecretSources(
        {"UPSTREAM_KEY": "of-the-environment", "HOME": "/home", "UPSTREAM_EMPTY": ""}, folder
    )


def problems(settings: Any, sources: SecretSources, name: str = "x") -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        read_upstream(name, settings, sources)
    assert SECRET not in str(refused.value)
    return {problem.path.removeprefix("upstreams.x."): problem.message for problem in refused.value.problems}


def test_fills_references_from_allowed_sources(sources: SecretSources) -> None:
    headers = {"authorization": "Bearer ${file:token}", "x-key": "${UPSTREAM_KEY}"}
    found = read_upstream("x", {**TEI, "api_key": "${file:./token}", "headers": headers}, sources)

    assert "of-a-file" == found.api_key
    assert {"authorization": "Bearer of-a-file", "x-key": "of-the-environment"} == found.headers


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_a_line_end_belongs_to_no_secret(sources: SecretSources, end: str) -> None:
    environment = {**sources.environment, "UPSTREAM_KEY": f"of-the-environment{end}"}
    sources = msgspec.structs.replace(sources, environment=environment)
    assert sources.files is not None
    (sources.files / "token").write_bytes(f"of-a-file{end}".encode())
    headers = {"x-key": "${UPSTREAM_KEY}"}
    found = read_upstream("x", {**TEI, "api_key": "${file:token}", "headers": headers}, sources)

    assert ("of-a-file", {"x-key": "of-the-environment"}) == (found.api_key, found.headers)


@pytest.mark.parametrize("name", ["out", "out/m", "./out", "out/none"])
def test_a_link_does_not_lead_out_of_the_folder_even_if_it_looks_like_a_hub_id(
    sources: SecretSources, name: str
) -> None:
    assert {"model": "leads out of `admin.files`"} == problems({**TORCH, "model": name}, sources)
    assert {"tokenizer": "leads out of `admin.files`"} == problems({**TEI, "tokenizer": name}, sources)


def test_a_link_within_the_folder_names_a_checkpoint(sources: SecretSources) -> None:
    assert sources.files is not None
    upstream = read_upstream("x", {**TORCH, "model": "inside", "tokenizer": "org/hub-id"}, sources)

    assert str(sources.files / "checkpoint") == upstream.model
    assert "org/hub-id" == upstream.tokenizer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SECRET, "not written out"),
        (f"${{UPSTREAM_KEY:-{SECRET}}}", "not written out"),
        (f"{SECRET}-${{UPSTREAM_KEY}}", "not written out"),
        ("${HOME}", "not written out"),
        ("${UPSTREAM_KEY}${UPSTREAM_KEY}", "not written out"),
        ("${UPSTREAM_NONE}", "no UPSTREAM_NONE"),
        ("${UPSTREAM_EMPTY}", "no UPSTREAM_EMPTY"),
        ("${file:../private}", "leads out"),
        ("${file:/etc/passwd}", "leads out"),
        ("${file:stray}", "leads out"),
        ("${file:none}", "cannot be read"),
        ("${file:checkpoint}", "cannot be read"),
        ("${file:two-lines}", "cannot be sent in a header"),
        ("${file:empty}", "empty"),
    ],
)
def test_rejects_other_secrets_and_plain_secrets(sources: SecretSources, value: str, expected: str) -> None:
    assert expected in problems({**TEI, "api_key": value}, sources)["api_key"]


def test_redacts_secrets_written_directly_to_the_store() -> None:
    written = {
        "replicas": [f"http://user:{SECRET}@host:1", f"http://host?key={SECRET}", "http://plain:1"],
        "api_key": SECRET,
        "headers": {"x": SECRET, "y": "${UPSTREAM_KEY}"},
    }
    assert {
        "replicas": [HIDDEN, HIDDEN, "http://plain:1"],
        "api_key": HIDDEN,
        "headers": {"x": HIDDEN, "y": "${UPSTREAM_KEY}"},
    } == redact(written)


def test_a_former_key_names_the_current_one(sources: SecretSources) -> None:
    found = problems({**TEI, "batch_tokens": 9}, sources)

    assert {"batch_tokens": "`batch_tokens` is now `request_tokens`"} == found


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding"])
def test_rejects_framing_headers(sources: SecretSources, name: str) -> None:
    settings = {**TEI, "headers": {name: "${UPSTREAM_KEY}"}}
    assert {f"headers.{name}": "cannot be set in a config"} == problems(settings, sources)


def test_reads_no_file_without_a_folder(sources: SecretSources) -> None:
    none = SecretSources(sources.environment, None)

    assert "`admin.files`" in problems({**TEI, "api_key": "${file:token}"}, none)["api_key"]
    assert "`admin.files`" in problems({**TORCH, "model": "/models/bge"}, none)["model"]
    assert "`admin.files`" in problems({**TEI, "tls": {"ca": "ca.pem"}}, none)["tls.ca"]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({**TEI, "no_such_key": 1}, "no_such_key"),
        ({**TEI, "policy": "fastest"}, "policy"),
        ({"replicas": ["http://b"]}, "backend"),
        ({"backend": "tei"}, "replicas"),
        ({**TEI, "headers": {"x-plain": "blue"}}, "headers.x-plain"),
        ({**TEI, "headers": {"x\r\ny": "${UPSTREAM_KEY}"}}, "headers"),
        ({**TEI, "replicas": ["http://user:secret@b"]}, "replicas[0]"),
        ({**TEI, "replicas": ["http://b c"]}, "replicas[0]"),
        ({**TEI, "replicas": ["http://b/%zz"]}, "replicas[0]"),
        ({**TEI, "replicas": [f"http://{'b' * 64}"]}, "replicas[0]"),
        ({**TEI, "replicas": ["http://[::1"]}, "replicas[0]"),
        ({**TEI, "replicas": ["http://b:99999"]}, "replicas[0]"),
        ({**TEI, "tls": {"ca": "../private"}}, "tls.ca"),
        ({**TEI, "tls": {"ca": "token"}}, "tls.ca"),
        ({**TEI, "tls": {"certificate": "token"}}, "tls"),
        ({**TEI, "tokenizer": "../private"}, "tokenizer"),
        ({**TEI, "tokenizer": "a/../../private"}, "tokenizer"),
        ({**TEI, "token_encoding": "~root"}, "token_encoding"),
        ({**TEI, "model": "${UPSTREAM_KEY}"}, "model"),
        ({**TEI, "model": "a\0b"}, "model"),
        ({**TEI, "prompts": {"query": "${HOME}"}}, "prompts.query"),
        ({**TORCH, "model": "org/.model"}, "model"),
        ({**TORCH, "model": "./none"}, "model"),
        ({**TORCH, "model": "/etc"}, "model"),
        ({**TORCH, "revision": "../main"}, "revision"),
        ({**TORCH, "trust_remote_code": True}, "trust_remote_code"),
        ({**TORCH, "code_revision": "0" * 40}, "code_revision"),
        ({**TORCH, "rerank_template": {"prompt": "{query}"}}, "rerank_template"),
        ({**TORCH, "rerank_template": {"prompt": "${HOME}{query}{document}"}}, "rerank_template.prompt"),
    ],
)
def test_reports_problems_by_path(sources: SecretSources, settings: dict[str, Any], path: str) -> None:
    assert path in problems(settings, sources)


@pytest.mark.parametrize(
    "settings", [None, [], "text", {**TORCH, "model": "./\0"}, {**TEI, "tls": {"ca": "./" + "x" * 5000}}]
)
def test_reports_values_that_cannot_be_converted(sources: SecretSources, settings: Any) -> None:
    assert problems(settings, sources)


@pytest.mark.parametrize("name", ["", " x", "a\nb", "a//b", "../x", "x" * 513])
def test_rejects_unusable_names(sources: SecretSources, name: str) -> None:
    for read in (
        lambda: read_upstream(name, TEI, sources),
        lambda: read_model(name, {"upstream": "x"}, {"x": UpstreamSettings(backend="tei")}),
    ):
        with pytest.raises(ConfigError):
            read()


@pytest.mark.parametrize(
    "url",
    [
        "http://b",
        "https://b.example.org:8443/v1",
        "http://[::1]:80",
        "http://10.0.0.1:8080/",
        "http://tei_0",
        "grpc://tei-0:8080",
        "grpcs://[::1]:443",
    ],
)
def test_accepts_usable_addresses(sources: SecretSources, url: str) -> None:
    assert (url,) == read_upstream("x", {**TEI, "replicas": [url]}, sources).replicas


def test_accepts_a_query_string_and_a_header_for_the_key(sources: SecretSources) -> None:
    url = "https://x.example.org/openai/deployments/e?api-version=2024-10-21"
    key = {"api_key": "${UPSTREAM_KEY}", "api_key_header": "api-key"}
    found = read_upstream("x", {"backend": "openai", "replicas": [url], **key}, sources)

    assert ((url,), "of-the-environment") == (found.replicas, found.api_key)
    secret = {"backend": "openai", "replicas": [f"http://b?key={SECRET}"]}
    assert {"replicas[0]"} == problems(secret, sources).keys()


def test_resolves_paths_in_the_folder(sources: SecretSources) -> None:
    assert sources.files is not None
    found = read_upstream("x", {**TORCH, "model": "./checkpoint"}, sources)

    assert str((sources.files / "checkpoint").resolve()) == found.model


def test_file_takes_precedence_and_dependents_are_rejected() -> None:
    additions = Additions(
        {"one": TEI, "two": TEI, "broken": {**TEI, "api_key": SECRET}, "odd": 5},
        {"bge": {"upstream": "two"}, "more": {"upstream": "two"}, "lost": {"upstream": "broken"}},
    )
    found = compose(file(), additions, {}, {})
    listing = listing_of(additions, found.rejected)

    assert ({"one", "two"}, {"bge", "more"}) == (found.config.upstreams.keys(), found.config.models.keys())
    assert ("http://a",) == found.config.upstreams["one"].replicas
    assert "one" == found.config.models["bge"].upstream
    reasons = {entry.name: entry.problem or "" for entry in (*listing.upstreams, *listing.models)}
    assert ["", ""] == [reasons["two"], reasons["more"]]
    assert all("the file wins" in reasons[name] for name in ("one", "bge"))
    assert "there is no upstream 'broken'" in reasons["lost"]
    assert SECRET.encode() not in msgspec.json.encode(listing)


@pytest.mark.parametrize(("any_name", "expected"), [("true", {"bge"}), ("false", {"bge", "more"})])
def test_an_addition_takes_no_name_of_a_model_that_has_all_names(any_name: str, expected: set[str]) -> None:
    text = f"{FILE}defaults: {{any_name: {any_name}}}\n"
    additions = Additions({}, {"more": {"upstream": "one"}})
    found = compose(file(text), additions, {}, {})

    assert expected == found.config.models.keys()
    problem = listing_of(additions, found.rejected).models[0].problem
    assert ("more" in expected) is (problem is None)
    assert problem is None or "`defaults.any_name`" in problem


def test_added_engines_run_in_their_own_process(sources: SecretSources) -> None:
    text = FILE.replace("models:", "  #\nmodels:").replace(
        "{one:", "{mine: {backend: torch, model: a/b}, one:"
    )
    additions = Additions({"two": TORCH, "three": {**TORCH, "process": "apart"}, "four": TEI})
    found = compose(file(text), additions, {}, {})
    later = compose(file(text), additions, {}, {}, with_engines=False)
    failed = compose(file(text), additions, {}, {"two": "no such model"})

    processes = [found.config.upstreams[name].process for name in ("mine", "two", "three", "four")]
    assert ["engine", "engine (added)", "apart (added)", "engine"] == processes
    assert {("upstreams", "two"), ("upstreams", "three")} == later.rejected.keys()
    assert {("upstreams", "two")} == failed.rejected.keys()


def test_replaces_and_removes_entries_by_name() -> None:
    additions = Put("upstreams", "two", TEI).apply(file(), Additions())
    additions = Put("models", "more", {"upstream": "two"}).apply(file(), additions)
    additions = Put("models", "more", {"upstream": "one"}).apply(file(), additions)
    assert {"more": {"upstream": "one"}} == additions.models
    additions = Remove("upstreams", "two").apply(file(), additions)
    additions = Remove("models", "more").apply(file(), additions)
    assert Additions() == additions


@pytest.mark.parametrize("part", ["upstreams", "models"])
def test_rejects_edits_of_entries_in_the_file(part: Part) -> None:
    name = "one" if part == "upstreams" else "bge"
    for edit in (Put(part, name, {}), Remove(part, name)):
        with pytest.raises(ConfigError, match=f"{part}.{name}: router.yaml defines it"):
            edit.apply(file(), Additions())
    # An addition made before the file defined the name can be removed.
    additions = Additions({"one": TEI}, {"bge": {"upstream": "two"}})
    assert additions != Remove(part, name).apply(file(), additions)


def test_keeps_upstreams_in_use_and_reports_unknown_entries() -> None:
    additions = Additions({"two": TEI}, {"more": {"upstream": "two"}, "other": {"upstream": "one"}, "odd": 5})
    with pytest.raises(ConfigError, match="models, which go first: more"):
        Remove("upstreams", "two").apply(file(), additions)
    with pytest.raises(UnknownAddition):
        Remove("models", "none").apply(file(), additions)


def test_bounds_the_size_of_additions() -> None:
    with pytest.raises(ConfigError, match="more than"):
        Put("upstreams", "two", {"model": "x" * WRITTEN_BYTES_MAX}).apply(file(), Additions())


async def test_rejects_a_replacement_of_an_old_version() -> None:
    recorded: list[AuditRecord] = []

    async def record(change: AuditRecord) -> None:
        recorded.append(change)

    store = AdditionsInMemory(record)
    first = await store.replace("", Additions({"two": TEI}), ())

    assert first is not None
    assert await store.replace("", Additions(), ()) is None
    assert first == await store.load()
    assert first.version == await store.version()


def test_added_upstream_equals_one_in_the_file(sources: SecretSources) -> None:
    text = FILE.replace("{one:", '{x: {backend: tei, replicas: ["http://b"], queue_tokens: "9"}, one:')

    assert file(text).upstreams["x"] == read_upstream("x", {**TEI, "queue_tokens": "9"}, sources)
    assert isinstance(read_upstream("x", TEI, sources), UpstreamSettings)
