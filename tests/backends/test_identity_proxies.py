"""Access tokens of the clouds' own libraries through real proxies, with credentials."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.azure.entra import entra_token
from backends.bedrock.signing import AwsAuthorizer
from backends.contract import ReplicaSpec, TlsFiles
from backends.contract.errors import CredentialRefused, ReplicaUnavailable
from backends.google.credentials import bearer_token
from backends.http.client import Authorizer, OutgoingRequest
from tests.backends.test_connect_failures import closed_port
from tests.fakes.bedrock import REGION
from tests.fakes.hooks import until
from tests.fakes.identities import AUDIENCE, CLIENT, ROLE, SUBJECT, TENANT, FakeIdentity
from tests.fakes.proxies import KINDS, PASSWORD, TUNNEL_WORDS, USER, ProxyKind, program_of, running_proxy
from tests.fakes.threaded import serve_in_thread
from tests.processes.tls_files import Authority

REQUEST = OutgoingRequest("POST", "https://api.test/x", {"host": "api.test"}, b"{}")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Leave no identity and no proxy in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AZURE_CLIENT_SECRET"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    (tmp_path / "token").write_text(SUBJECT)
    return monkeypatch


def google(spec: ReplicaSpec, address: str, folder: Path, _: pytest.MonkeyPatch) -> Authorizer:
    account = {
        "type": "external_account",
        "audience": AUDIENCE,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{address}/google/sts",
        "credential_source": {"file": str(folder / "token")},
    }
    (folder / "account.json").write_text(json.dumps(account))
    return bearer_token(spec, str(folder / "account.json"))


def azure(spec: ReplicaSpec, address: str, folder: Path, environment: pytest.MonkeyPatch) -> Authorizer:
    environment.setenv("AZURE_TENANT_ID", TENANT)
    environment.setenv("AZURE_CLIENT_ID", CLIENT)
    environment.setenv("AZURE_FEDERATED_TOKEN_FILE", str(folder / "token"))
    environment.setenv("AZURE_AUTHORITY_HOST", address)
    return entra_token(spec)


def aws(spec: ReplicaSpec, address: str, folder: Path, environment: pytest.MonkeyPatch) -> Authorizer:
    environment.setenv("AWS_ROLE_ARN", ROLE)
    environment.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "token"))
    environment.setenv("AWS_ENDPOINT_URL_STS", address)
    return AwsAuthorizer(spec, REGION, None, takes_keys=False)


Open = Callable[[ReplicaSpec, str, Path, pytest.MonkeyPatch], Authorizer]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("open_identity", [google, azure, aws])
async def test_tokens_are_fetched_through_the_proxy_of_the_upstream(
    open_identity: Open, kind: ProxyKind, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if program_of(kind) is None:
        pytest.skip(f"no {kind} here")
    identity, authority = FakeIdentity(), Authority(tmp_path / "tls")
    with (
        serve_in_thread(identity, authority.sign("identity")) as address,
        running_proxy(kind, has_users=True, authority=authority) as (url, log),
    ):
        proxy = url.replace("://", f"://{USER}:{PASSWORD}@")
        spec = ReplicaSpec("https://api.test", tls=TlsFiles(str(authority.ca)), proxy=proxy)
        authorizer = open_identity(spec, address, tmp_path, environment)
        if open_identity is aws and kind == "microsocks":
            # botocore has no SOCKS.
            with pytest.raises(CredentialRefused) as caught:
                await authorizer.headers(REQUEST)
            assert "no proxy of SOCKS" in caught.value.message
            assert PASSWORD not in caught.value.explanation
        else:
            headers = await authorizer.headers(REQUEST)
            token = headers.get("x-amz-security-token") or headers["authorization"].removeprefix("Bearer ")
            assert [token] == identity.issued
        await authorizer.aclose()
        if identity.issued:
            await until(lambda: TUNNEL_WORDS.get(kind, "CONNECT") in log.read_text())


@pytest.mark.parametrize("open_identity", [google, azure, aws])
@pytest.mark.parametrize("is_configured", [True, False])
async def test_a_proxy_of_an_identity_that_is_not_there_shows_no_password(
    open_identity: Open, is_configured: bool, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxy = f"http://{USER}:{PASSWORD}@127.0.0.1:{closed_port()}"
    address = "https://identity.test"
    spec = ReplicaSpec("https://api.test", proxy=proxy if is_configured else None)
    if not is_configured:
        environment.setenv("HTTPS_PROXY", proxy)
    authorizer = open_identity(spec, address, tmp_path, environment)
    with pytest.raises(CredentialRefused) as caught:
        await authorizer.headers(REQUEST)
    await authorizer.aclose()
    assert "proxy" in caught.value.explanation.lower()
    assert PASSWORD not in caught.value.explanation


@pytest.mark.parametrize("open_identity", [google, azure, aws])
async def test_a_refused_proxy_of_an_identity_is_one_reason_without_the_password(
    open_identity: Open, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if program_of("squid") is None:
        pytest.skip("no squid here")
    identity, authority = FakeIdentity(), Authority(tmp_path / "tls")
    with (
        serve_in_thread(identity, authority.sign("identity")) as address,
        running_proxy("squid", has_users=True) as (url, _),
    ):
        proxy = url.replace("://", f"://{USER}:wrong-password@")
        spec = ReplicaSpec("https://api.test", tls=TlsFiles(str(authority.ca)), proxy=proxy)
        authorizer = open_identity(spec, address, tmp_path, environment)
        with pytest.raises(CredentialRefused) as caught:
            await authorizer.headers(REQUEST)
        await authorizer.aclose()
    assert [] == identity.issued
    assert "wrong-password" not in caught.value.explanation
    assert "proxy" in caught.value.explanation.lower()


@pytest.mark.parametrize("open_identity", [google, azure])
@pytest.mark.parametrize("proxy", ["http://", "squid://proxy:1", "http://proxy:port"])
async def test_an_identity_behind_a_proxy_that_is_no_address_has_the_reason(
    open_identity: Open, proxy: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("HTTPS_PROXY", proxy)
    authorizer = open_identity(
        ReplicaSpec("https://api.test"), "https://identity.test", tmp_path, environment
    )
    with pytest.raises(ReplicaUnavailable, match="no address such as"):
        await authorizer.headers(REQUEST)
    await authorizer.aclose()
