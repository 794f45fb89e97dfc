"""A whole gateway with the identity of its machine or workload, by the clouds' own libraries."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends.test_connect_failures import closed_port
from tests.fakes.bedrock import REGION, SECRET_KEY, FakeBedrock
from tests.fakes.clouds import FakeAzure
from tests.fakes.google import LOCATION, PROJECT, FakeVertex
from tests.fakes.identities import AUDIENCE, CLIENT, MACHINE_SECRET, ROLE, SUBJECT, TENANT, FakeIdentity
from tests.fakes.server import ErrorReply, FakeServer
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.processes.tls_files import Authority

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
upstreams:
  cloud: {{{cloud}, replicas: ["{address}"], proxy: none, tls: {{ca: {ca}}}}}
  own: {{backend: tei, replicas: ["{own}"]}}
models: {{c: {{upstream: cloud}}, t: {{upstream: own}}}}
"""
VERTEX = f"backend: vertex, model: text-embedding-005, vertex: {{project: {PROJECT}, location: {LOCATION}"
AZURE = "backend: azure, model: small, azure: {entra: true}"
BEDROCK = f'backend: bedrock, model: "amazon.titan-embed-text-v2:0", bedrock: {{region: {REGION}}}'
# Of other identities, which the machine of the test may have.
OTHERS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "NO_GCE_CHECK",
)


@pytest.fixture(autouse=True)
def no_other_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)


class Cloud:
    """A cloud with one identity service. sent: tokens that its API has seen.

    plain, secure: addresses of the service without and with TLS.
    """

    def __init__(self, folder: Path, identity: FakeIdentity, plain: str, secure: str) -> None:
        self.folder = folder
        self.identity = identity
        self.plain = plain
        self.secure = secure
        self.sent: list[str] = []

    def token_file(self) -> str:
        """Write the token of the workload, and return its path."""
        file = self.folder / "token"
        file.write_text(SUBJECT)
        return str(file)

    def check(self, headers: dict[str, str]) -> None:
        """Check that a request has a token that was issued. Raises: ErrorReply."""
        token = headers.get("authorization", "").removeprefix("Bearer ")
        token = headers.get("x-amz-security-token", token)
        if token not in self.identity.issued:
            raise ErrorReply(401, {"error": {"code": "401", "message": f"unknown token {token}"}})
        self.sent.append(token)


class CheckedVertex(FakeVertex):
    """Vertex AI that takes every token of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__("text-embedding-005")
        self.cloud = cloud

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the token. Raises: ErrorReply."""
        del path
        self.cloud.check(headers)


class CheckedAzure(FakeAzure):
    """Azure OpenAI that takes every token of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__()
        self.cloud = cloud

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the token. Raises: ErrorReply."""
        del path
        self.cloud.check(headers)


