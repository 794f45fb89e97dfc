"""router.yaml is read, filled and typed, or refused with every problem at once and without secrets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from backends.recipe.options import RerankPrompt
from gateway.config.load import load_config, parse_config
from gateway.config.local_files import EXTRAS, file_problems, upstream_file_problems
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Key, UpstreamSettings, UpstreamTls, host_and_port, limit_problems
from gateway.tenants.keyring import key_digest
from tests.config_texts import parsed, problems_of

INVALID = Path(__file__).parent.parent / "configs" / "invalid"
SECRET = "hunter2"

UPSTREAMS = 'upstreams: {tei: {backend: tei, replicas: ["http://tei:8080"]}}\n'
MINIMAL = UPSTREAMS + "models: {bge: {upstream: tei}}\n"

# Each file in configs/invalid, and the paths of all its problems.
FAULTS: dict[str, set[str]] = {
    "admin_on_the_callers_port": {"admin.listen", "admin.keys[0]"},
    "admin_without_a_port": {"admin.listen"},
    "certificates_of_two_tenants": {
        "tls.certificate",
        "tls.client_ca",
        "tenants.acme.certificates[1]",
        "tenants.acme.certificates[2]",
        "tenants.acme.certificates[3]",
        "tenants.globex.certificates[0]",
        "tenants.globex.certificates[2]",
    },
    "certificates_without_an_authority": {
        "tls.certificate",
        "tls.client_certificates",
        "admin.certificates",
        "tenants.acme.certificates",
    },
    "empty": {"the file"},
    "file_that_is_not_there": {"upstreams.tei.api_key"},
    "files_of_tls_that_are_not_there": {
        "tls.certificate",
        "tls.client_ca",
        "upstreams.tei.tls.ca",
        "upstreams.half.tls",
        "upstreams.other.tls",
    },
    "five_mistakes": {
        "listen",
        "upstreams.one.backend",
        "upstreams.two.replicas",
        "models.a.upstream",
        "tenants.acme.limits.tokens_per_fortnight",
    },
    "key_given_twice": {"line 3"},
    "key_given_twice_as_text_and_number": {"line 4"},
    "key_anybody_would_guess": {"admin.keys[0]", "tenants.acme.keys[1]", "tenants.acme.keys[2]"},
    "key_in_the_clear": {"tenants.acme.keys[0]"},
    "key_in_the_clear_with_an_id": {"tenants.acme.keys[0]"},
    "key_in_the_place_of_a_tenant": {"tenants.acme"},
    "key_of_two_tenants": {"tenants.globex.keys[0]"},
    "limit_of_zero": {"tenants.acme.limits.tokens_per_day", "tenants.acme.limits.requests_in_flight"},
    "media_that_cannot_be_fetched": {
        "media.fetch.hosts[0]",
        "media.fetch.hosts[1]",
        "media.fetch.private[1]",
        "media.fetch.private[2]",
        "media.fetch.request_bytes",
    },
    "former_keys": {
        "upstreams.tei.batch_inputs",
        "upstreams.tei.request_tokens",
        "upstreams.tei.batch_tokens",
        "upstreams.tei.batch_bytes",
        "models.bge.upstream",
    },
    "limits_of_models": {
        "models.bge.limits.tokens_per_day",
        "models.bge.limits.requests_per_fortnight",
        "models.bge.limits.inputs_per_day",
        "tenants.acme.model_limits.bgee",
        "tenants.acme.model_limits.bge.bytes_per_day",
        "tenants.acme.model_limits.bge.tokens_per_day",
    },
    "list": {"the file"},
    "listen_on_a_bare_ipv6_address": {"listen"},
    "listen_without_a_port": {"listen"},
    "many_faults": {
        "listen",
        "colour",
        "quotas.store",
        "upstreams.tei.api_key",
        "upstreams.tei.dtype",
        "upstreams.broken.backend",
        "upstreams.lonely.replicas",
        "models.bge.truncate",
        "models.cross.upstream",
        "models.typo.upstrem",
        "defaults.embed",
        "tenants.acme.keys[0]",
        "tenants.acme.models[0]",
        "tenants.acme.limits.tokens_per_day",
        "tenants.acme.limits.bytes_per_day",
    },
    "model_named_like_an_operation": {"models.org/embed", "models.rerank"},
    "model_with_an_empty_segment": {"models.org//bge", "models./bge", "models.bge/"},
    "no_backend": {"upstreams.tei.backend"},
    "no_device_for_the_engine": {"upstreams.engine.device"},
    "openvino_where_it_cannot_compute": {"upstreams.half.runtime", "upstreams.graphics.runtime"},
    "unknown_device_of_the_engine": {"upstreams.engine.device"},
    "no_model_for_the_engine": {"upstreams.engine.model"},
    "no_replicas": {"upstreams.tei.replicas"},
    "infinity_without_a_tokenizer": {"upstreams.inf.tokenizer"},
    "no_upstreams": {"upstreams"},
    "code_without_a_commit": {"upstreams.branch.code_revision", "upstreams.untrusted.code_revision"},
    "not_yaml": {"line 3"},
    "origins_that_no_browser_sends": {
        "cors.origins[2]",
        "cors.origins[3]",
        "cors.origins[4]",
        "cors.origins[5]",
    },
    "password_in_a_replica": {"upstreams.tei.replicas[0]"},
    "password_in_the_store": {"quotas.store"},
    "placeholder_of_no_known_form": {"upstreams.tei.api_key", "upstreams.tei.replicas[0]"},
    "any_name_for_two_models": {"defaults.any_name"},
    "replica_is_no_url": {
        "upstreams.tei.replicas[0]",
        "upstreams.tei.replicas[2]",
        "upstreams.tei.replicas[3]",
    },
    "replica_listed_twice": {"upstreams.tei.replicas[2]"},
    "template_without_a_text": {"upstreams.embedder.instruction_template"},
    "replicas_of_the_engine": {"upstreams.engine.replicas"},
    "traces_to_nowhere": {"tracing.endpoint", "tracing.sample", "tracing.link", "logs.format"},
    "unknown_backend": {"upstreams.tei.backend"},
    "unknown_default": {"defaults.embed", "defaults.rerank"},
    "unknown_key": {"upstream"},
    "unknown_key_of_an_upstream": {"upstreams.tei.replica"},
    "unknown_limit": {"tenants.acme.limits.tokens_per_fortnight"},
    "unknown_model_of_a_tenant": {"tenants.acme.models[1]"},
    "unknown_upstream": {"models.bge.upstream"},
    "unset_variables": {"listen", "upstreams.tei.api_key", "models.bge.deadline_s"},
    "unset_variables_in_lists": {
        "upstreams.tei.replicas[0]",
        "tenants.acme.keys[0]",
        "tenants.acme.models[0]",
    },
    "upstream_without_a_body": {"upstreams.tei"},
    "upstreams_as_a_list": {"upstreams"},
    "workers_with_quotas_in_memory": {"workers"},
    "wrong_types": {
        "workers",
        "drain_s",
        "upstreams.tei.replicas",
        "upstreams.tei.request_inputs",
        "upstreams.tei.policy",
        "upstreams.tei.headers.x",
        "models.bge.truncate",
        "models.bge.deadline_s",
        "models.bge.rerank",
    },
    "yaml_that_holds_itself": {"the file"},
}


def faults_of(name: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(INVALID / f"{name}.yaml", {})
    return caught.value.problems


@pytest.mark.parametrize("name", FAULTS)
def test_reports_every_problem_once_at_its_path_without_secrets(name: str) -> None:
    found = faults_of(name)

    assert sorted(FAULTS[name]) == sorted(problem.path for problem in found)
    assert SECRET not in "\n".join(f"{problem.path} {problem.message}" for problem in found)


SIGNED_ON = "sign_on: {a: {issuer: 'https://a.example.org', audience: [g], claims: {tenant: {claim: t}}}}\n"


@pytest.mark.parametrize(
    ("text", "extra", "path"),
    [
        ("tracing: {}\n", "otlp", "tracing"),
        ("grpc: {listen: '127.0.0.1:0'}\n", "grpc", "grpc"),
        (SIGNED_ON, "oidc", "sign_on"),
        ("", "grpc", "upstreams.tei.replicas"),
    ],
)
def test_a_section_needs_its_optional_packages(text: str, extra: str, path: str) -> None:
    minimal = MINIMAL.replace("http://", "grpc://") if path.startswith("upstreams") else MINIMAL
    config = parsed(text + minimal)
    for package in ("no_such_package", "no.such.package"):
        [problem] = file_problems(config, {**EXTRAS, extra: (package,)})
        assert path == problem.path
        assert f"needs the extra `{extra}`" in problem.message

    assert [] == list(file_problems(config, {**EXTRAS, extra: ("msgspec",)}))
    assert [] == list(file_problems(parsed(MINIMAL), {**EXTRAS, extra: ("no_such_package",)}))


def test_table_lists_every_invalid_file() -> None:
    assert sorted([*FAULTS, "not_utf8"]) == sorted(file.stem for file in INVALID.iterdir())


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("unknown_upstream", "tei"),
        ("unknown_key", "upstreams, models, defaults, tenants"),
        ("unknown_backend", "tei, infinity, vllm, openai, cohere, jina, voyage, perplexity, azure, bedrock"),
        ("infinity_without_a_tokenizer", "a hub id, or the path"),
        ("former_keys", "`batch_inputs` is now `request_inputs`"),
        ("unknown_limit", "<requests|tokens|inputs|images|batch_tokens>_per_<second|minute|hour|day|month>"),
        ("unknown_default", "bge"),
        ("listen_without_a_port", "127.0.0.1:8080"),
        ("replica_is_no_url", "http://host:port"),
        ("key_in_the_clear", "64 hex digits"),
        ("key_anybody_would_guess", "`gateway keys create` creates one"),
        ("unset_variables", "${NOWHERE_SET:-default}"),
        ("no_replicas", "http://host:port"),
        ("admin_on_the_callers_port", "a port of its own"),
        ("origins_that_no_browser_sends", "https://app.example.org"),
        ("files_of_tls_that_are_not_there", "No such file"),
    ],
)
def test_message_names_the_allowed_values(name: str, allowed: str) -> None:
    assert allowed in faults_of(name)[0].message


@pytest.mark.parametrize(("name", "reason"), [("not_utf8", "not UTF-8"), ("missing", "No such file")])
def test_reports_an_unreadable_file(name: str, reason: str) -> None:
    found = faults_of(name)

    assert [str(INVALID / f"{name}.yaml")] == [problem.path for problem in found]
    assert reason in found[0].message


def test_error_text_lists_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(INVALID / "many_faults.yaml", {})

    assert len(FAULTS["many_faults"]) == len(str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("written", "environment", "filled"),
    [
        ("${TEI_KEY}", {"TEI_KEY": "abc"}, "abc"),
        ("${TEI_KEY:-none}", {"TEI_KEY": "abc"}, "abc"),
        ("${TEI_KEY:-none}", {}, "none"),
        ("${TEI_KEY:-none}", {"TEI_KEY": ""}, "none"),
        ("${TEI_KEY:-}", {}, ""),
        ("${TEI_KEY:-a:-b}", {}, "a:-b"),
        ("x-${A}-${B:-b}-y", {"A": "a"}, "x-a-b-y"),
        ("$${TEI_KEY}", {"TEI_KEY": "abc"}, "${TEI_KEY}"),
        ("$TEI_KEY $ {}", {"TEI_KEY": "abc"}, "$TEI_KEY $ {}"),
        ("${TEI_KEY}", {"TEI_KEY": "${OTHER}", "OTHER": "abc"}, "${OTHER}"),
        ("${TEI_KEY}", {"TEI_KEY": "a: [b, *c"}, "a: [b, *c"),
        ("${url:TEI_KEY}", {"TEI_KEY": "p@s/s:w#%41\n"}, "p%40s%2Fs%3Aw%23%2541"),
        ("${url:TEI_KEY:-a b}", {}, "a%20b"),
        ("${url:-default}", {"url": "x@y"}, "x@y"),
    ],
)
def test_fills_placeholders_once(written: str, environment: dict[str, str], filled: str) -> None:
    text = MINIMAL.replace("backend: tei", f"backend: tei, api_key: '{written}'")

    assert filled == parsed(text, **environment).upstreams["tei"].api_key


@pytest.mark.parametrize("absolute", [True, False])
def test_strips_the_last_line_end_of_a_secret_file(tmp_path: Path, *, absolute: bool) -> None:
    (tmp_path / "secret").write_text("s3cret\n", encoding="utf-8")
    named = tmp_path / "secret" if absolute else "secret"
    (tmp_path / "router.yaml").write_text(
        MINIMAL.replace("backend: tei", f"backend: tei, api_key: '${{file:{named}}}'"), encoding="utf-8"
    )

    assert "s3cret" == load_config(tmp_path / "router.yaml", {}).upstreams["tei"].api_key


def test_converts_filled_text_to_the_type_of_its_setting() -> None:
    config = parsed(
        MINIMAL + "workers: ${W}\ndrain_s: ${D}\nlimits: {inputs: '${I}'}\n", W="1", D="2.5", I="7"
    )

    assert (1, 2.5, 7) == (config.workers, config.drain_s, config.limits.inputs)


def test_reports_filled_text_of_the_wrong_type() -> None:
    assert ["workers"] == [problem.path for problem in problems_of(MINIMAL + "workers: ${W}\n", W="two")]


def test_fills_placeholders_in_values_only() -> None:
    config = parsed(UPSTREAMS + "models: {'${NAME}': {upstream: tei}}\n", NAME="bge")

    assert ["${NAME}"] == list(config.models)


def test_entry_with_a_problem_can_still_be_referred_to() -> None:
    text = "upstreams: {tei: {backend: tie}}\nmodels: {bge: {upstream: tei, x: 1}}\ndefaults: {embed: bge}\n"

    assert {"upstreams.tei.backend", "models.bge.x"} == {problem.path for problem in problems_of(text)}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("./model", "/srv/gateway/model"),
        ("../model", "/srv/model"),
        ("/models/minilm", "/models/minilm"),
        ("~/minilm", "~/minilm"),
        ("org/model", "org/model"),
    ],
)
def test_resolves_paths_from_the_folder_of_the_file(written: str, expected: str) -> None:
    config = parsed(
        f"upstreams:\n  engine: {{backend: torch, model: {written}}}\n"
        f"  tei: {{backend: tei, replicas: ['http://tei'], model: {written}, tokenizer: {written}}}\n"
        "models: {a: {upstream: engine}, b: {upstream: tei}}\n"
    )

    assert expected == config.upstreams["engine"].model
    assert expected == config.upstreams["tei"].tokenizer
    # The model of a remote upstream is its served name, not a path on this machine.
    assert written == config.upstreams["tei"].model


def test_prefers_a_folder_to_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    text = "upstreams: {engine: {backend: torch, model: org/model}}\nmodels: {a: {upstream: engine}}\n"

    found = parse_config(text, {}, tmp_path).upstreams["engine"].model
    assert str((tmp_path / "org" / "model").resolve()) == found


def test_merged_mapping_can_be_overridden() -> None:
    config = parsed(
        "upstreams:\n"
        "  one: &one {backend: tei, replicas: ['http://one'], request_inputs: 4}\n"
        "  two: &two {<<: *one, request_inputs: 8}\n"
        "  three: {<<: *two, request_inputs: 16}\n"
        "models: {bge: {upstream: one}}\n"
    )

    assert [4, 8, 16] == [upstream.request_inputs for upstream in config.upstreams.values()]
    assert ("http://one",) == config.upstreams["three"].replicas


@pytest.mark.parametrize("place", ["{a: 1, a: 2}", "{a: {b: 1, c: 2, b: 3}}", "[{a: 1, a: 1}]"])
def test_refuses_a_duplicate_key_at_any_depth(place: str) -> None:
    found = problems_of(MINIMAL + f"defaults: {place}\n")

    (twice,) = [problem for problem in found if problem.path == "line 3"]
    assert "given twice" in twice.message


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: 1\n",
        "api_key: {{ SECRET }}\n",
        "a: !!python/object/apply:os.getcwd []\n",
        "\x00",
        "a: *nobody\n",
        "[" * 9000,
    ],
)
def test_refuses_unsupported_yaml(text: str) -> None:
    found = problems_of(text)

    assert 1 == len(found)
    assert "not valid YAML" in found[0].message


def test_absent_settings_have_defaults() -> None:
    config = parsed(MINIMAL)

    assert ("127.0.0.1:8080", 1, "memory") == (config.listen, config.workers, config.quotas.store)
    assert (33_554_432, 2048) == (config.limits.body_bytes, config.limits.inputs)
    assert (None, True, 60.0) == (
        config.models["bge"].truncate,
        config.models["bge"].rerank,
        config.models["bge"].deadline_s,
    )


def test_tenant_lists_keys_with_and_without_an_id() -> None:
    plain, named = key_digest("one"), key_digest("two")
    config = parsed(MINIMAL + f"tenants: {{acme: {{keys: ['{plain}', {{digest: '{named}', id: ci}}]}}}}\n")

    assert (plain, Key(named, "ci")) == config.tenants["acme"].keys


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:8080", ("::1", 8080)),
        (":8080", ("0.0.0.0", 8080)),
    ],
)
def test_splits_listen_address_into_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert expected == host_and_port(listen)
    assert listen == parsed(MINIMAL + f"listen: '{listen}'\n").listen


def test_reports_a_port_that_is_too_large() -> None:
    [problem] = problems_of(MINIMAL + "listen: '127.0.0.1:99999'\n")

    assert "'127.0.0.1:99999': the port is too large; the highest is 65535" == problem.message


@pytest.mark.parametrize("listen", ["", "8080", "host", "host:", "host:http", "host:70000", "::1:80", "a:-1"])
def test_refuses_an_invalid_listen_address(listen: str) -> None:
    assert ["listen"] == [problem.path for problem in problems_of(MINIMAL + f"listen: '{listen}'\n")]


@pytest.mark.parametrize(
    ("key", "value"),
    [("api_key", [SECRET]), ("api_key", {SECRET: 1}), ("headers", SECRET), ("headers", [SECRET])],
)
def test_message_hides_a_secret_of_the_wrong_type(key: str, value: Any) -> None:
    found = problems_of(MINIMAL.replace("backend: tei", f"backend: tei, {key}: {value}"))

    assert [f"upstreams.tei.{key}"] == [problem.path for problem in found]
    assert SECRET not in found[0].message


@pytest.mark.parametrize(
    "url", ["http://user:%s@tei:80", "http://user:%s/x@tei:80", "http://user@tei:80", "http://user:80/%s@tei"]
)
def test_refuses_credentials_in_a_replica_url(url: str) -> None:
    text = MINIMAL.replace("http://tei:80", url.replace("%s", SECRET))
    (problem,) = problems_of(text)

    assert "upstreams.tei.replicas[0]" == problem.path
    assert SECRET not in problem.message


@pytest.mark.parametrize(
    "store",
    [
        "redis://:%s/x@redis:6379/0",
        "redis://:%s#x@redis:6379/0",
        "redis://:%s?x@redis:6379/0",
        "redis://user:12/%s@redis:6379/0",
        "redis://redis:99999/0",
        "redis://redis:port/0",
        "redis+cluster://:%s/x@one,two:7000",
        "redis+sentinel://:%s#x@one:26379,two/name/0",
        "redis+sentinel://one:26379,two:port/name/0",
    ],
)
def test_reports_an_unreadable_store_without_its_password(store: str) -> None:
    (problem,) = problems_of(f"quotas: {{store: '{store.replace('%s', SECRET)}'}}\n{MINIMAL}")

    assert "quotas.store" == problem.path
    assert "%2F" in problem.message
    assert SECRET not in problem.message


@pytest.mark.parametrize(
    "store",
    [
        "redis://redis",
        "redis://[::1]:6379/0",
        "rediss://user:pa%2Fss%23%40@redis:6379/1?ssl_ca_certs=/etc/ca.pem",
        "redis+cluster://one,two:7000",
        "redis+sentinel://:secret@one:26379,two/name/0",
    ],
)
def test_accepts_valid_store_urls(store: str) -> None:
    assert store == parsed(f"quotas: {{store: '{store}'}}\n{MINIMAL}").quotas.store


PARTS = """
listen: ${LISTEN}
quotas: {store: "redis://127.0.0.1:1/0"}
upstreams: {one: {backend: tei, replicas: ["http://tei:80"], api_key: "${TEI_KEY}"}}
models: {bge: {upstream: one}}
tenants: {acme: {}}
tracing: {endpoint: "${COLLECTOR}"}
"""


def test_ignores_problems_of_sections_that_a_command_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(PARTS)
    config = load_config(tmp_path / "router.yaml", {}, ("quotas", "tenants"))

    assert ("redis://127.0.0.1:1/0", ["acme"]) == (config.quotas.store, list(config.tenants))


@pytest.mark.parametrize("section", ["listen", "upstreams", "tracing"])
def test_reports_problems_of_the_sections_that_a_command_uses(tmp_path: Path, section: str) -> None:
    (tmp_path / "router.yaml").write_text(PARTS)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "router.yaml", {}, (section,))

    assert {section} == {problem.path.partition(".")[0] for problem in raised.value.problems}


def test_reports_an_unknown_section_to_every_command(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(PARTS + "quota: {}\n")
    with pytest.raises(ConfigError, match="quota: unknown key"):
        load_config(tmp_path / "router.yaml", {}, ("listen",))


def template(written: str) -> str:
    return f"upstreams: {{x: {{backend: torch, model: a/b, rerank_template: {written}}}}}"


def test_rerank_template_is_a_family_or_a_prompt() -> None:
    prompt = "{prompt: '{query} {document}', positive: 'yes', negative: 'no'}"
    found = [
        parsed(template(written) + "\nmodels: {m: {upstream: x}}\n").upstreams["x"].rerank_template
        for written in ("bge-gemma", prompt, "null")
    ]

    assert ["bge-gemma", RerankPrompt("{query} {document}", "yes", "no"), None] == found


@pytest.mark.parametrize(
    ("written", "path", "message"),
    [
        ("upstream: {}", "upstream", "unknown key; did you mean 'upstreams'? allowed here: "),
        ("models: {m: {upstream: tie}}", "models.m.upstream", "no upstream 'tie'; did you mean 'tei'?"),
        ("upstreams: {x: {backend: pytorch}}", "upstreams.x.backend", "; did you mean 'torch'?"),
        ("upstreams: {x: {backend:torch}}", "upstreams.x.backend", "a space is missing after the colon"),
        ("listen: 9705", "listen", "expected text, not a whole number"),
        (
            'upstreams: {x: {backend: tei, replicas: "http://a"}}',
            "upstreams.x.replicas",
            "expected a list, not text",
        ),
        ("workers: many", "workers", "expected a whole number, not text"),
        (template("qwen4"), "upstreams.x.rerank_template", "'qwen4' is not one of: qwen3, mxbai-v2,"),
        (template("{prompts: q}"), "upstreams.x.rerank_template.prompts", "did you mean 'prompt'?"),
        (
            template("{prompt: a, positive: yes}"),
            "upstreams.x.rerank_template.positive",
            "expected text, not",
        ),
        (template("{prompt: '{query}'}"), "upstreams.x.rerank_template", "{document} once"),
        (
            "upstreams: {x: {backend: tei, replicas: ['http://a'], rerank_template: qwen3}}",
            "upstreams.x.rerank_template",
            "this is for torch",
        ),
        (
            "upstreams: {x: {backend: tei, replicas: ['http://a'], adapter: law}}",
            "upstreams.x.adapter",
            "this is for torch",
        ),
    ],
)
def test_a_mistake_is_explained_in_the_words_of_the_file(written: str, path: str, message: str) -> None:
    (problem,) = [problem for problem in problems_of(_merged(written)) if problem.path == path]
    assert message in problem.message


TYPO_AT_THE_TOP = """\
listn: nowhere
upstream:
  tei: {backend: tie, replica: ["http://tei"]}
  other:
    backend: tei
    replicas:
      - http://a
      - 7
