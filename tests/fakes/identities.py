"""Identity services of Google, Azure and AWS as ASGI apps: servers of a machine, and exchanges of its tokens.

Source: google-auth, azure-identity and botocore, whose requests they check, and which read their replies.
"""

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

from tests.fakes.bedrock import ACCESS_KEY, SECRET_KEY
from tests.fakes.server import ErrorReply
from tests.waiting import PATIENCE_S

# In the form of a signed token, as clusters give it to a workload.
SUBJECT = "eyJhbGciOiJSUzI1NiJ9.c3ViamVjdC1vZi10aGUtd29ya2xvYWQ.c2lnbmF0dXJlLW9mLXRoZS1jbHVzdGVy"
MACHINE_SECRET = "header-of-the-machine-1234"
AUDIENCE = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/c"
ACCOUNT = "gateway@a-project.iam.gserviceaccount.com"
TENANT = "00000000-0000-0000-0000-000000000001"
CLIENT = "00000000-0000-0000-0000-000000000002"
SCOPE = "https://cognitiveservices.azure.com"
ROLE = "arn:aws:iam::123456789012:role/gateway"
STS_REPLY = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId>
<SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>
<Expiration>{ends}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


class FakeIdentity:
    """Identity service of a cloud.

    issued: its tokens, each valid for `lifetime_s`. fails: it refuses, with what it was sent in its words.
    opened: a request for a token waits for it. waiting: one does.
    """

    def __init__(self) -> None:
        self.lifetime_s = 3600
        self.issued: list[str] = []
        self.fails = False
        self.waiting = False
        self.opened = threading.Event()
        self.opened.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        fields = {
            name: values[0]
            for source in (scope["query_string"], body)
            for name, values in parse_qs(source.decode()).items()
        }
        status, reply = 200, b""
        try:
            reply = self._reply(scope["path"], headers, fields)
        except ErrorReply as error:
            status, reply = error.status, error.body
        kind = b"text/xml" if reply.startswith(b"<") else b"application/json"
        named = [(b"content-type", kind), (b"metadata-flavor", b"Google")]
        await send({"type": "http.response.start", "status": status, "headers": named})
        await send({"type": "http.response.body", "body": reply})

    def _reply(self, path: str, headers: dict[str, str], fields: dict[str, str]) -> bytes:
        if "metadata-flavor" in headers:
            return self._google_metadata(path, headers)
        exchanges = {
            "/google/sts": self._google_exchange,
            "/google/subject": self._google_subject,
            f"/{TENANT}/oauth2/v2.0/token": self._azure_exchange,
            "/metadata/identity/oauth2/token": self._azure_machine,
            "/msi/token": self._azure_service,
            "/": self._aws_exchange,
            "/aws/container": self._aws_container,
        }
        exchange = exchanges.get(path)
        if exchange is None:
            raise ErrorReply(404, {"error": f"no path {path}"})
        return exchange(headers, fields)

    def _issue(self, sent: Any) -> str:
        """Return a new token. sent: what the request for it has. Raises: ErrorReply."""
        self.waiting = True
        assert self.opened.wait(PATIENCE_S)
        self.waiting = False
        if self.fails:
            words = f"was sent {sent}"
            raise ErrorReply(400, {"error": "invalid_grant", "error_description": words, "message": words})
        self.issued.append(f"issued-access-token-{len(self.issued) + 1}")
        return self.issued[-1]

    # --- Google

    def _google_metadata(self, path: str, headers: dict[str, str]) -> bytes:
        if headers["metadata-flavor"] != "Google":
            raise ErrorReply(403, {"error": "no header"})
        # An account is asked for by its alias, then by its name.
        account, _, rest = path.removeprefix("/computeMetadata/v1/instance/service-accounts/").partition("/")
        if account in {"default", ACCOUNT} and rest == "token":
            return self._google_token(headers)
        if account in {"default", ACCOUNT} and not rest:
            return json.dumps({"email": ACCOUNT, "scopes": [], "aliases": ["default"]}).encode()
        if path.endswith(("/project-id", "/universe-domain", "/universe_domain")):
            return b"a-project" if path.endswith("id") else b"googleapis.com"
        if path == "/":
            return b"{}"
        raise ErrorReply(404, b"")

    def _google_token(self, sent: Any) -> bytes:
        token = self._issue(sent)
        return json.dumps(
            {"access_token": token, "expires_in": self.lifetime_s, "token_type": "Bearer"}
        ).encode()

    def _google_subject(self, headers: dict[str, str], _: dict[str, str]) -> bytes:
        if headers.get("x-secret") != MACHINE_SECRET:
            raise ErrorReply(403, {"error": "no header"})
        return json.dumps({"value": SUBJECT}).encode()

    def _google_exchange(self, _: dict[str, str], form: dict[str, str]) -> bytes:
        expected = {
            "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
            "audience": AUDIENCE,
            "scope": "https://www.googleapis.com/auth/cloud-platform",
            "requested_token_type": "urn:ietf:params:oauth:token-type:access_token",
            "subject_token": SUBJECT,
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        }
        if not expected.items() <= form.items():
            raise ErrorReply(400, {"error": "invalid_request", "error_description": f"{sorted(form)}"})
        reply = json.loads(self._google_token(form))
        reply["issued_token_type"] = "urn:ietf:params:oauth:token-type:access_token"
        return json.dumps(reply).encode()

    # --- Azure

    def _azure_exchange(self, _: dict[str, str], form: dict[str, str]) -> bytes:
        expected = {
            "client_assertion": SUBJECT,
            "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
            "client_id": CLIENT,
            "grant_type": "client_credentials",
            "scope": f"{SCOPE}/.default",
        }
        if not expected.items() <= form.items():
            raise ErrorReply(400, {"error": "invalid_request", "error_description": f"{sorted(form)}"})
        token = self._issue(form)
        return json.dumps(
            {"access_token": token, "expires_in": self.lifetime_s, "token_type": "Bearer"}
        ).encode()

    def _azure_machine(self, headers: dict[str, str], query: dict[str, str]) -> bytes:
        if headers.get("metadata") != "true" or query.get("resource") != SCOPE:
            raise ErrorReply(400, {"error": "invalid_request", "error_description": "no header"})
        return self._azure_token(headers)

    def _azure_service(self, headers: dict[str, str], query: dict[str, str]) -> bytes:
        if headers.get("x-identity-header") != MACHINE_SECRET or query.get("resource") != SCOPE:
            raise ErrorReply(400, {"error": "invalid_request", "error_description": "no header"})
        return self._azure_token(headers)

    def _azure_token(self, sent: Any) -> bytes:
        token = self._issue(sent)
        ends = int(datetime.now(UTC).timestamp()) + self.lifetime_s
        reply = {"access_token": token, "expires_on": str(ends), "expires_in": str(self.lifetime_s)}
        return json.dumps(reply | {"resource": SCOPE, "token_type": "Bearer"}).encode()

    # --- AWS

    def _ends(self) -> str:
        return (datetime.now(UTC) + timedelta(seconds=self.lifetime_s)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _aws_exchange(self, _: dict[str, str], form: dict[str, str]) -> bytes:
        expected = {"Action": "AssumeRoleWithWebIdentity", "RoleArn": ROLE, "WebIdentityToken": SUBJECT}
        if not expected.items() <= form.items():
            raise ErrorReply(
                400, b"<ErrorResponse><Error><Code>InvalidParameter</Code></Error></ErrorResponse>"
            )
        try:
            token = self._issue(form)
        except ErrorReply:
            error = f"<Code>InvalidIdentityToken</Code><Message>was sent {form}</Message>"
            words = f"<ErrorResponse><Error>{error}</Error></ErrorResponse>"
            raise ErrorReply(400, words.encode()) from None
        return STS_REPLY.format(key=ACCESS_KEY, secret=SECRET_KEY, token=token, ends=self._ends()).encode()

    def _aws_container(self, headers: dict[str, str], _: dict[str, str]) -> bytes:
        if headers.get("authorization") != MACHINE_SECRET:
            raise ErrorReply(403, {"message": "no header"})
        token = self._issue(headers)
        reply = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": token}
        return json.dumps(reply | {"Expiration": self._ends()}).encode()
