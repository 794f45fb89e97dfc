"""Claims of tokens: what tables make of them, ids of users, and settings that a file may not have."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import ClaimMapping
from gateway.errors import TenantUnknown, TokenRefused
from gateway.tenants.keyring import StoredKey
from gateway.tenants.sign_on.claims import stored_key_of
from gateway.tenants.sign_on.token_form import is_token

TENANT = {"claim": "org"}
CLAIMS = {"sub": "alice", "org": "acme", "exp": 2_000_000_000}


def stored(mapping: dict[str, Any], **claims: Any) -> StoredKey:
    """Return what claims stand for. mapping: as in router.yaml."""
    parsed = msgspec.convert({"tenant": TENANT, **mapping}, ClaimMapping)
    return stored_key_of({**CLAIMS, **claims}, "okta", parsed)


def test_without_tables_a_user_is_limited_as_its_tenant() -> None:
    expected = StoredKey("okta:alice", "", "acme", expires_s=2e9, scopes=None, models=None, limits={})

    assert expected == stored({})


@pytest.mark.parametrize(
    ("user", "id_"),
    [
        ("alice", "okta:alice"),
        ("auth0|5f7c8ec7c33c6c004bbafe82", "okta:auth0|5f7c8ec7c33c6c004bbafe82"),
        ("a.b+c@example.org", "okta:a.b+c@example.org"),
        ("with space", None),
        ("x" * 65, None),
        ("\x1f\n\u202e", None),
        ("\ud800", None),
        ("a:b", None),
        ("sha256-0123", None),
    ],
)
def test_ids_of_users_are_short_and_safe(user: str, id_: str | None) -> None:
    found = stored({}, sub=user).id
    if id_ is None:
        assert (len("okta:sha256-") + 32, True) == (len(found), found.isascii())
        assert found != stored({}, sub=user + "x").id
    else:
        assert id_ == found


def test_another_claim_may_identify_the_user() -> None:
    assert "okta:bob" == stored({"key": ["profile", "name"]}, profile={"name": "bob"}).id
    with pytest.raises(TokenRefused, match="identifies its user"):
        stored({"key": ["profile", "name"]}, profile="bob")


@pytest.mark.parametrize(
    ("org", "expected"),
    [
        ("one", "a"),
        (["two", "one"], "a"),
        (["two"], "b"),
        (["*"], "rest"),
        ("none", "rest"),
        (None, "rest"),
        (1, "rest"),
        ([1, {"a": 1}], "rest"),
    ],
)
def test_the_first_entry_of_a_table_applies(org: Any, expected: str) -> None:
    values = {"one": "a", "two": "b", "*": "rest"}

    assert expected == stored({"tenant": {"claim": "org", "values": values}}, org=org).tenant


@pytest.mark.parametrize("org", ["three", ["three"], [], None, 7, {"one": "a"}])
def test_no_entry_is_no_tenant(org: Any) -> None:
    with pytest.raises(TenantUnknown, match="no tenant is mapped"):
        stored({"tenant": {"claim": "org", "values": {"one": "a"}}}, org=org)


@pytest.mark.parametrize("org", [["acme", "beta"], [], None, 7, "operators", ["operators"]])
def test_without_a_table_the_claim_names_one_tenant_and_no_operators(org: Any) -> None:
    with pytest.raises(TenantUnknown, match="name no tenant, or several"):
        stored({}, org=org)


def test_scopes_of_a_table_add_up() -> None:
    values = {"r": ["embed", "rerank"], "w": ["rerank", "admin"], "*": ["tokenize"]}
    mapping = {"scopes": {"claim": "groups", "values": values}}

    assert ("embed", "rerank", "admin") == stored(mapping, groups=["w", "r", "x"]).scopes
    assert ("embed", "rerank") == stored(mapping, groups="x r").scopes
    assert ("tokenize",) == stored(mapping, groups="admin").scopes
    assert () == stored({"scopes": {"claim": "groups", "values": {"r": ["embed"]}}}).scopes


NAMES = [
    "former admins",
    "admins readonly",
    "admins\tx",
    "x\nadmins",
    "x\xa0admins",
    "x\u2003admins",
    " admins",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_whose_name_contains_the_operators_makes_no_operator(name: str) -> None:
    mapping = {"scopes": {"claim": "groups", "values": {"admins": ["admin", "metrics"], "*": ["embed"]}}}

    assert ("embed",) == stored(mapping, groups=["users", name]).scopes
    assert ("embed",) == stored(mapping, groups=[name]).scopes
    assert ("admin", "metrics") == stored(mapping, groups=["users", "admins"]).scopes
    assert () == stored({"scopes": {"claim": "groups"}}, groups=["embed rerank"]).scopes


@pytest.mark.parametrize("space", ["\t", "\n", "\xa0", "\u2003", "\x0b"])
def test_a_claim_of_one_text_is_split_at_spaces_only(space: str) -> None:
    mapping = {"scopes": {"claim": "scope", "values": {"admins": ["admin"], "r": ["embed"]}}}

    assert ("embed",) == stored(mapping, scope=f"r x{space}admins").scopes
    assert ("admin", "embed") == stored(mapping, scope="r  admins").scopes
    assert ("embed",) == stored({"scopes": {"claim": "scope"}}, scope=f"embed rerank{space}classify").scopes


def test_scopes_in_words_of_the_issuer_are_operations_only() -> None:
    found = stored({"scopes": {"claim": "scope"}}, scope="openid embed admin metrics tokenize embed")

    assert ("embed", "tokenize") == found.scopes
    assert () == stored({"scopes": {"claim": "scope"}}).scopes


def test_models_and_limits_come_from_claims() -> None:
    tables = {
        "models": {"claim": "plan", "values": {"small": ["a"], "large": ["a", "b"]}},
        "limits": {"claim": "plan", "values": {"small": {"requests_per_minute": 5}, "large": {}}},
    }

    small, large = stored(tables, plan="small"), stored(tables, plan="large")
    assert (("a",), {"requests_per_minute": 5}) == (small.models, small.limits)
    assert (("a", "b"), {}) == (large.models, large.limits)
    assert ("m", "n") == stored({"models": {"claim": "models"}}, models=["m", "n"]).models
    assert () == stored({"models": {"claim": "models"}}).models
    with pytest.raises(TenantUnknown, match="no limits are mapped"):
        stored(tables, plan="huge")


@pytest.mark.parametrize(
    ("credential", "expected"),
    [
        ("eyJhbGciOiJSUzI1NiJ9.e30.AA", True),
        ("eyAiYWxnIjogMX0.e30.AA", True),
        ("ewogImFsZyI6IDF9.e30.AA", True),
        ("gw_ops_0123456789", False),
        ("gw_ey.J_0123", False),
        ("eyJhbGciOiJSUzI1NiJ9", False),
        ("sk-test.ey", False),
    ],
)
def test_tokens_and_keys_are_told_apart(credential: str, expected: bool) -> None:
    assert expected == is_token(credential)


FILE = """
upstreams: {{embedder: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: embedder}}}}
sign_on:
  {name}:
    issuer: {issuer}
    audience: {audience}
    algorithms: {algorithms}
    claims: {claims}
    console: {console}
  other: {{issuer: "https://taken.example.org", audience: [a], claims: {{tenant: {{claim: org}}}}}}
