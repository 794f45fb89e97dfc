"""What operators add is read more strictly than router.yaml, and never keeps that from being served."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.additions.composing import compose, listing_of
from gateway.additions.entries import (
    WRITTEN_BYTES_MAX,
    Additions,
    Part,
    Put,
    Remove,
    UnknownAddition,
    apply_edit,
)
from gateway.additions.reading import HIDDEN, SecretSources, read_model, read_upstream, redact
from gateway.additions.store import AdditionsInMemory
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config, UpstreamSettings

FILE = 'upstreams: {one: {backend: tei, replicas: ["http://a"]}}\nmodels: {bge: {upstream: one}}\n'
TEI = {"backend": "tei", "replicas": ["http://b"]}
TORCH = {"backend": "torch", "model": "org/model"}
SECRET = "a-secret-written-out"


def file(text: str = FILE) -> Config:
    return parse_config(text, {}, Path("/nowhere"))


@pytest.fixture
def outside(tmp_path: Path) -> SecretSources:
    """A folder with a secret, as Kubernetes mounts one, and one beside it that is nobody's business."""
    (tmp_path / "private").write_text("private")
    folder = tmp_path / "files"
    (folder / "..data").mkdir(parents=True)
    (folder / "..data" / "token").write_text("of-a-file\n")
    (folder / "token").symlink_to("..data/token")
    (folder / "stray").symlink_to(tmp_path / "private")
    (folder / "two-lines").write_text("a\nb\n")
    (folder / "empty").write_text("\n")
    (folder / "checkpoint").mkdir()
    return SecretSources(
        {"UPSTREAM_KEY": "of-the-environment", "HOME": "/home", "UPSTREAM_EMPTY": ""}, folder
    )


def problems(settings: Any, outside: SecretSources, name: str = "x") -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        read_upstream(name, settings, outside)
    assert SECRET not in str(refused.value)
    return {one.path.removeprefix("upstreams.x."): one.message for one in refused.value.problems}


def test_fills_references_from_allowed_sources(outside: SecretSources) -> None:
    headers = {"authorization": "Bearer ${file:token}", "x-key": "${UPSTREAM_KEY}"}
    found = read_upstream("x", {**TEI, "api_key": "${file:./token}", "headers": headers}, outside)

    assert "of-a-file" == found.api_key
    assert {"authorization": "Bearer of-a-file", "x-key": "of-the-environment"} == found.headers


@pytest.mark.parametrize(
    ("value", "told"),
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
        ("${file:two-lines}", "no header's value"),
        ("${file:empty}", "empty"),
    ],
)
def test_rejects_other_secrets_and_plain_secrets(outside: SecretSources, value: str, told: str) -> None:
    assert told in problems({**TEI, "api_key": value}, outside)["api_key"]


def test_redacts_secrets_written_directly_to_the_store() -> None:
    written = {
        "replicas": [f"http://user:{SECRET}@host:1", "http://plain:1"],
        "api_key": SECRET,
        "headers": {"x": SECRET, "y": "${UPSTREAM_KEY}"},
    }
    assert {
        "replicas": [HIDDEN, "http://plain:1"],
        "api_key": HIDDEN,
        "headers": {"x": HIDDEN, "y": "${UPSTREAM_KEY}"},
    } == redact(written)


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding"])
def test_rejects_framing_headers(outside: SecretSources, name: str) -> None:
    settings = {**TEI, "headers": {name: "${UPSTREAM_KEY}"}}
    assert {f"headers.{name}": "is not for a config to say"} == problems(settings, outside)


