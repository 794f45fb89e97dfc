"""Notes of `gateway check` on settings that do less than they seem to."""

from pathlib import Path

import pytest

from gateway.cli.check import check
from gateway.config.load import parse_config
from gateway.config.notes import ignored_keys

UPSTREAMS = 'upstreams: {t: {backend: tei, replicas: ["http://t:1"]%s}}\n'
CACHE = "models: {m: {upstream: t, cache: true}}\ncache: {ttl_s: 60}\n"
SIGN_ON = """
models: {m: {upstream: t}}
sign_on:
  corp:
    issuer: https://login.example.org
    audience: [gateway]
    claims: {tenant: {claim: [groups], values: {dev: acmee, admins: operators, all: acme}}}
"""
TENANT = 'tenants: {acme: {keys: ["sha256:' + 64 * "0" + '"]}}\n'


def notes_of(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path = folder / "router.yaml"
    path.write_text(text)
    assert 0 == check(path, {})
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines[1:] if "admin.keys" not in line]


def test_a_cache_of_single_texts_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [note] = notes_of(tmp_path, UPSTREAMS % "" + CACHE, capsys)

    assert note.startswith("  models.m.cache: keeps only texts that come alone")
    assert "`upstreams.t.tokenizer`" in note
    assert not notes_of(tmp_path, UPSTREAMS % ", tokenizer: org/model" + CACHE, capsys)


def test_a_sign_on_table_to_an_unknown_tenant_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = UPSTREAMS % "" + SIGN_ON + TENANT
    [note] = notes_of(tmp_path, text, capsys)

    assert note.startswith("  sign_on.corp.claims.tenant.values.dev: there is no tenant 'acmee' in this file")
    assert not notes_of(tmp_path, text + "quotas: {store: 'redis://redis:6379'}\n", capsys)


def test_tenants_without_keys_that_end_the_first_key_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = UPSTREAMS % "" + "models: {m: {upstream: t}}\n"
    [note] = notes_of(tmp_path, plain + "tenants: {acme: {}}\n", capsys)

    assert note.startswith("  tenants: they end the first key, and none has a key in this file")
    assert not notes_of(tmp_path, plain, capsys)
    assert not notes_of(tmp_path, plain + 'tenants: {acme: {keys: ["sha256:' + 64 * "0" + '"]}}\n', capsys)


LIMITED = 'tenants: {acme: {keys: ["sha256:' + 64 * "0" + '"], limits: {%s: 5}}}\n'


@pytest.mark.parametrize("limit", ["tokens_per_day", "requests_per_month", "budget_per_month"])
def test_a_limit_that_a_restart_may_forget_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    text = UPSTREAMS % "" + "currency: EUR\nmodels: {m: {upstream: t, price_per_million_tokens: 1}}\n"
    [note] = notes_of(tmp_path, text + LIMITED % limit, capsys)

    assert note.startswith(f"  tenants.acme.limits.{limit}: is forgotten at a restart")
    for kept in ("quotas: {store: 'redis://redis:6379'}\n", "state_dir: state\n"):
        assert not notes_of(tmp_path, text + LIMITED % limit + kept, capsys)
    assert not notes_of(tmp_path, text + LIMITED % "tokens_per_hour", capsys)


def test_keys_of_the_engine_have_no_effect_on_a_server() -> None:
    ignored = "pooling: mean, dtype: int8, preload: false"
    text = "upstreams: {t: {%s, " + ignored + "}}\n" + SIGN_ON.partition("sign_on")[0] + TENANT
    server, engine = (
        list(ignored_keys(parse_config(text % kind, {}, Path.cwd())))
        for kind in ("backend: tei, replicas: ['http://t:1']", "backend: torch, model: acme/model")
    )

    assert {"upstreams.t.pooling", "upstreams.t.dtype", "upstreams.t.preload"} == {
        problem.path for problem in server
    }
    assert {"has no effect: it is for torch, and this is tei"} == {problem.message for problem in server}
    assert not engine


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        ("backend: openai, vendor: mistral, model: m", True),
        ('backend: openai, replicas: ["https://api.openai.com/v1"], model: m', True),
        ("backend: cohere, model: m", True),
        ("backend: gemini, model: m", True),
        ('backend: azure, replicas: ["https://a.openai.azure.com"], model: m', True),
        ("backend: nim, model: m, nim: {hosted: true}", True),
        # The credentials of the machine, a header, a server of the same API.
        ('backend: azure, replicas: ["https://a.openai.azure.com"], model: m, azure: {entra: true}', False),
        ("backend: bedrock, model: m, bedrock: {region: us-east-1}", False),
        ("backend: vertex, model: m, vertex: {project: p}", False),
        ("backend: cohere, model: m, headers: {x-key: k}", False),
        ('backend: cohere, model: m, replicas: ["http://cohere.proxy:80"]', False),
        ('backend: openai, model: m, replicas: ["http://ollama:11434"]', False),
    ],
)
def test_a_vendor_without_credentials_is_noted(
    settings: str, *, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = "models: {m: {upstream: u}}\n"
    found = notes_of(tmp_path, f"upstreams: {{u: {{{settings}}}}}\n{models}", capsys)

    expected = (
        ["  upstreams.u.api_key: is empty: the vendor refuses requests without a key"] if is_noted else []
    )
    assert expected == [note.partition("; ")[0] for note in found]
    assert not notes_of(tmp_path, f"upstreams: {{u: {{{settings}, api_key: '1'}}}}\n{models}", capsys)


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        ("model: rerank-v3.5", True),
        ("model: a-name, task: rerank", True),
        ("model: rerank-v3.5, tokenizer: org/model", False),
        ("model: embed-v4.0", False),
    ],
)
def test_a_reranker_of_cohere_that_cannot_join_is_noted(
    settings: str, *, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"upstreams: {{u: {{backend: cohere, api_key: k, {settings}}}}}\nmodels: {{m: {{upstream: u}}}}\n"
    found = notes_of(tmp_path, text, capsys)

    assert is_noted == any("a reranker without them does not join" in note for note in found)
