"""Differences of two configs are reported by path, without any value that may be secret."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.diff import ConfigChange, compare_configs, with_live_settings
from gateway.config.schema import Config
from gateway.tenants.keyring import key_digest
from tests.config_texts import parsed

CONFIG = f"""
upstreams:
  one: {{backend: tei, replicas: ["http://a"], api_key: old-secret, headers: {{x-token: old-secret}}}}
  two: {{backend: tei, replicas: ["http://b"]}}
models: {{bge: {{upstream: one, limits: {{tokens_per_minute: 100}}}}, other: {{upstream: two}}}}
tenants:
  acme:
    keys: ["{key_digest("a")}", {{digest: "{key_digest("b")}", id: ci}}]
    limits: {{requests_per_day: 5}}
"""


def changes(old: str, new: str) -> list[str]:
    return [
        str(change) for change in compare_configs(parsed(CONFIG), parsed(CONFIG.replace(old, new))).changes
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("http://a", "http://c", ["upstreams.one.replicas changed"]),
        ("  two: {", "  three: {backend: tei, replicas: ['http://c']}\n  two: {", ["upstreams.three added"]),
        (", other: {upstream: two}", "", ["models.other removed"]),
        ("minute: 100", "minute: 250", ["models.bge.limits.tokens_per_minute changed (100 → 250)"]),
        ("requests_per_day: 5", "", ["tenants.acme.limits.requests_per_day removed"]),
        (key_digest("a"), key_digest("c"), ["tenants.acme.keys[0] removed", "tenants.acme.keys[0] added"]),
        ("id: ci", "id: ci, models: [bge]", ["tenants.acme.keys[ci] changed"]),
        ("  acme:", "  globex: {}\n  acme:", ["tenants.globex added"]),
        ("upstream: one", "upstream: one, rerank: false", ["models.bge.rerank changed (true → false)"]),
        ("upstreams:\n", "engine: {idle_s: 9}\nupstreams:\n", ["engine.idle_s changed (absent → 9.0)"]),
        ("backend: tei", "backend: tei", []),
    ],
)
def test_reports_each_difference_by_its_path(old: str, new: str, expected: list[str]) -> None:
    assert expected == changes(old, new)


def test_reports_no_text_value() -> None:
    found = changes("old-secret", "new-secret")

    assert ["upstreams.one.api_key changed", "upstreams.one.headers.x-token changed"] == found


def test_settings_of_sockets_and_processes_need_a_restart() -> None:
    running = parsed(CONFIG)
    wanted = parsed(
        "listen: 127.0.0.1:9\ndrain_s: 3\nlogs: {access: false}\n"
        "tracing: {}\nlimits: {inputs: 7, body_bytes: 9}\n"
        "admin: {keys: [], listen: '127.0.0.1:10'}\n" + CONFIG.replace("http://b", "http://c")
    )
    found = compare_configs(running, wanted)
    merged = with_live_settings(running, wanted)

    assert ["limits.inputs", "upstreams.two.replicas"] == [change.path for change in found.changes]
    assert {"listen", "drain_s", "logs.access", "tracing", "limits.body_bytes", "admin.listen"} == {
        change.path for change in found.needs_restart
    }
    assert () == compare_configs(merged, wanted).changes
    assert found.needs_restart == compare_configs(merged, wanted).needs_restart
    assert (running.listen, 7) == (merged.listen, merged.limits.inputs)


@given(st.text(min_size=1), st.text(min_size=1))
def test_never_shows_a_changed_text(old: str, new: str) -> None:
    config = parsed(CONFIG)

    def with_key(key: str) -> Config:
        upstream = msgspec.structs.replace(config.upstreams["one"], api_key=key)
        return msgspec.structs.replace(config, upstreams={**config.upstreams, "one": upstream})

    expected = () if old == new else (ConfigChange("upstreams.one.api_key", "changed"),)
    assert expected == compare_configs(with_key(old), with_key(new)).changes