def test_reads_no_file_without_a_folder(outside: SecretSources) -> None:
    none = SecretSources(outside.environment, None)

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
        ({**TORCH, "model": "./none"}, "model"),
        ({**TORCH, "model": "/etc"}, "model"),
        ({**TORCH, "revision": "../main"}, "revision"),
        ({**TORCH, "trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_reports_problems_by_path(outside: SecretSources, settings: dict[str, Any], path: str) -> None:
    assert path in problems(settings, outside)


@pytest.mark.parametrize(
    "settings", [None, [], "text", {**TORCH, "model": "./\0"}, {**TEI, "tls": {"ca": "./" + "x" * 5000}}]
)
def test_reports_values_that_cannot_be_converted(outside: SecretSources, settings: Any) -> None:
    assert problems(settings, outside)


@pytest.mark.parametrize("name", ["", " x", "a\nb", "a//b", "../x", "x" * 513])
def test_rejects_unusable_names(outside: SecretSources, name: str) -> None:
    for read in (
        lambda: read_upstream(name, TEI, outside),
        lambda: read_model(name, {"upstream": "x"}, ["x"]),
    ):
        with pytest.raises(ConfigError):
            read()


@pytest.mark.parametrize(
    "url",
    ["http://b", "https://b.example.org:8443/v1", "http://[::1]:80", "http://10.0.0.1:8080/", "http://tei_0"],
)
def test_accepts_usable_addresses(outside: SecretSources, url: str) -> None:
    assert (url,) == read_upstream("x", {**TEI, "replicas": [url]}, outside).replicas


def test_resolves_paths_in_the_folder(outside: SecretSources) -> None:
    assert outside.files is not None
    found = read_upstream("x", {**TORCH, "model": "./checkpoint"}, outside)

    assert str((outside.files / "checkpoint").resolve()) == found.model


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
    told = {one.name: one.problem or "" for one in (*listing.upstreams, *listing.models)}
    assert ["", ""] == [told["two"], told["more"]]
    assert all("the file wins" in told[name] for name in ("one", "bge"))
    assert "there is no upstream 'broken'" in told["lost"]
    assert SECRET.encode() not in msgspec.json.encode(listing)


def test_added_engines_run_in_their_own_process(outside: SecretSources) -> None:
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
    standing = apply_edit(file(), Additions(), Put("upstreams", "two", TEI))
    standing = apply_edit(file(), standing, Put("models", "more", {"upstream": "two"}))
    standing = apply_edit(file(), standing, Put("models", "more", {"upstream": "one"}))
    assert {"more": {"upstream": "one"}} == standing.models
    standing = apply_edit(file(), standing, Remove("upstreams", "two"))
    standing = apply_edit(file(), standing, Remove("models", "more"))
    assert Additions() == standing


@pytest.mark.parametrize("part", ["upstreams", "models"])
def test_rejects_edits_of_entries_in_the_file(part: Part) -> None:
    name = "one" if part == "upstreams" else "bge"
    for edit in (Put(part, name, {}), Remove(part, name)):
        with pytest.raises(ConfigError, match=f"{part}.{name}: router.yaml defines it"):
            apply_edit(file(), Additions(), edit)
    # What was added before the file did can be removed.
    standing = Additions({"one": TEI}, {"bge": {"upstream": "two"}})
    assert standing != apply_edit(file(), standing, Remove(part, name))


def test_keeps_upstreams_in_use_and_reports_unknown_entries() -> None:
    standing = Additions({"two": TEI}, {"more": {"upstream": "two"}, "other": {"upstream": "one"}, "odd": 5})
    with pytest.raises(ConfigError, match="models, which go first: more"):
        apply_edit(file(), standing, Remove("upstreams", "two"))
    with pytest.raises(UnknownAddition):
        apply_edit(file(), standing, Remove("models", "none"))


def test_bounds_the_size_of_additions() -> None:
    with pytest.raises(ConfigError, match="more than"):
        apply_edit(file(), Additions(), Put("upstreams", "two", {"model": "x" * WRITTEN_BYTES_MAX}))


async def test_rejects_a_replacement_of_an_old_version() -> None:
    store = AdditionsInMemory()
    first = await store.replace("", Additions({"two": TEI}))

    assert first is not None
    assert await store.replace("", Additions()) is None
    assert first == await store.load()
    assert first.version == await store.version()


def test_added_upstream_equals_one_in_the_file(outside: SecretSources) -> None:
    text = FILE.replace("{one:", '{x: {backend: tei, replicas: ["http://b"], queue_tokens: "9"}, one:')

    assert file(text).upstreams["x"] == read_upstream("x", {**TEI, "queue_tokens": "9"}, outside)
    assert isinstance(read_upstream("x", TEI, outside), UpstreamSettings)
