"""Adapter of Azure OpenAI and of Cohere's rerankers in Foundry: addresses and keys, on OpenAI's adapter.

Source: Microsoft's reference of Azure OpenAI (versions by date, and v1), and LiteLLM's transformation for
Foundry. The name of a model is that of its deployment.
"""

from urllib.parse import quote, urlsplit

import msgspec

from backends.azure.entra import entra_token
from backends.azure.kind import AZURE, AzureSettings
from backends.contract import ReplicaSpec
from backends.http.client import Authorizer
from backends.http.egress import OpenClient, open_egress
from backends.openai.adapter import OpenAIBackend
from backends.openai.settings import ApiSettings
from backends.openai.shapes import origin_of

# Cohere's own body and reply; of an endpoint whose address has a path, `rerank` below it.
RERANK_PATH = "/providers/cohere/v2/rerank"


def has_path(address: str) -> bool:
    """Return True for the address of one API of a resource, such as https://name/v1."""
    return bool(urlsplit(address).path.strip("/"))


def address_of(spec: ReplicaSpec, settings: AzureSettings) -> str:
    """Return the base URL of a deployment's requests; one with a path is taken as it is."""
    if has_path(spec.address):
        return spec.address
    base = origin_of(spec.address)
    if settings.api_version is None:
        return f"{base}/openai/v1"
    deployment = quote(spec.model or "", safe="")
    return f"{base}/openai/deployments/{deployment}?api-version={settings.api_version}"


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> OpenAIBackend:
    """Return a client of the deployment that the spec names."""
    settings = spec.settings if isinstance(spec.settings, AzureSettings) else AzureSettings()
    reranks = spec.task == "rerank"
    api = ApiSettings(
        "azure",
        rerank=("rerank" if has_path(spec.address) else RERANK_PATH) if reranks else None,
        task="rerank" if reranks else "embed",
        extra_body=spec.extra_body,
    )
    headers = dict(spec.headers)
    if reranks and AZURE.key_header in headers:
        headers["authorization"] = f"Bearer {headers.pop(AZURE.key_header)}"
    origin = msgspec.structs.replace(spec, address=origin_of(spec.address), headers=headers)
    authorizer: Authorizer | None = entra_token(spec) if settings.entra else None
    own = msgspec.structs.replace(spec, address=address_of(spec, settings), settings=api)
    return OpenAIBackend(open_client(origin, authorizer), own)