"""
VALID = {
    "name": "okta",
    "issuer": "https://login.example.org/realms/a",
    "audience": "[a]",
    "algorithms": "[RS256, EdDSA]",
    "claims": "{tenant: {claim: org}}",
    "console": "{client_id: c}",
}
HTTPS = "needs https; http only on this machine's loopback"
PROBLEMS = {
    "name": ("name", "'a:b'", "", "a name has up to 32 letters, digits, - and _"),
    "http": ("issuer", "http://login.example.org", "issuer", HTTPS),
    "http to a private address": ("issuer", "http://10.0.0.1", "issuer", HTTPS),
    "file": ("issuer", "file:///etc/passwd", "issuer", "not a URL"),
    "no host": ("issuer", "'https://'", "issuer", "not a URL"),
    "user name": ("issuer", "https://a:b@login.example.org", "issuer", "without a user name"),
    "fragment": ("issuer", "'https://login.example.org/#a'", "issuer", "and a fragment"),
    "query": ("issuer", "https://login.example.org/?a=b", "issuer", "has a query"),
    "port": ("issuer", "https://login.example.org:99999", "issuer", "not a URL"),
    "space": ("issuer", "'https://login.example.org/a b'", "issuer", "not a URL"),
    "issuer twice": ("issuer", "https://taken.example.org", "issuer", "is also sign_on."),
    "no audience": ("audience", "[]", "audience", "at least 1"),
    "empty audience": ("audience", "['']", "audience", "an empty text"),
    "shared secret": ("algorithms", "[HS256]", "algorithms[0]", "HS256"),
    "none": ("algorithms", "['none']", "algorithms[0]", "none"),
    "no algorithm": ("algorithms", "[]", "algorithms", "at least 1"),
    "no tenant": ("claims", "{}", "claims.tenant", "is missing"),
    "empty claim": ("claims", "{tenant: {claim: ''}}", "claims.tenant", "is empty"),
    "empty path": ("claims", "{tenant: {claim: []}}", "claims.tenant", "is empty"),
    "unknown scope": (
        "claims",
        "{tenant: {claim: o}, scopes: {claim: g, values: {a: [root]}}}",
        "claims.scopes.values.a[0]",
        "root",
    ),
    "unknown model": (
        "claims",
        "{tenant: {claim: o}, models: {claim: g, values: {a: [bgee]}}}",
        "claims.models.values.a[0]",
        "did you mean 'bge'",
    ),
    "unknown limit": (
        "claims",
        "{tenant: {claim: o}, limits: {claim: g, values: {a: {calls: 1}}}}",
        "claims.limits.values.a.calls",
        "unknown limit",
    ),
    "no client": ("console", "{client_id: ''}", "console.client_id", "is empty"),
    "no openid": ("console", "{client_id: c, scopes: [email]}", "console.scopes", "openid is missing"),
}


@pytest.mark.parametrize(
    "issuer", ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:1", VALID["issuer"]]
)
def test_an_issuer_has_tls_or_is_on_this_machine(issuer: str) -> None:
    config = parse_config(FILE.format(**{**VALID, "issuer": f"'{issuer}'"}), {}, Path.cwd())

    assert issuer == config.sign_on["okta"].issuer


@pytest.mark.parametrize(("key", "value", "path", "message"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_mistakes_are_reported_where_they_are(key: str, value: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(FILE.format(**{**VALID, key: value}), {}, Path.cwd())

    prefix = "sign_on.a:b" if key == "name" else "sign_on."
    (problem, *others) = caught.value.problems
    assert [] == others
    assert problem.path.startswith(prefix)
    assert problem.path.endswith(path), problem
    assert message in problem.message