models:
  org/v1.5: {upstream: tei, deadline: 5}
  bge: {upstream: tie}
tenant:
  acme: {limits: {tokens_per_day: 0}}
listen: 127.0.0.1:1
workers: 0
workers: 1
"""


def test_a_typo_at_the_top_hides_nothing_below() -> None:
    found = {(problem.line, problem.path): problem.message for problem in problems_of(TYPO_AT_THE_TOP)}

    assert [
        (1, "listn"),
        (2, "upstream"),
        (3, "upstreams.tei.replica"),
        (3, "upstreams.tei.backend"),
        (8, "upstreams.other.replicas[1]"),
        (10, "models.org/v1.5.deadline"),
        (11, "models.bge.upstream"),
        (12, "tenant"),
        (13, "tenants.acme.limits.tokens_per_day"),
        (None, "line 16"),
    ] == list(found)
    assert "did you mean 'upstreams'?" in found[2, "upstream"]
    assert "did you mean 'deadline_s'?" in found[10, "models.org/v1.5.deadline"]
    assert "expected a whole number, at least 1" == found[13, "tenants.acme.limits.tokens_per_day"]


def test_problems_of_other_files_are_reported_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(
        MINIMAL + "\nlisten: nowhere\nadmin:\n  files: ./nothing\ntls: {certificate: a.pem}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "router.yaml", {})

    found = [(problem.line, problem.path) for problem in raised.value.problems]
    assert [(4, "listen"), (6, "admin.files"), (7, "tls.private_key")] == found
    assert "line 4: listen: 'nowhere': " in str(raised.value)


def test_lines_follow_merges_and_names_with_dots() -> None:
    text = (
        "upstreams:\n"
        "  one: &one\n    backend: tei\n    policy: fastest\n    replicas: ['http://one']\n"
        "  two.5: {<<: *one, request_inputs: 0}\n"
        "models: {bge: {upstream: one}}\n"
    )

    assert [
        (4, "upstreams.one.policy"),
        (4, "upstreams.two.5.policy"),
        (6, "upstreams.two.5.request_inputs"),
    ] == [(problem.line, problem.path) for problem in problems_of(text)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("drain_s: -1", "expected a number, above 0"),
        ("tenants: {a: {keys: [{digest: x, expires: soon}]}}", "not a date such as 2027-01-31"),
        ("media: {fetch: {hosts: []}}", "expected a list of length at least 1"),
        ("quotas: {gateways: 2.5}", "expected a whole number, not a number"),
        ("limits: {inputs: null}", "expected a whole number, not nothing"),
        ("trusted_proxies: [10.0.0.0/8, 5]", "expected text, not a whole number"),
        ("logs: yes", "expected a mapping, not true or false"),
    ],
)
def test_types_and_bounds_are_in_the_words_of_the_file(written: str, expected: str) -> None:
    assert [expected] == [problem.message for problem in problems_of(f"{MINIMAL}{written}\n")]


def test_thousands_of_problems_are_found_in_seconds() -> None:
    names = "".join(f"  m{index}.a.b.c.d: {{upstream: tie, modelx: 1}}\n" for index in range(3000))
    found = problems_of(f"{UPSTREAMS}models:\n{names}")

    assert set(range(3, 3003)) == {problem.line for problem in found}


def _merged(written: str) -> str:
    """Return a valid file in which one section is replaced."""
    section = written.partition(":")[0]
    return "\n".join(
        [*(line for line in MINIMAL.splitlines() if not line.startswith(f"{section}:")), written]
    )


def test_a_key_without_a_space_shows_no_secret() -> None:
    text = MINIMAL.replace("backend: tei,", f"backend: tei, api_key:{SECRET},")
    shown = "\n".join(map(str, problems_of(text)))

    assert "api_key" in shown
    assert SECRET not in shown


@pytest.mark.parametrize("missing", ["certificate", "private_key"])
def test_problem_names_the_missing_file_of_tls(tmp_path: Path, missing: str) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("certificate", "private_key")}
    for name, path in files.items():
        if name != missing:
            path.write_text("")
    tls = UpstreamTls(certificate=str(files["certificate"]), private_key=str(files["private_key"]))

    [problem] = upstream_file_problems(UpstreamSettings(backend="tei", tls=tls), "upstreams.u")
    assert f"upstreams.u.tls.{missing}" in str(problem)
    assert "No such file or directory" in str(problem)


def test_words_that_yaml_reads_as_switches_are_names() -> None:
    config = parse_config(MINIMAL + "tenants: {no: {}, on: {}, yes: {}}\n", {}, Path())

    assert ["no", "on", "yes"] == list(config.tenants)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n  b: tei\n    c: 1", "line 3: not valid YAML: it is indented deeper than line 2"),
        ("a:\n  b:\n    c: 1\n   d: 2", "line 4: not valid YAML: `d` is not indented as the entries"),
        ("a: 1\nupstreams\n  b: 1", "line 2: not valid YAML: `upstreams` has no colon behind it"),
        ("a:\n  one\n    b: 1", "line 2: not valid YAML: `one` has no colon behind it"),
        ("a:\n  b:1\n  c: 1", "line 2: not valid YAML: `b` has no space behind its colon"),
        ("a:\n\tb: 1", "line 2: not valid YAML: it is indented by a tab"),
        ("a: {b: 1\nc: 2\nd: 3", "line 1: not valid YAML: what begins here with `{` is not closed"),
        ('a: "b\nc: 2\nd: 3', "line 1: not valid YAML: a quotation mark is not closed"),
        ("a:\n  - b\n - sk-Secret", "line 3: not valid YAML: this line is not indented"),
        ("a: b: c", "line 1: not valid YAML: there are two colons in one entry"),
    ],
)
def test_names_the_line_whose_syntax_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(f"{text}\n")
    assert str(caught.value).startswith(problem)
    assert "Secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "meant"),
    [
        ("token_per_day", "did you mean 'tokens_per_day'?"),
        ("tokens_per_week", "did you mean 'tokens_per_day' or 'tokens_per_month'?"),
        ("request_in_flight", "did you mean 'requests_in_flight'?"),
        ("xyzzy", "unknown limit; allowed:"),
    ],
)
def test_an_unknown_limit_is_answered_with_the_one_that_was_meant(limit: str, meant: str) -> None:
    assert meant in limit_problems({limit: 1})[limit]


def test_a_key_in_the_clear_is_answered_with_the_way_to_its_digest() -> None:
    message = faults_of("key_in_the_clear")[0].message
    assert 'printf %s "$KEY" | sha256sum' in message


@pytest.mark.parametrize(
    ("link", "is_valid"),
    [
        ("https://jaeger.example/trace/{trace_id}", True),
        ("http://10.0.0.7:3000/explore?left=%7B%22query%22:%22{trace_id}%22%7D", True),
        ("https://jaeger.example?trace={trace_id}#spans", True),
        ("https://jaeger.example/trace", False),
        ("https://{trace_id}.example/", False),
        ("https://user:secret@jaeger.example/{trace_id}", False),
        ("javascript:alert('{trace_id}')", False),
        ("//jaeger.example/{trace_id}", False),
        ("https://jaeger.example/a b/{trace_id}", False),
        ("", False),
    ],
)
def test_a_link_to_traces_is_an_address_with_their_id(link: str, is_valid: bool) -> None:
    text = f"""