class CheckedBedrock(FakeBedrock):
    """Amazon Bedrock that takes the signatures of all credentials of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__("amazon.titan-embed-text-v2:0")
        self.cloud = cloud
        self.session_tokens = cloud.identity.issued

    def check_key(self, path: str, headers: dict[str, str]) -> None:
        """Check the session token, besides the signature. Raises: ErrorReply."""
        del path
        self.cloud.check(headers)


def google_machine(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    host = cloud.plain.removeprefix("http://")
    return VERTEX + "}", {"GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}, CheckedVertex(cloud)


def google_account(cloud: Cloud, source: dict[str, Any]) -> tuple[str, dict[str, str], FakeServer]:
    file = cloud.folder / "account.json"
    account = {
        "type": "external_account",
        "audience": AUDIENCE,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{cloud.secure}/google/sts",
        "credential_source": source,
    }
    file.write_text(json.dumps(account))
    return f"{VERTEX}, credentials: {file}}}", {}, CheckedVertex(cloud)


def google_file(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    return google_account(cloud, {"file": cloud.token_file()})


def google_url(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    source = {
        "url": f"{cloud.plain}/google/subject",
        "headers": {"x-secret": MACHINE_SECRET},
        "format": {"type": "json", "subject_token_field_name": "value"},
    }
    return google_account(cloud, source)


def azure_workload(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    variables = {
        "AZURE_TENANT_ID": TENANT,
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_FEDERATED_TOKEN_FILE": cloud.token_file(),
        "AZURE_AUTHORITY_HOST": cloud.secure,
    }
    return AZURE, variables, CheckedAzure(cloud)


def azure_machine(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    return AZURE, {"AZURE_POD_IDENTITY_AUTHORITY_HOST": cloud.plain}, CheckedAzure(cloud)


def azure_service(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    variables = {"IDENTITY_ENDPOINT": f"{cloud.plain}/msi/token", "IDENTITY_HEADER": MACHINE_SECRET}
    return AZURE, variables, CheckedAzure(cloud)


def aws_workload(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    variables = {
        "AWS_ROLE_ARN": ROLE,
        "AWS_WEB_IDENTITY_TOKEN_FILE": cloud.token_file(),
        "AWS_ENDPOINT_URL_STS": cloud.secure,
    }
    return BEDROCK, variables, CheckedBedrock(cloud)


def aws_container(cloud: Cloud) -> tuple[str, dict[str, str], FakeServer]:
    variables = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{cloud.plain}/aws/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": MACHINE_SECRET,
    }
    return BEDROCK, variables, CheckedBedrock(cloud)


IDENTITIES = (
    google_machine,
    google_file,
    google_url,
    azure_workload,
    azure_machine,
    azure_service,
    aws_workload,
    aws_container,
)
Build = Callable[[Cloud], tuple[str, dict[str, str], FakeServer]]


@contextmanager
def running(build: Build, folder: Path, identity: FakeIdentity) -> Iterator[tuple[Served, Cloud]]:
    """Run a gateway, and yield it with the cloud whose API it calls.

    Proxies of the environment lead nowhere: neither the API nor the identity is behind them.
    """
    authority = Authority(folder / "tls")
    with (
        serve_in_thread(identity) as plain,
        serve_in_thread(identity, authority.sign("identity")) as secure,
    ):
        cloud = Cloud(folder, identity, plain, secure)
        settings, variables, api = build(cloud)
        with serve_in_thread(api) as address, serve_in_thread(FakeTei()) as own:
            path, nowhere = folder / "router.yaml", f"http://127.0.0.1:{closed_port()}"
            path.write_text(CONFIG.format(cloud=settings, address=address, own=own, ca=authority.ca))
            proxies = {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": ""}
            proxies |= {name.lower(): value for name, value in proxies.items()}
            files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(folder / "none"))
            gateway = Served(path, files | proxies | variables)
            try:
                yield gateway.wait_until_up(), cloud
            finally:
                identity.opened.set()
                gateway.stop()


def answer(gateway: Served, model: str) -> tuple[int, str]:
    with gateway.client() as client:
        reply = client.post("/v1/embeddings", json={"model": model, "input": "a"})
    return reply.status_code, reply.text


def is_served(gateway: Served, model: str) -> bool:
    return answer(gateway, model)[0] == 200


def reasons_in(gateway: Served) -> list[str]:
    """Return the reasons with which the replica of the cloud went down, from the log."""
    lines = [json.loads(line) for line in gateway.log if line.startswith("{")]
    return [
        line["reason"]
        for line in lines
        if (line["event"], line.get("upstream"), line.get("state")) == ("replica", "cloud", "down")
    ]


@pytest.mark.parametrize("build", IDENTITIES, ids=lambda build: build.__name__)
def test_an_identity_that_fails_then_waits_then_expires(build: Build, tmp_path: Path) -> None:
    identity = FakeIdentity()
    identity.fails, identity.lifetime_s = True, 3
    with running(build, tmp_path, identity) as (gateway, cloud):
        # It refuses: one reason for operators, and a 503 for callers.
        assert wait_until(lambda: is_served(gateway, "t"))
        assert wait_until(lambda: bool(reasons_in(gateway)))
        status, text = answer(gateway, "c")
        assert 503 == status, text
        assert "no_replica" in text
        (reason,) = reasons_in(gateway)
        assert "gives no access token" in reason or "credentials for AWS cannot be read" in reason
        assert "\n" not in reason

        # It does not answer: others are served meanwhile.
        identity.opened.clear()
        identity.fails = False
        assert wait_until(lambda: identity.waiting)
        assert is_served(gateway, "t")
        assert [] == cloud.sent
        identity.opened.set()

        # It answers: its tokens reach the API, and later calls have newer ones.
        assert wait_until(lambda: is_served(gateway, "c"))
        first = cloud.sent[-1]
        assert wait_until(lambda: is_served(gateway, "c") and cloud.sent[-1] != first)
    shown = "".join(gateway.log) + text
    for secret in (SUBJECT, MACHINE_SECRET, SECRET_KEY, "issued-access-token"):
        assert secret not in shown
