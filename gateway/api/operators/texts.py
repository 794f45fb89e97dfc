"""Texts of the operators' own API in the OpenAPI document."""

from importlib.resources import files
from typing import Any, Final

import msgspec

from backends.kinds import KINDS
from gateway.api.operators.admin import EndUserName
from gateway.api.operators.keys import KeyRequest, RotateRequest
from gateway.api.operators.manager import RegisterModel
from gateway.api.operators.replicas import ReplicaBody, VerifyBody
from gateway.api.operators.sign_in import SignInCode
from gateway.declared.host import CreateInstance

# Sections of router.yaml that operators send.
SECTIONS: Final[tuple[str, ...]] = (
    *("CanarySettings", "MirrorSettings", "ModelSettings", "ModelUpstream", "RerankPrompt"),
    *("UpstreamSettings", "UpstreamTls", "VectorSpaceSettings"),
    *(kind.settings.__name__ for kind in KINDS.values() if kind.settings is not None),
)
TAGS: Final[dict[str, str]] = {
    "Probes": "Health and metrics for orchestrators; they need no key.",
    "Instances": "Model servers on the gateway's host, as in TEI Manager; they need the scope `admin`.",
    "Operators": "Keys, tenants, models and others; they need the scope `admin`, or `admin:read` to read.",
}
EXAMPLES: Final[dict[type[msgspec.Struct], Any]] = {
    CreateInstance: {"name": "minilm", "model_id": "sentence-transformers/all-MiniLM-L6-v2"},
    KeyRequest: {"tenant": "search"},
    RotateRequest: {"overlap": "24h"},
    EndUserName: {"tenant": "search", "end_user": "ann@acme.example"},
    ReplicaBody: {"upstream": "bge-m3", "replica": "http://tei-0:8080"},
    SignInCode: {
        "name": "staff",
        "code": "SplxlOBeZQQYbYS6WxSbIA",
        "code_verifier": "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk",
        "nonce": "n-0S6_WzA2Mj-for-one-sign-in",
        "redirect_uri": "https://gateway.example.org/ui",
    },
    RegisterModel: {"model_id": "BAAI/bge-m3"},
    VerifyBody: {"upstreams": ["bge-m3"]},
}


def _meanings_of_settings() -> dict[str, str]:
    """Return the meanings of keys of router.yaml, as docs/configuration.md states them."""
    schema = msgspec.json.decode(files("gateway.config").joinpath("router.schema.json").read_bytes())
    return {
        f"{section}.{key}": part["description"]
        for section in SECTIONS
        for key, part in schema["$defs"][section]["properties"].items()
    }


MEANINGS: Final[dict[str, str]] = {
    **_meanings_of_settings(),
    "defaults": "Operation → model of requests that name none. By default those of the gateway.",
    "expires": "Day or time, in UTC, at which the key expires. By default it does not expire.",
    "id": "Identifier of the key. By default it is generated.",
    "limits": "Limits of the key, in addition to those of its tenant: name of the limit → amount.",
    "models": "Models that the key may call. By default all models of its tenant.",
    "replica": "Address of the replica, as `replicas` of its upstream lists it.",
    "scopes": "Groups of paths that the key may call. By default those that compute.",
    "tenant": "Tenant to which the key belongs.",
    "upstream": "Name of the upstream.",
    "upstreams": "Names of the upstreams whose replicas are compared.",
    "CreateInstance.device": "Device of the model, such as `cpu` or `cuda:0`.",
    "CreateInstance.extra_args": "Further arguments, if the command's template has a place for them.",
    "CreateInstance.gpu_id": "Number of the GPU: for an engine the device `cuda:<number>`.",
    "CreateInstance.kind": "`engine`, or a name among `manager.commands`; by default `manager.kind`.",
    "CreateInstance.max_batch_tokens": "Most tokens of one batch.",
    "CreateInstance.max_concurrent_requests": (
        "For a command; an engine ignores it, because the gateway's queue bounds its requests."
    ),
    "CreateInstance.model_id": "Hub id, or path of a folder below `admin.files`.",
    "CreateInstance.name": "Name of the instance, and of its model unless it joins an upstream.",
    "CreateInstance.pooling": "Pooling of an embedding model.",
    "CreateInstance.port": "Port of a command's server on the loopback interface; absent, a free one.",
    "CreateInstance.prometheus_port": "Port of a command's own metrics.",
    "CreateInstance.startup_timeout_secs": "Time after which an instance that is not ready has failed.",
    "CreateInstance.upstream": "Upstream that the instance joins; absent, one of its own name.",
    "RotateRequest.id": "Identifier of the successor. By default it is generated.",
    "RotateRequest.overlap": "Time for which the old key stays valid, such as `90m`, `24h` or `7d`.",
    "RegisterModel.model_id": "Id of the model at the Hub.",
    "SignInCode.name": "Name of the issuer in `sign_on`.",
    "SignInCode.code": "Code that the issuer has added to the address of the page.",
    "SignInCode.code_verifier": "Verifier of PKCE, whose digest began the sign-in.",
    "SignInCode.nonce": "Nonce that began the sign-in; the ID token has it too.",
    "SignInCode.redirect_uri": "Address that the issuer has sent the user back to.",
    "TenantPatch.certificates": "Client certificates that stand for a key. They replace those before.",
    "TenantPatch.limits": "Limits of the tenant: name of the limit → amount.",
    "TenantPatch.model_limits": "Limits by model, in place of the model's own.",
    "TenantPatch.end_user_limits": "Limits of each of its end users, where `end_users` is set.",
    "EndUserName.tenant": "Tenant whose end user it is.",
    "EndUserName.end_user": "Name as requests state it, or the digest that logs and usage show.",
    "TenantPatch.models": "Models that the tenant may call. By default all.",
    "TenantPatch.weight": "Share of a busy model, next to the weights of other tenants.",
    "TenantPatch.priority": "Class of requests that state none: `interactive` before `bulk`.",
    "TenantPatch.queue_tokens": "Most tokens that may wait for one model.",
    "TenantPatch.join": "Whether its texts may share an upstream request with those of other tenants.",
}