tracing: {{link: {json.dumps(link)}}}
upstreams: {{tei: {{backend: tei, replicas: ["http://tei:8080"]}}}}
models: {{bge: {{upstream: tei}}}}
"""
    if is_valid:
        tracing = parse_config(text, {}, Path.cwd()).tracing
        assert tracing is not None
        assert link == tracing.link
        return
    with pytest.raises(ConfigError) as caught:
        parse_config(text, {}, Path.cwd())
    assert ["tracing.link"] == [problem.path for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        (
            "backend: mistral, model: m",
            "backend",
            "'mistral' is not one of these; write `backend: openai, vendor: mistral`",
        ),
        (
            "backend: openai, vendor: cohere, model: m",
            "vendor",
            "'cohere' is not one of these; write `backend: cohere` without `vendor`",
        ),
        ("backend: openai, vendor: mistrall, model: m", "vendor", "did you mean 'mistral'?"),
        ("backend: nim, model: m, nim: {hosted: perhaps}", "nim.hosted", "expected true or false"),
    ],
)
def test_a_wrong_vendor_is_one_problem_with_its_remedy(settings: str, path: str, message: str) -> None:
    text = f"upstreams: {{u: {{{settings}}}}}\nmodels: {{m: {{upstream: u}}}}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, {}, Path())
    [problem] = caught.value.problems

    assert f"upstreams.u.{path}" == problem.path
    assert message in problem.message


def test_the_hint_on_an_unset_variable_of_a_url_keeps_its_form() -> None:
    with pytest.raises(ConfigError, match=re.escape("or write ${url:PROXY_PASSWORD:-default}")):
        parsed(MINIMAL.replace("backend: tei", "backend: tei, api_key: '${url:PROXY_PASSWORD}'"))
